"""Conversion speed against a plain-torch round-to-nearest converter, and against pypto-serving's where it is present.

    python benchmarks/convert.py [--work DIR] [--experts 256] [--repeat 1] [--no-peer]

makes a source of one layer with the dimensions of DeepSeek V4 Flash (3.6 GB with 256 experts; twice that is written)
and prints one table. The peer takes the steps that such converters take: hash every shard in a pass of its own, load a
shard, dequantize through a code look-up to float32, quantize, save. PYPTO_SERVING_ROOT adds upstream's own program.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

OURS = "from dsv4_converter import convert; import sys; convert(sys.argv[1], sys.argv[2], rounding=sys.argv[3])"
INT8_SUFFIXES = (".wq_b", ".wo_b", ".w1", ".w2", ".w3", ".e_proj", ".h_proj")


def convert_with_torch(source: Path, output: Path) -> None:
    """The peer."""
    import torch
    from safetensors.torch import load_file, save_file

    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    shards = sorted(set(weight_map.values()))
    output.mkdir()
    for shard in shards:
        with (source / shard).open("rb") as stream:
            hashlib.file_digest(stream, "sha256")
    for shard in shards:
        tensors = load_file(source / shard)
        result = {}
        for name, value in tensors.items():
            base = name.removesuffix(".weight")
            scale = tensors.get(f"{base}.scale")
            if name.endswith(".scale"):
                continue
            if scale is None:
                result[name] = value
                continue
            if value.dtype == torch.int8:
                packed = value.view(torch.uint8)
                codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
                weights = table[codes.long()] * scale.float().repeat_interleave(32, dim=1)
            else:
                blocks = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
                weights = value.float() * blocks[: value.shape[0], : value.shape[1]]
            if base.endswith(INT8_SUFFIXES):
                scales = weights.abs().amax(dim=1).clamp_min(1e-4) / 127
                result[name] = torch.round(weights / scales[:, None]).clamp(-127, 127).to(torch.int8)
                result[f"{base}.scale"] = scales
            else:
                result[name] = weights.bfloat16()
        save_file(result, output / f".{shard}.tmp", metadata={"format": "pt"})
        os.replace(output / f".{shard}.tmp", output / shard)


def make_benchmark_source(directory: Path, experts: int) -> Path:
    from tests.unit.converter.checkpoints import FLASH_LAYER, make_source

    return make_source(directory, dataclasses.replace(FLASH_LAYER, experts=experts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="directory with three times the source's size free")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--peer-only", nargs=2, type=Path, metavar=("SOURCE", "OUTPUT"), help=argparse.SUPPRESS)
    parser.add_argument("--make-only", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer_only:
        convert_with_torch(*arguments.peer_only)
        return
    if arguments.make_only:
        make_benchmark_source(arguments.make_only, arguments.experts)
        return
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        run(Path(work), arguments)


def run(work: Path, arguments: argparse.Namespace) -> None:
    from measure import Measurement, copy_seconds, print_table, remove, run_measured

    source, output = work / "source", work / "out"
    # In a process of its own: the peak memory of a child counts what its parent held when it was started.
    run_measured([sys.executable, __file__, "--make-only", str(source), "--experts", str(arguments.experts)])
    contenders: dict[str, list[str]] = {
        "dsv4 convert (exact)": [sys.executable, "-c", OURS, str(source), str(output), "exact"],
        "dsv4 convert (rtn)": [sys.executable, "-c", OURS, str(source), str(output), "rtn"],
    }
    if not arguments.no_peer:
        contenders["plain torch (rtn)"] = [sys.executable, __file__, "--peer-only", str(source), str(output)]
    upstream = os.environ.get("PYPTO_SERVING_ROOT")
    if upstream:
        script = str(Path(upstream) / "scripts" / "convert_deepseek_v4_to_w8a8.py")
        options = ["--input-dir", str(source), "--output-dir", str(output)]
        contenders["pypto-serving (rtn)"] = [sys.executable, script, *options]
    runs: dict[str, list[Measurement]] = {name: [] for name in contenders}
    copies, written = [], 0
    shards = sorted(source.glob("*.safetensors"))
    for _ in range(arguments.repeat):
        for name, command in contenders.items():
            remove(output)
            runs[name].append(run_measured(command))
            written = sum(path.stat().st_size for path in output.glob("*.safetensors"))
        remove(output)
        copies.append(copy_seconds(shards, work / "copy", written))
    rows = [
        (
            name,
            Measurement(
                statistics.median(item.wall for item in items),
                statistics.median(item.cpu for item in items),
                max(item.peak for item in items),
            ),
        )
        for name, items in runs.items()
    ]
    gigabytes = sum(path.stat().st_size for path in shards) / 1e9
    print(f"{gigabytes:.2f} GB read, {written / 1e9:.2f} GB written, {os.cpu_count()} processors")
    print_table(rows, gigabytes, "source")
    seconds = statistics.median(copies)
    print(
        f"copying the same bytes: {seconds:.2f} s; exact reaches {100 * seconds / rows[0][1].wall:.0f} % of that speed"
    )


if __name__ == "__main__":
    main()
