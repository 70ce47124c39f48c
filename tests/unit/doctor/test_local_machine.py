"""The real probe, against files and sockets made here, and the command itself."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from dsv4.cli.main import build_app
from dsv4.doctor.machine import CommandResult, LocalMachine
from typer.testing import CliRunner


def test_files_commands_and_packages(tmp_path: Path) -> None:
    machine = LocalMachine()
    (tmp_path / "f").write_text("text")
    assert machine.read_text(str(tmp_path / "f")) == "text"
    assert machine.read_text(str(tmp_path / "absent")) is None
    assert machine.run("no-such-program-at-all") is None
    assert machine.run(sys.executable, "-c", "print('out'); raise SystemExit(3)") == CommandResult(3, "out\n")
    assert machine.distribution_version("torch") is not None
    assert machine.distribution_version("no-such-distribution") is None
    assert machine.has_module("json")
    assert not machine.has_module("no_such_module")


def test_sizes_are_plausible(tmp_path: Path) -> None:
    machine = LocalMachine()
    total, available = machine.memory()
    assert 0 < available <= total
    space = machine.space(str(tmp_path))
    assert space is not None
    assert 0 < space.free <= space.total
    assert machine.space(str(tmp_path / "absent")) is None
    assert machine.limit("NOFILE") != 0


def test_a_bound_port_is_taken() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not LocalMachine().port_is_free("127.0.0.1", port)
    assert LocalMachine().port_is_free("127.0.0.1", port)


def test_a_file_just_read_is_resident_and_a_dropped_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(os.urandom(1 << 20))
    machine = LocalMachine()
    with path.open("rb") as file:
        file.read()
        os.fsync(file.fileno())
        assert machine.page_cache_residency(path) == pytest.approx(1.0)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert machine.page_cache_residency(tmp_path / "absent") is None


def test_read_speed_of_a_real_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(9 << 20))
    speed = LocalMachine().read_speed(path, 8 << 20)
    assert speed is None or speed > 0
    assert LocalMachine().read_speed(tmp_path / "absent", 1) is None


def test_the_command_reports_the_absent_npus_as_json(tmp_path: Path) -> None:
    if Path("/dev/davinci_manager").exists():
        pytest.skip("this machine has NPUs")
    result = CliRunner().invoke(build_app(), ["doctor", "--backend", "npu", "--json", "--quiet"])
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["worst"] == "error"
    by_check = {finding["check"]: finding for finding in document["findings"]}
    assert by_check["npu.smi"]["text"] == "npu-smi is not installed"
    assert all(set(finding) == {"check", "severity", "text", "remedy"} for finding in document["findings"])
    assert all(finding["remedy"] for finding in document["findings"])


@pytest.mark.parametrize("arguments", [["--backend", "tpu"], ["--devices", "0,0"], ["--devices", "a"]])
def test_wrong_arguments_are_named(arguments: list[str]) -> None:
    result = CliRunner().invoke(build_app(), ["doctor", *arguments])
    assert result.exit_code == 2
    assert arguments[0] in result.output
