"""KServe v2 messages as bytes: building inference requests, reading inference responses.

Written for the few tensor types of the `deepseek_v4` models, without numpy, because it runs for every token.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence

from tritonclient.grpc import service_pb2

_LENGTH = struct.Struct("<I")


def add_string(request: service_pb2.ModelInferRequest, name: str, value: bytes) -> None:
    """Append a BYTES tensor of shape [1]."""
    _add(request, name, "BYTES", 1, _LENGTH.pack(len(value)) + value)


def add_bool(request: service_pb2.ModelInferRequest, name: str, value: bool) -> None:
    """Append a BOOL tensor of shape [1]."""
    _add(request, name, "BOOL", 1, b"\x01" if value else b"\x00")


def add_int32(request: service_pb2.ModelInferRequest, name: str, values: Sequence[int]) -> None:
    """Append an INT32 tensor of shape [len(values)]. Raises OverflowError for a value beyond 32 bits."""
    numbers = array("i", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    _add(request, name, "INT32", len(values), numbers.tobytes())


def _add(request: service_pb2.ModelInferRequest, name: str, datatype: str, count: int, data: bytes) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=[count])
    request.raw_input_contents.append(data)


def outputs_of(response: service_pb2.ModelInferResponse) -> dict[str, bytes]:
    """Raw little-endian contents of every output tensor, by name."""
    return {output.name: data for output, data in zip(response.outputs, response.raw_output_contents, strict=False)}


def read_strings(data: bytes) -> list[bytes]:
    """Elements of a BYTES tensor."""
    values = []
    position = 0
    while position < len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        values.append(data[position : position + length])
        position += length
    return values


def read_string(data: bytes | None) -> bytes:
    """First element of a BYTES tensor; empty when the tensor is absent or has no element."""
    if not data:
        return b""
    (length,) = _LENGTH.unpack_from(data, 0)
    return data[_LENGTH.size : _LENGTH.size + length]


def read_int32(data: bytes | None) -> list[int]:
    """All values of an INT32 or UINT32 tensor (counts and token ids stay below 2^31)."""
    numbers = array("i")
    numbers.frombytes(data or b"")
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
