"""Whom the contract tests run against: upstream itself, or the double in this directory.

With `PYPTO_SERVING_ROOT` naming a checkout of pypto-serving and `PYPTO_FAKE_EXECUTOR` naming a directory that makes
its worker run on the CPU (a `sitecustomize` on PYTHONPATH that replaces the executor, with a module `upfake.chain` that
tells the right continuation), the real engine, scheduler and worker process are used; otherwise the double.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
KNOBS = ("EOS_MOD", "DECODE_MS", "FAIL_AT", "EXIT_AT", "HANG_AT", "HANG_S", "INIT_FAIL", "INIT_EXIT")


@dataclass(frozen=True)
class Contract:
    """`environment` of the engine process, the prefix of its fault variables, and the right continuation."""

    name: str
    environment: dict[str, str]
    prefix: str
    reference: Callable[..., list[int]]

    def faults(self, **values: object) -> dict[str, str]:
        """Environment variables for faults of the worker, such as `EXIT_AT=5`: at its fifth step."""
        unknown = set(values) - set(KNOBS)
        if unknown:
            raise ValueError(f"unknown faults {unknown}")
        return {self.prefix + name: str(value) for name, value in values.items()}


def contract_under_test() -> Contract:
    """Upstream where it is named, else the double."""
    root, harness = os.environ.get("PYPTO_SERVING_ROOT"), os.environ.get("PYPTO_FAKE_EXECUTOR")
    common = {"DSV4_PYPTO_NO_DEVICE_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if root and harness:
        chain = _load(Path(harness) / "upfake" / "chain.py", "upfake_chain")
        path = f"{harness}/autoload:{harness}"
        return Contract(
            "upstream", {**common, "PYTHONPATH": path, "PYPTO_SERVING_ROOT": root}, "UPFAKE_", chain.reference
        )
    chain = _load(HERE / "double" / "pypto_serving" / "chain.py", "double_chain")
    return Contract("double", {**common, "PYTHONPATH": str(HERE / "double")}, "DOUBLE_", chain.reference)


def _load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
