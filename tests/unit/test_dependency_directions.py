"""The dependency directions of the architecture, read from the import statements of every module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "dsv4": ROOT / "backend" / "dsv4",
    "dsv4_converter": ROOT / "converter" / "dsv4_converter",
    "dsv4_clients": ROOT / "clients" / "dsv4_clients",
}

# (importing package, what it must not import)
FORBIDDEN = [
    ("dsv4.chat", ("torch", "triton_python_backend_utils", "tritonclient", "dsv4.model", "dsv4.engine", "dsv4.triton")),
    ("dsv4.scheduler", ("torch", "triton_python_backend_utils", "tritonclient", "dsv4.model", "dsv4.engine")),
    ("dsv4.cache", ("torch", "triton_python_backend_utils", "tritonclient", "dsv4.model", "dsv4.engine")),
    ("dsv4.model", ("dsv4.engine", "dsv4.scheduler", "dsv4.chat", "dsv4.triton", "dsv4.sampling_parameters")),
    ("dsv4.engine", ("triton_python_backend_utils", "tritonclient", "dsv4.triton")),
    ("dsv4_converter", ("dsv4.engine", "dsv4.triton", "dsv4_clients")),
    ("dsv4_clients", ("dsv4.engine", "dsv4.model", "dsv4.triton", "torch")),
]


def modules() -> dict[str, Path]:
    found = {}
    for package, directory in PACKAGES.items():
        for path in directory.rglob("*.py"):
            parts = (package, *path.relative_to(directory).with_suffix("").parts)
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize(("package", "forbidden"), FORBIDDEN, ids=[package for package, _ in FORBIDDEN])
def test_package_does_not_import(package: str, forbidden: tuple[str, ...]) -> None:
    members = {name: path for name, path in modules().items() if within(name, package)}
    assert members, f"no modules found in {package}"
    for name, path in members.items():
        for imported in imports_of(path):
            assert not any(within(imported, target) for target in forbidden), f"{name} imports {imported}"


def test_only_the_command_line_imports_itself() -> None:
    for name, path in modules().items():
        if not within(name, "dsv4.cli"):
            assert not any(within(imported, "dsv4.cli") for imported in imports_of(path)), name


def test_model_files_of_the_repository_are_thin() -> None:
    files = list((ROOT / "model_repository").glob("*/*/model.py"))
    assert files, "no Python models found"
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 150, f"{path.relative_to(ROOT)} has {len(lines)} lines"
