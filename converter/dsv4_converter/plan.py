"""What each output shard holds and how it comes from the source shard."""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass

from dsv4.checkpoint.names import Storage
from dsv4.checkpoint.safetensors_file import TensorEntry, build_header

from dsv4_converter.source import SourceCheckpoint, SourceWeight, StoredTensor

# Writers of the format put wider types first, so that every tensor is aligned, and sort by name within a type.
DTYPE_ORDER = (
    "U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8",
    "BOOL",
)  # fmt: skip
SHARD_METADATA = {"format": "pt"}


class Action(enum.Enum):
    """How a source tensor is treated."""

    COPY = "copy"
    MXFP4_TO_INT8 = "MXFP4 to INT8"
    FP8_TO_INT8 = "FP8 to INT8"
    FP8_TO_BF16 = "FP8 to BF16"


def kind_of(name: str) -> str:
    """``layer kind`` of a weight: ``layers.3.ffn.experts.7.w1.weight`` is ``layers.3 ffn.experts.w1``."""
    parts = name.removesuffix(".weight").split(".")
    if parts[0] in ("layers", "mtp"):
        return f"{parts[0]}.{parts[1]} {'.'.join(part for part in parts[2:] if not part.isdigit())}"
    return f"model {'.'.join(parts)}"


@dataclass(frozen=True)
class TensorPlan:
    """One source tensor of a shard that has output; scales of quantized weights have none of their own."""

    name: str
    action: Action
    entry: TensorEntry
    scale: StoredTensor | None
    scale_name: str = ""

    @property
    def kind(self) -> str:
        """See `kind_of`."""
        return kind_of(self.name)


@dataclass(frozen=True)
class ShardPlan:
    """One shard.

    Attributes:
        name: file name, the same in source and output.
        tensors: source name -> plan, for tensors with output.
        header: header bytes of the output, with the length field.
        outputs: output name -> entry, in file order.
        source_bytes: size of the source file.
    """

    name: str
    tensors: dict[str, TensorPlan]
    header: bytes
    outputs: dict[str, TensorEntry]
    source_bytes: int

    @property
    def output_bytes(self) -> int:
        """Size of the output file."""
        return max((entry.end for entry in self.outputs.values()), default=len(self.header))

    @property
    def payload_bytes(self) -> int:
        return self.output_bytes - len(self.header)


def plan_shards(source: SourceCheckpoint) -> list[ShardPlan]:
    """Plan every shard, in order of their names."""
    by_shard: dict[str, dict[str, TensorPlan]] = defaultdict(dict)
    for weight in source.weights:
        by_shard[weight.weight.shard][weight.weight.name] = _plan_weight(weight)
    for stored in source.extra:
        by_shard[stored.shard][stored.name] = TensorPlan(stored.name, Action.COPY, stored.entry, None)
    return [_plan_shard(name, by_shard[name], shard.size) for name, shard in source.shards.items()]


def _plan_weight(weight: SourceWeight) -> TensorPlan:
    spec, stored = weight.spec, weight.weight
    if not spec.storage.quantized:
        action = Action.COPY
    elif not spec.storage.int8:
        action = Action.FP8_TO_BF16
    elif spec.storage is Storage.EXPERT_TO_INT8 and stored.entry.dtype == "I8":
        action = Action.MXFP4_TO_INT8
    else:
        action = Action.FP8_TO_INT8
    return TensorPlan(stored.name, action, stored.entry, weight.scale, spec.scale_name)


def _plan_shard(name: str, tensors: dict[str, TensorPlan], source_bytes: int) -> ShardPlan:
    outputs: list[tuple[str, str, tuple[int, ...]]] = []
    for plan in tensors.values():
        shape = plan.entry.shape
        if plan.action is Action.COPY:
            outputs.append((plan.name, plan.entry.dtype, shape))
        elif plan.action is Action.FP8_TO_BF16:
            outputs.append((plan.name, "BF16", shape))
        else:
            columns = 2 * shape[1] if plan.action is Action.MXFP4_TO_INT8 else shape[1]
            outputs.append((plan.name, "I8", (shape[0], columns)))
            outputs.append((plan.scale_name, "F32", shape[:1]))
    outputs.sort(key=lambda output: (DTYPE_ORDER.index(output[1]), output[0]))
    header, entries = build_header(outputs, SHARD_METADATA)
    return ShardPlan(name, tensors, header, entries, source_bytes)
