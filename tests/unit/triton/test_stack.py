"""Starting, watching and stopping the two processes, with small programs in the place of tritonserver."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from dsv4.errors import ConfigurationError, EngineStartError
from dsv4.triton.installation import TritonInstallation
from dsv4.triton.processes import (
    ManagedProcess,
    describe_exit,
    port_is_free,
    remove_stale_shared_memory,
    wait_until,
)
from dsv4.triton.service import START_FAILURE_PREFIX
from dsv4.triton.stack import ServingStack, StackSettings, environment_lines


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def settings(**changes: object) -> StackSettings:
    port, http, grpc, metrics = free_ports(4)
    values = {
        "model_repository": Path("/nowhere"),
        "port": port,
        "triton_http_port": http,
        "triton_grpc_port": grpc,
        "triton_metrics_port": metrics,
        "exit_timeout_seconds": 5,
    }
    return StackSettings(**{**values, **changes})  # type: ignore[arg-type]


def triton_script(directory: Path, body: str) -> TritonInstallation:
    script = directory / "tritonserver"
    script.write_text(f"#!{sys.executable}\n{body}", encoding="utf-8")
    script.chmod(0o755)
    return TritonInstallation(server=script, backend_directory=directory)


def run_process(code: str, lines: list[str]) -> ManagedProcess:
    return ManagedProcess("test", [sys.executable, "-c", code], os.environ, lines.append)


def test_output_is_read_to_the_end() -> None:
    lines: list[str] = []
    process = run_process("import sys\nfor i in range(500): print(i, file=sys.stderr)", lines)
    assert wait_until(lambda: process.poll() is not None, 30)
    process.kill()
    assert list(process.tail) == lines[-200:]


def test_a_deaf_process_and_its_children_are_killed() -> None:
    lines: list[str] = []
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    process = run_process(code, lines)
    assert wait_until(lambda: bool(lines), 30)
    child = psutil.Process(int(lines[0]))
    assert not process.terminate(0.2)
    assert process.poll() == -9
    assert wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 10)


def test_exit_descriptions() -> None:
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-9) == "was ended by SIGKILL"


def test_port_in_use_is_named() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        installation = TritonInstallation(server=Path("/nothing"), backend_directory=Path("/nothing"))
        for option, name in (("triton_grpc_port", "--triton-grpc-port"), ("port", "--port")):
            with pytest.raises(ConfigurationError, match=f"{port} is in use.*{name}"):
                ServingStack(settings(**{option: port}), installation, print).run()


def test_the_engines_reason_is_the_error(tmp_path: Path) -> None:
    body = f"import sys\nprint('noise')\nprint({START_FAILURE_PREFIX + 'no such checkpoint'!r})\nsys.exit(1)"
    with pytest.raises(EngineStartError, match=r"^no such checkpoint$"):
        ServingStack(settings(), triton_script(tmp_path, body), print).run()


def test_a_server_that_cannot_start_is_described(tmp_path: Path) -> None:
    body = "import sys\nprint('E1201 03:45:07.343088 1 main.cc:245] \"failed to start\"')\nprint()\nsys.exit(1)"
    with pytest.raises(EngineStartError, match=r"tritonserver exited with status 1: E1201 .*failed to start"):
        ServingStack(settings(), triton_script(tmp_path, body), print).run()


def test_stale_shared_memory_goes_and_mapped_stays() -> None:
    shared = Path("/dev/shm")
    started = time.time() - 1
    stale = shared / f"triton_python_backend_shm_region_test_stale_{os.getpid()}"
    used = shared / f"triton_python_backend_shm_region_test_used_{os.getpid()}"
    for path in (stale, used):
        path.write_bytes(b"\0" * 4096)
    code = (
        "import mmap, sys\n"
        f"f = open({str(used)!r}, 'r+b')\n"
        "m = mmap.mmap(f.fileno(), 4096)\n"
        "print('mapped', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            remove_stale_shared_memory(started)
            assert not stale.exists()
            assert used.exists()
        finally:
            used.unlink()
            assert holder.stdin is not None
            holder.stdin.close()


def test_environment_lines_are_shell() -> None:
    installation = TritonInstallation(Path("/bin/echo"), Path("/back ends"), {"A": "x $y"})
    script = "\n".join([*environment_lines(installation), 'echo "$A"', "tritonserver --model-repository 'a b'"])
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "x $y\n--backend-directory=/back ends --model-repository a b\n"
