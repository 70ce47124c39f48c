"""The strict safetensors reader against files written by the reference implementation, and against broken ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from dsv4.checkpoint.safetensors_file import DTYPE_BYTES, SafetensorsFile, build_header, parse_header, torch_dtype
from dsv4.errors import CheckpointError
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file


def write(path: Path, header: Any, payload: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)
    return path


def entry(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_every_dtype_round_trips_without_a_copy(tmp_path: Path) -> None:
    tensors = {}
    for name in DTYPE_BYTES:
        values = torch.arange(24 * DTYPE_BYTES[name], dtype=torch.uint8) % 2
        tensors[name] = values.view(torch_dtype(name)).view(4, 6)
    tensors["empty"] = torch.empty(0, 3)
    save_file(tensors, tmp_path / "file", metadata={"a": "b"})
    with SafetensorsFile(tmp_path / "file") as file:
        assert file.metadata == {"a": "b"}
        assert file.entries.keys() == tensors.keys()
        views = {name: file.tensor(name) for name in tensors}
        assert file.unchanged()
        for name, values in tensors.items():
            raw = values.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert file.read(name) == raw
    for name, values in tensors.items():
        assert views[name].dtype == values.dtype
        assert views[name].shape == values.shape
        assert torch.equal(views[name].reshape(-1).view(torch.uint8), values.reshape(-1).view(torch.uint8))
    assert views["F32"].untyped_storage().data_ptr() != tensors["F32"].untyped_storage().data_ptr()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=8), st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 5))),
        max_size=6,
        unique_by=lambda item: item[0],
    ).filter(lambda items: all(name != "__metadata__" for name, _, _ in items))
)
def test_headers_round_trip(items: list[tuple[str, str, list[int]]]) -> None:
    header, entries = build_header([(name, dtype, tuple(shape)) for name, dtype, shape in items], {"k": "v"})
    end = max((value.end for value in entries.values()), default=len(header))
    parsed, metadata = parse_header(header[8:], end - len(header), "file")
    assert parsed == entries
    assert metadata == {"k": "v"}
    assert len(header) % 8 == 0


def test_duplicate_name_is_not_written() -> None:
    with pytest.raises(ValueError, match="twice"):
        build_header([("a", "U8", (1,)), ("a", "U8", (1,))], {})


BROKEN: dict[str, tuple[Any, bytes, str]] = {
    "list": ([], b"", "no JSON object"),
    "not JSON": (b"{", b"", "header"),
    "not UTF-8": (b'{"\xff": 1}', b"", "header"),
    "deep": (b'{"a":' + b"[" * 100_000, b"", "header"),
    "duplicate": (b'{"a": {}, "a": {}}', b"", "twice"),
    "metadata number": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "entry a list": ({"a": []}, b"", "tensor a"),
    "surplus field": ({"a": entry(0, 1) | {"x": 1}}, b"x", "tensor a"),
    "unknown dtype": ({"a": entry(0, 1, "F4")}, b"x", "unknown dtype"),
    "dtype a list": ({"a": entry(0, 1) | {"dtype": []}}, b"x", "unknown dtype"),
    "negative extent": ({"a": entry(0, 1, shape=[-1])}, b"x", "shape"),
    "boolean extent": ({"a": entry(0, 1, shape=[True])}, b"x", "shape"),
    "huge extents": ({"a": entry(0, 1, shape=[1 << 62, 1 << 62])}, b"x", "does not take"),
    "extent beyond 63 bits": ({"a": entry(0, 1, shape=[1 << 64])}, b"x", "shape"),
    "three offsets": ({"a": entry(0, 1) | {"data_offsets": [0, 1, 2]}}, b"x", "data_offsets"),
    "reversed offsets": ({"a": entry(0, 1) | {"data_offsets": [1, 0]}}, b"x", "does not take"),
    "size mismatch": ({"a": entry(0, 4, "F32", [2])}, b"xxxx", "does not take"),
    "overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, b"x" * 6, "tensor b overlaps"),
    "hole": ({"a": entry(0, 4), "b": entry(5, 6)}, b"x" * 6, "tensor b leaves a hole"),
    "same place twice": ({"a": entry(0, 4), "b": entry(0, 4)}, b"x" * 4, "tensor b overlaps"),
    "payload too short": ({"a": entry(0, 4)}, b"x" * 3, "cover 4 payload bytes, the file has 3"),
    "payload too long": ({"a": entry(0, 4)}, b"x" * 5, "cover 4 payload bytes, the file has 5"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_headers_are_refused(tmp_path: Path, name: str) -> None:
    header, payload, expected = BROKEN[name]
    with pytest.raises(CheckpointError) as raised:
        SafetensorsFile(write(tmp_path / "file", header, payload))
    assert expected in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "too short"), (b"1234567", "too short"), ((1 << 40).to_bytes(8, "little"), "above the format's"),
     ((100).to_bytes(8, "little") + b"{}", "does not fit")],
)  # fmt: skip
def test_broken_lengths_are_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CheckpointError, match=expected):
        SafetensorsFile(tmp_path / "file")


def test_shrinking_and_replaced_files_are_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "file", {"a": entry(0, 4)}, b"xxxx")
    with SafetensorsFile(path) as file:
        assert file.unchanged()
        os.truncate(path, file.size - 2)
        with pytest.raises(CheckpointError, match="truncated"):
            file.read("a")
        assert not file.unchanged()
        path.unlink()
        assert not file.unchanged()
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(path)


def test_directories_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a regular file"):
        SafetensorsFile(tmp_path)
    with (
        SafetensorsFile(write(tmp_path / "file", {"a": entry(0, 1)}, b"x")) as file,
        pytest.raises(CheckpointError, match="tensor b is missing"),
    ):
        file.tensor("b")
