"""Finding tritonserver and giving it what it needs to run our models with the running Python interpreter."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from dsv4.default_model import cache_directory
from dsv4.errors import ConfigurationError

PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
STUB_NAME = "triton_python_backend_stub"
_BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")


@dataclass(frozen=True)
class TritonInstallation:
    """A tritonserver that can run our models.

    `environment` holds the variables to set for it, complete values included (`PATH` and so on).
    """

    server: Path
    backend_directory: Path
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, *options: str) -> list[str]:
        """A command line with these options."""
        return [str(self.server), f"--backend-directory={self.backend_directory}", *options]


def find_installation(server: str | Path | None = None) -> TritonInstallation:
    """The tritonserver at `server`, else that of the nvidia-pytriton wheel, else the one on PATH.

    Raises ConfigurationError when there is none or its Python backend does not fit this interpreter.
    """
    if server is not None:
        return _system_installation(Path(server))
    wheel = wheel_directory()
    if wheel is not None:
        return _wheel_installation(wheel)
    on_path = shutil.which("tritonserver")
    if on_path is None:
        raise ConfigurationError(
            "no tritonserver found: run `make setup`, which installs the nvidia-pytriton wheel that carries it, or "
            "name one with --triton-server"
        )
    return _system_installation(Path(on_path))


def wheel_directory() -> Path | None:
    """Directory `tritonserver` inside the nvidia-pytriton wheel, if it is installed."""
    spec = importlib.util.find_spec("pytriton")
    for location in (spec.submodule_search_locations if spec is not None else None) or ():
        directory = Path(location) / "tritonserver"
        if (directory / "bin" / "tritonserver").is_file():
            return directory
    return None


def find_model_repository() -> Path:
    """`model_repository` of the checkout, or of an installed wheel. Raises ConfigurationError."""
    candidates = (
        Path(__file__).resolve().parents[3] / "model_repository",
        Path(sys.prefix) / "share" / "dsv4-triton" / "model_repository",
    )
    for candidate in candidates:
        if (candidate / "deepseek_v4").is_dir():
            return candidate
    raise ConfigurationError("the model repository is not installed; name it with --model-repository")


def _wheel_installation(wheel: Path) -> TritonInstallation:
    stub = wheel / "python_backend_stubs" / PYTHON_VERSION / STUB_NAME
    if not stub.is_file():
        raise ConfigurationError(
            f"{wheel} has no Python backend for Python {PYTHON_VERSION}; use one of "
            + ", ".join(sorted(path.name for path in stub.parents[1].iterdir()))
        )
    sources = [wheel / "backends" / "python" / name for name in _BACKEND_FILES]
    return TritonInstallation(
        server=wheel / "bin" / "tritonserver",
        backend_directory=prepare_backend_directory([*sources, stub], cache_directory() / "triton-backends"),
        # The wheel's libraries lie beside its packages, under names that hold a hash and so hide no others.
        environment=_environment([wheel.parents[1] / "nvidia_pytriton.libs", _libpython_directory()]),
    )


def _system_installation(server: Path) -> TritonInstallation:
    if not os.access(server, os.X_OK):
        raise ConfigurationError(f"{server} is not a program; --triton-server must name the tritonserver binary")
    backends = server.resolve().parents[1] / "backends"
    stub = backends / "python" / STUB_NAME
    if not stub.is_file():
        raise ConfigurationError(f"{server} has no Python backend: {stub} is not there")
    built_for = stub_python_version(stub)
    if built_for != PYTHON_VERSION:
        raise ConfigurationError(
            f"{stub} runs models with Python {built_for}, but dsv4 is installed for Python {PYTHON_VERSION}; install "
            f"dsv4-triton with Python {built_for}, or a tritonserver that fits"
        )
    return TritonInstallation(
        server=server, backend_directory=backends, environment=_environment([_libpython_directory()])
    )


def stub_python_version(stub: Path) -> str | None:
    """The Python version that a stub is linked to (`3.11`), read from the name of the library it needs."""
    match = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    return match[1].decode() if match else None


def prepare_backend_directory(sources: list[Path], parent: Path) -> Path:
    """A backend directory under `parent` whose `python` backend consists of copies of `sources`.

    Its name is a digest of the contents, so an upgrade makes a new one and several processes may prepare it at once.
    """
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + hashlib.sha256(source.read_bytes()).digest())
    target = parent / digest.hexdigest()[:16]
    if target.is_dir():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=parent))
    try:
        (staging / "backends" / "python").mkdir(parents=True)
        for source in sources:
            copy = staging / "backends" / "python" / source.name
            shutil.copyfile(source, copy)
            copy.chmod(0o755 if source.name == STUB_NAME else 0o644)
        try:
            (staging / "backends").rename(target)
        except OSError:
            # Another process was faster; what it made has the same contents.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _environment(library_directories: list[Path]) -> dict[str, str]:
    """The stub embeds Python and finds our packages as `python3` on PATH does: the interpreter's own comes first.

    It does not read PYTHONPATH or PYTHONHOME.
    """
    python_directory = str(Path(sys.executable).parent)
    return {
        "DSV4_PYTHON": sys.executable,
        "LD_LIBRARY_PATH": _joined([str(path) for path in library_directories], "LD_LIBRARY_PATH"),
        "PATH": _joined([python_directory], "PATH"),
    }


def _joined(first: list[str], variable: str) -> str:
    rest = [entry for entry in os.environ.get(variable, "").split(os.pathsep) if entry and entry not in first]
    return os.pathsep.join(first + rest)


def _libpython_directory() -> Path:
    """Where the shared library of the running interpreter lies. Raises ConfigurationError when it has none."""
    name = f"libpython{PYTHON_VERSION}.so.1.0"
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    candidates = [
        Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib"),
        Path(sys.base_prefix) / "lib",
        Path("/usr/lib") / multiarch,
        Path("/usr/lib64"),
    ]
    for candidate in candidates:
        if (candidate / name).is_file():
            return candidate
    raise ConfigurationError(
        f"{name} is not there: Triton's Python backend needs the shared library of Python {PYTHON_VERSION}. Install "
        f"libpython{PYTHON_VERSION} (Debian, Ubuntu), or use a Python built with --enable-shared"
    )
