"""The command line, with the rules that upstream checks itself."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pypto_serving.serving.engine.async_engine import EngineConfig

ROWS = {0: 8, 1: 8, 2: 4, 3: 4}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pypto-serving")
    parser.add_argument("--model", required=True)
    parser.add_argument("--platform", default="a2a3")
    parser.add_argument("--devices")
    for name in ("dp", "ep", "tp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.add_argument("--long-prefill-token-threshold", type=int, default=2048)
    parser.add_argument("--npu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--num-speculative-tokens", type=int)
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--profile-output")
    return parser


def build_serving_engine_config(arguments: argparse.Namespace) -> EngineConfig:
    if (arguments.dp, arguments.ep, arguments.tp) != (8, 8, 1):
        raise ValueError("DeepSeekV4 serving requires --dp 8 --ep 8 with --tp 1 (the default)")
    if len(set((arguments.devices or "").split(","))) != 8:
        raise ValueError("DeepSeekV4 serving requires exactly 8 NPU device ids")
    drafts = _drafts(arguments.speculative_config, arguments.num_speculative_tokens)
    rows = ROWS.get(drafts, 2)
    if arguments.max_num_seqs > 8 * rows:
        raise ValueError(f"DeepSeekV4 decode kernels support at most --max-num-seqs {8 * rows} ({rows} per rank)")
    return EngineConfig(
        drafts=drafts,
        rows=rows,
        max_seq_len=arguments.max_model_len,
        max_running=arguments.max_num_seqs,
        profile=arguments.profile,
    )


def _drafts(configuration: Any, number: int | None) -> int:
    if configuration is None:
        return number or 0
    if configuration.get("method") != "mtp":
        raise ValueError("DeepSeek V4 --speculative-config requires method='mtp'")
    return int(configuration["num_speculative_tokens"])
