"""The two inner operations on a group of 32 packed MXFP4 weights, compiled by Numba.

`group_mask` tells which E2M1 magnitudes occur; `convert_group` looks all 32 weights up in a table of 16 codes.
Processors with a byte-shuffle instruction (SSSE3, NEON) do each in a handful of instructions; elsewhere plain loops do.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

GROUP_BYTES = 16

_BYTE = ir.IntType(8)
_VECTOR = ir.VectorType(_BYTE, GROUP_BYTES)
_SHUFFLES = {
    "x86_64": "llvm.x86.ssse3.pshuf.b.128",
    "AMD64": "llvm.x86.ssse3.pshuf.b.128",
    "aarch64": "llvm.aarch64.neon.tbl1.v16i8",
    "arm64": "llvm.aarch64.neon.tbl1.v16i8",
}


def shuffle_instruction() -> str | None:
    """Name of the LLVM intrinsic that looks 16 bytes up in a 16-byte table; None where the processor has none."""
    name = _SHUFFLES.get(platform.machine())
    if name is not None and ".x86." in name and not llvmlite.binding.get_host_cpu_features().get("ssse3", False):
        return None
    return name


def _load(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """Pointer to the 16-byte vector at a byte offset of a one-dimensional byte array."""
    data = context.make_array(array_type)(context, builder, array).data
    pointer = builder.gep(builder.bitcast(data, _BYTE.as_pointer()), [offset])
    return pointer


def _vector(builder: Any, pointer: Any) -> Any:
    return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=1)


def _splat(value: int) -> Any:
    return ir.Constant(_VECTOR, [value] * GROUP_BYTES)


def _look_up(builder: Any, name: str, table: Any, indices: Any) -> Any:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR]), name)
    return builder.call(function, [table, indices])


def _make_shuffled(name: str) -> tuple[Any, Any]:
    @intrinsic
    def group_mask(typing_context, packed, offset):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            codes = _vector(builder, _load(context, builder, signature.args[0], *arguments))
            presence = ir.Constant(_VECTOR, [1 << (code & 7) for code in range(GROUP_BYTES)])
            low = _look_up(builder, name, presence, builder.and_(codes, _splat(15)))
            high = _look_up(builder, name, presence, builder.lshr(codes, _splat(4)))
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_BYTE, [_VECTOR]), "llvm.vector.reduce.or.v16i8"
            )
            return builder.call(function, [builder.or_(low, high)])

        return types.uint8(packed, types.intp), generate

    @intrinsic
    def convert_group(typing_context, packed, offset, table, table_offset, out, out_offset):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            codes = _vector(builder, _load(context, builder, signature.args[0], *arguments[0:2]))
            values = _vector(builder, _load(context, builder, signature.args[2], *arguments[2:4]))
            low = _look_up(builder, name, values, builder.and_(codes, _splat(15)))
            high = _look_up(builder, name, values, builder.lshr(codes, _splat(4)))
            order = [index for pair in zip(range(16), range(16, 32), strict=True) for index in pair]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), 32), order)
            both = builder.shuffle_vector(low, high, mask)
            target = _load(context, builder, signature.args[4], *arguments[4:6])
            builder.store(both, builder.bitcast(target, both.type.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(packed, types.intp, table, types.intp, out, types.intp), generate

    return group_mask, convert_group


def _make_plain() -> tuple[Callable[..., Any], Callable[..., Any]]:
    presence = np.array([(1 << (byte & 7)) | (1 << ((byte >> 4) & 7)) for byte in range(256)], np.uint8)

    @numba.njit(inline="always")
    def group_mask(packed, offset):  # type: ignore[no-untyped-def]
        mask = np.uint8(0)
        for index in range(GROUP_BYTES):
            mask |= presence[packed[offset + index]]
        return np.uint8(mask)

    @numba.njit(inline="always")
    def convert_group(packed, offset, table, table_offset, out, out_offset):  # type: ignore[no-untyped-def]
        for index in range(GROUP_BYTES):
            byte = packed[offset + index]
            out[out_offset + 2 * index] = table[table_offset + (byte & 15)]
            out[out_offset + 2 * index + 1] = table[table_offset + (byte >> 4)]

    return group_mask, convert_group


def make_group_kernels(*, shuffle: bool = True) -> tuple[Any, Any]:
    """``(group_mask, convert_group)`` to be called from compiled code.

    ``group_mask(packed, offset) -> uint8``: bit m is set if one of the 32 weights in the 16 bytes has magnitude code m.
    ``convert_group(packed, offset, table, table_offset, out, out_offset)``: 16 bytes to 32 codes of the 16-entry table.
    All arrays are one-dimensional and contiguous, of bytes; offsets are not checked.
    """
    name = shuffle_instruction()
    return _make_shuffled(name) if shuffle and name is not None else _make_plain()
