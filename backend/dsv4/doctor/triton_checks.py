"""Is there a tritonserver that can run our models with this interpreter?"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from dsv4.doctor.findings import Finding, error, ok
from dsv4.doctor.machine import Machine

INSTALL = "make setup (it installs the nvidia-pytriton wheel, which carries the server)"


def wheel_directory() -> Path | None:
    """Directory `tritonserver` inside the installed nvidia-pytriton wheel."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    directory = Path(next(iter(spec.submodule_search_locations))) / "tritonserver"
    return directory if directory.is_dir() else None


def check_triton(machine: Machine, directory: Path | None) -> Iterator[Finding]:
    """The binary, the Python backend, and a stub for this Python version, all starting.

    `directory` is the wheel's, as of `wheel_directory`.
    """
    if directory is None:
        yield error("triton.binary", "no tritonserver found", INSTALL)
        return
    binary = directory / "bin" / "tritonserver"
    stub = directory / "python_backend_stubs" / python_name(machine) / "triton_python_backend_stub"
    for check, path in (("triton.binary", binary), ("triton.stub", stub)):
        if not machine.exists(str(path)):
            yield error(check, f"{path} is not there", INSTALL)
        else:
            yield from _links(machine, check, path)


def _links(machine: Machine, check: str, path: Path) -> Iterator[Finding]:
    """All shared libraries of a program are found; `ldd` is part of the C library's package."""
    result = machine.run("ldd", str(path))
    lines = [] if result is None else result.output.splitlines()
    missing = sorted({line.split()[0] for line in lines if "not found" in line})
    # The stub finds libpython through the environment that `dsv4 serve` gives it.
    if check == "triton.stub" and missing and all(name.startswith("libpython") for name in missing):
        yield from _libpython(machine, missing[0])
    elif missing:
        yield error(check, f"{path.name} lacks {', '.join(missing)}", "install the packages with these libraries")
    else:
        yield ok(check, f"{path.name} found, all its libraries too")


def _libpython(machine: Machine, library: str) -> Iterator[Finding]:
    if machine.exists(f"{machine.platform.library_directory}/{library}"):
        yield ok("triton.stub", f"triton_python_backend_stub found, {library} beside the interpreter")
    else:
        yield error(
            "triton.stub",
            f"{library} is not found: Triton's Python stub cannot start",
            f"apt-get install libpython{python_name(machine)}, or use a Python built with --enable-shared",
        )


def python_name(machine: Machine) -> str:
    """`3.11`."""
    return "{}.{}".format(*machine.platform.python[:2])
