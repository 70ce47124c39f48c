"""Prepacking speed against packing in memory with plain torch.

    python benchmarks/prepack.py [--work DIR] [--experts 32] [--layers 3] [--ranks 8] [--no-peer]

makes a W8A8 checkpoint with the dimensions of DeepSeek V4 Flash and prints one table. The peer does what the format's
first writer does: build every stacked tensor in memory, then save the file. The payloads are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

OURS = (
    "from dsv4_converter import prepack; import sys; prepack(sys.argv[1], ranks=int(sys.argv[2]), output=sys.argv[3])"
)


def pack_with_torch(directory: Path, ranks: int, output: Path) -> None:
    """The peer."""
    import torch
    from dsv4.checkpoint.sidecar import SIDECAR_RULES, group_layers, layer_shape
    from dsv4_converter.dimensions import Dimensions
    from safetensors.torch import load_file, save_file

    config = Dimensions.from_config(json.loads((directory / "config.json").read_text()))
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for shard in set(weight_map.values()):
        tensors.update(load_file(directory / shard))
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8, "I32": torch.int32}
    experts = config.n_routed_experts // ranks
    signs = torch.ones(1, 1)
    while len(signs) < config.index_head_dim:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    result = {}
    for rule in SIDECAR_RULES:
        stacked = []
        for rank in range(ranks):
            layers = []
            for layer in group_layers(config, rule.group):
                name = f"layers.{layer}.{rule.source}"
                if rule.per_expert:
                    names = [name.format(expert=rank * experts + index) for index in range(experts)]
                    value = torch.stack([tensors[expert] for expert in names])
                elif not rule.source:
                    value = signs * config.index_head_dim**-0.5
                elif name in tensors:
                    value = tensors[name].T if rule.transpose else tensors[name]
                else:
                    value = torch.zeros(layer_shape(config, rule, ranks))
                layers.append(value.reshape(layer_shape(config, rule, ranks)).to(dtypes[rule.dtype]))
            shape = layer_shape(config, rule, ranks)
            stacked.append(torch.cat(layers) if layers else torch.empty(0, *shape[1:], dtype=dtypes[rule.dtype]))
        result[rule.name] = torch.stack(stacked).contiguous()
    save_file(result, output, metadata={"format": "peer"})


def make_benchmark_checkpoint(directory: Path, experts: int, layers: int) -> None:
    from dsv4_converter import convert

    from tests.unit.converter.checkpoints import FLASH_LAYER, make_source

    layout = dataclasses.replace(FLASH_LAYER, experts=experts, ratios=(0, 4, 128)[:layers])
    with tempfile.TemporaryDirectory(dir=directory.parent) as work:
        convert(make_source(Path(work) / "source", layout), directory, rounding="rtn")


def same_payload(first: Path, second: Path) -> bool:
    from dsv4.checkpoint.safetensors_file import SafetensorsFile

    with SafetensorsFile(first) as one, SafetensorsFile(second) as other:
        if one.size - one.payload_begin != other.size - other.payload_begin:
            return False
        step = 16 << 20
        return all(
            one.pread(one.payload_begin + offset, min(step, one.size - one.payload_begin - offset))
            == other.pread(other.payload_begin + offset, min(step, other.size - other.payload_begin - offset))
            for offset in range(0, one.size - one.payload_begin, step)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--layers", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--peer-only", nargs=3, metavar=("DIR", "RANKS", "OUTPUT"), help=argparse.SUPPRESS)
    parser.add_argument("--make-only", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer_only:
        directory, ranks, output = arguments.peer_only
        pack_with_torch(Path(directory), int(ranks), Path(output))
        return
    if arguments.make_only:
        make_benchmark_checkpoint(arguments.make_only, arguments.experts, arguments.layers)
        return
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        run(Path(work), arguments)


def run(work: Path, arguments: argparse.Namespace) -> None:
    from measure import copy_seconds, print_table, run_measured

    served = work / "served"
    # In a process of its own: the peak memory of a child counts what its parent held when it was started.
    options = ["--experts", str(arguments.experts), "--layers", str(arguments.layers)]
    run_measured([sys.executable, __file__, "--make-only", str(served), *options])
    ours, theirs = work / "ours.safetensors", work / "theirs.safetensors"
    command = [sys.executable, "-c", OURS, str(served), str(arguments.ranks), str(ours)]
    rows = [("dsv4 prepack", run_measured(command))]
    if not arguments.no_peer:
        peer = [sys.executable, __file__, "--peer-only", str(served), str(arguments.ranks), str(theirs)]
        rows.append(("plain torch in memory", run_measured(peer)))
    size = ours.stat().st_size
    shards = sorted(served.glob("*.safetensors"))
    print(f"{sum(path.stat().st_size for path in shards) / 1e9:.2f} GB read, {size / 1e9:.2f} GB written")
    print_table(rows, size / 1e9, "sidecar")
    if not arguments.no_peer:
        print(f"payloads are {'equal' if same_payload(ours, theirs) else 'DIFFERENT'}")
    theirs.unlink(missing_ok=True)
    os.sync()
    seconds = copy_seconds(shards, work / "copy", size)
    print(f"copying the same bytes: {seconds:.2f} s; prepack reaches {100 * seconds / rows[0][1].wall:.0f} % of that")


if __name__ == "__main__":
    main()
