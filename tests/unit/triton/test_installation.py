"""Finding tritonserver and preparing a backend directory for the running interpreter."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dsv4.errors import ConfigurationError
from dsv4.triton import installation
from dsv4.triton.installation import (
    PYTHON_VERSION,
    STUB_NAME,
    find_installation,
    find_model_repository,
    prepare_backend_directory,
    stub_python_version,
)


def write_executable(path: Path, content: bytes = b"#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755)
    return path


def system_triton(root: Path, python: str) -> Path:
    write_executable(root / "backends" / "python" / STUB_NAME, b"\x7fELF libpython" + python.encode() + b".so.1.0")
    return write_executable(root / "bin" / "tritonserver")


def test_backend_directory_is_made_once_by_content(tmp_path: Path) -> None:
    stub = write_executable(tmp_path / "source" / STUB_NAME)
    library = tmp_path / "source" / "libtriton_python.so"
    library.write_bytes(b"one")
    with ThreadPoolExecutor(8) as pool:
        made = set(pool.map(lambda _: prepare_backend_directory([library, stub], tmp_path / "cache"), range(16)))
    [first] = made
    assert os.access(first / "python" / STUB_NAME, os.X_OK)
    assert (first / "python" / "libtriton_python.so").read_bytes() == b"one"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name], "a staging directory was left"
    library.write_bytes(b"two")
    assert prepare_backend_directory([library, stub], tmp_path / "cache") != first


def test_wheel_installation_fits_this_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = find_installation()
    assert found.server.is_file()
    assert stub_python_version(found.backend_directory / "python" / STUB_NAME) == PYTHON_VERSION
    assert found.environment["DSV4_PYTHON"] == sys.executable
    path = found.environment["PATH"].split(":")
    assert path == [str(Path(sys.executable).parent), "/usr/bin", "/bin"]
    libraries = [Path(entry) for entry in found.environment["LD_LIBRARY_PATH"].split(":")]
    assert any((entry / f"libpython{PYTHON_VERSION}.so.1.0").is_file() for entry in libraries)


def test_variables_keep_what_was_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/mine")
    first = find_installation().environment["LD_LIBRARY_PATH"]
    assert first.endswith(":/opt/mine")
    monkeypatch.setenv("LD_LIBRARY_PATH", first)
    assert find_installation().environment["LD_LIBRARY_PATH"] == first


def test_system_installation_uses_its_own_backends(tmp_path: Path) -> None:
    server = system_triton(tmp_path, PYTHON_VERSION)
    found = find_installation(server)
    assert found.backend_directory == tmp_path / "backends"
    assert found.command("--http-port=1")[1:] == [f"--backend-directory={tmp_path / 'backends'}", "--http-port=1"]


def test_system_installation_for_another_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"with Python 3\.1, but"):
        find_installation(system_triton(tmp_path, "3.1"))


def test_what_is_no_triton_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not a program"):
        find_installation(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="has no Python backend"):
        find_installation(write_executable(tmp_path / "bin" / "tritonserver"))


def test_without_wheel_the_one_on_path_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "wheel_directory", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ConfigurationError, match="make setup"):
        find_installation()
    server = system_triton(tmp_path, PYTHON_VERSION)
    assert find_installation().server == server


def test_model_repository_of_the_checkout_is_found() -> None:
    assert (find_model_repository() / "deepseek_v4_chat" / "config.pbtxt").is_file()
