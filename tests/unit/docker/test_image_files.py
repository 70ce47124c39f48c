"""The image's files: lint, the versions it pins, and its scripts run for real."""

from __future__ import annotations

import http.server
import importlib.metadata
import json
import os
import re
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from dsv4.cli.main import build_app
from typer.testing import CliRunner

from tests.unit.docker.tools import ROOT, run, tool

DOCKER = ROOT / "docker"


def test_hadolint_accepts_the_dockerfile() -> None:
    result = run([tool("hadolint"), DOCKER / "Dockerfile"])
    assert result.returncode == 0, result.stdout
    assert result.stdout == ""


def test_shellcheck_accepts_the_scripts() -> None:
    result = run([tool("shellcheck"), *sorted(DOCKER.glob("*.sh"))])
    assert result.returncode == 0, result.stdout


def test_every_dependency_but_torch_is_pinned_for_the_image() -> None:
    declared = [line for line in importlib.metadata.requires("dsv4-triton") or [] if "extra ==" not in line]
    required = {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in declared}
    assert "torch" in required
    pinned = {}
    for line in (DOCKER / "constraints.txt").read_text().splitlines():
        name, separator, version = line.partition("==")
        assert separator, f"constraints.txt: {line!r} is not an exact version"
        pinned[name.lower().replace("_", "-")] = version
    assert required - {"torch"} <= set(pinned)
    assert "torch" not in pinned, "torch follows the base image (torch_npu must match CANN), so TORCH names it"


def test_the_image_copies_only_what_the_context_admits() -> None:
    admitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in (DOCKER / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert any(source == name or source.startswith(name + "/") for name in admitted), source
                assert (ROOT / source).exists() or source.startswith("examples/"), f"{source} does not exist"


@pytest.mark.parametrize("profile", ["cpu", "npu"])
def test_compose_accepts_each_profile(profile: str) -> None:
    command = [
        tool("docker-compose"),
        "-f",
        DOCKER / "compose.yaml",
        "--profile",
        profile,
        "config",
        "--format",
        "json",
    ]
    result = run(command, env={**os.environ, "DSV4_MODEL_DIR": "/srv/checkpoint"})
    assert result.returncode == 0, result.stderr
    service = json.loads(result.stdout)["services"][profile]
    assert service["read_only"] is True
    assert service["command"][0] == "serve"
    if profile == "npu":
        devices = {device["target"] for device in service["devices"]}
        assert devices == {f"/dev/davinci{i}" for i in range(8)} | {
            "/dev/davinci_manager",
            "/dev/devmm_svm",
            "/dev/hisi_hdc",
        }
        models = [volume for volume in service["volumes"] if volume["target"] == "/models/dsv4"]
        assert models[0]["source"] == "/srv/checkpoint"
        assert models[0]["read_only"] is True


def test_compose_publishes_on_loopback_and_knows_no_secret() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    for service in compose["services"].values():
        assert all(port.startswith("${DSV4_BIND:-127.0.0.1}:") for port in service["ports"])
        assert not any(re.search("KEY|TOKEN|SECRET|PASSWORD", name) for name in service.get("environment", {}))


@pytest.fixture
def readiness_server() -> Iterator[tuple[str, list[int]]]:
    """An HTTP server whose answer is the status in the returned list."""
    status = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0])
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/health/ready", status
    server.shutdown()
    server.server_close()


def test_healthcheck_follows_readiness(readiness_server: tuple[str, list[int]]) -> None:
    url, status = readiness_server

    def exit_status(address: str) -> int:
        environment = {**os.environ, "DSV4_HEALTH_URL": address, "http_proxy": "http://127.0.0.1:9"}
        return run([sys.executable, DOCKER / "healthcheck.py"], env=environment).returncode

    assert exit_status(url) == 0
    status[0] = 503
    assert exit_status(url) == 1
    assert exit_status("http://127.0.0.1:9/health/ready") == 1


def test_entry_point_becomes_dsv4_with_its_arguments(tmp_path: Path) -> None:
    command = tmp_path / "dsv4"
    command.write_text('#!/bin/sh\nprintf "%s|" "$@"\nexit 7\n')
    command.chmod(0o755)
    result = run(
        [DOCKER / "entrypoint.sh", "serve", "--speculative-config", '{"method":"mtp"}'],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    assert result.stdout == 'serve|--speculative-config|{"method":"mtp"}|'
    assert result.returncode == 7


def test_upstream_packages_are_installed_from_the_context_only(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    context = tmp_path / "upstream"
    (context / "wheels").mkdir(parents=True)
    wheel = context / "wheels" / "pypto-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pypto/__init__.py", "ORIGIN = 'context'\n")
        archive.writestr("pypto-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: pypto\nVersion: 9.9\n")
        archive.writestr("pypto-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("pypto-9.9.dist-info/RECORD", "")
    package = context / "pypto-serving" / "pypto_serving"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    environment = {"PATH": os.environ["PATH"], "PIP_INDEX_URL": "http://127.0.0.1:9/none"}
    result = run([DOCKER / "install_upstream.sh", tmp_path / "venv", context], env=environment)
    assert result.returncode == 0, result.stderr
    probe = "import pypto, pypto_serving; print(pypto.ORIGIN, pypto_serving.__file__)"
    found = run([tmp_path / "venv" / "bin" / "python", "-c", probe]).stdout.split()
    assert found == ["context", str(package / "__init__.py")]


def test_upstream_step_does_nothing_without_packages(tmp_path: Path) -> None:
    result = run([DOCKER / "install_upstream.sh", tmp_path / "no-venv", DOCKER])
    assert (result.returncode, result.stdout) == (0, "")


def commands_that_serve() -> dict[str, list[str]]:
    """Arguments of `dsv4` in the image and in the compose file, with the defaults of their variables."""
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    image = re.search(r"^CMD (\[.*\])$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert image is not None
    commands = {name: service["command"] for name, service in compose["services"].items()}
    commands["image"] = json.loads(image[1])
    return {
        name: [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", each) for each in command] for name, command in commands.items()
    }


@pytest.mark.parametrize(("name", "arguments"), commands_that_serve().items(), ids=str)
def test_the_command_line_knows_every_argument(name: str, arguments: list[str]) -> None:
    result = CliRunner().invoke(build_app(), [*arguments, "--print-environment"])
    assert result.exit_code == 0, f"{name}: {result.output}"
