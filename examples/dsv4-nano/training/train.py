"""Trains the nano model: `python train.py --out DIR`; resumes from DIR if it holds a state.

One seed decides the data, the start and the result (up to the order of floating-point sums on another machine).
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from configuration import CONFIG
from corpus import Corpus, Sample
from network import Network
from tokenizer import save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor

SEED = 8225
STEPS = 1550
BATCH_TOKENS = 1536
WARMUP = 40
CYCLES = [(600, 1000, 2e-3, 1e-4), (1000, 1300, 1.2e-3, 6e-5), (1300, STEPS, 1e-3, 4e-5)]
"""(from step, to step, rate at the start, rate at the end): the rate falls along a cosine; it is constant before."""
PHASES: list[tuple[int, int, dict[str, float]]] = [
    (0, 330, {"repetition": 2.0}),
    (240, 1024, {}),
    (1000, 1024, {"repetition": 0.6, "arithmetic": 6.0, "raw_text": 2.4}),
    (1300, 1024, {"repetition": 0.8, "arithmetic": 4.0, "small_sums": 6.0, "structured": 1.5, "raw_text": 2.0}),
]
"""(first step, longest sample in tokens, changed weights of kinds): copying, then everything, then more sums."""
QUANTIZE_FROM = 650
DRAFT_LOSS = 0.3
PROMPT_WEIGHT = 0.05


def tokenize(sample: Sample, tokenizer: Tokenizer) -> tuple[list[int], list[float]]:
    """Ids and the loss weight of each id as a target: 1 in raw text and in assistant turns, small in prompts."""
    ids = tokenizer.encode(sample.text, add_special_tokens=False).ids
    if sample.request is None:
        return ids, [1.0] * len(ids)
    openers = {tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")}
    assistant, end = tokenizer.token_to_id("<｜Assistant｜>"), tokenizer.token_to_id("<｜end▁of▁sentence｜>")
    weights, inside = [], False
    for position, token in enumerate(ids):
        weights.append(1.0 if inside else PROMPT_WEIGHT)
        if token in openers and ids[position - 1] == assistant:
            inside = True
        elif token == end:
            inside = False
    return ids, weights


def batches(seed: int, tokenizer: Tokenizer, limit: int, emphasis: dict[str, float]) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches (ids, weights), both [batch, length], of samples of similar length, padded on the right."""
    stream, shuffler = iter(Corpus(seed, emphasis=emphasis)), random.Random(seed)
    while True:
        pool = []
        while len(pool) < 400:
            ids, weights = tokenize(next(stream), tokenizer)
            if len(ids) <= limit:
                pool.append((ids, weights))
        pool.sort(key=lambda pair: len(pair[0]))
        groups: list[list[tuple[list[int], list[float]]]] = [[]]
        for pair in pool:
            if groups[-1] and (len(groups[-1]) + 1) * len(pair[0]) > BATCH_TOKENS * 1.15:
                groups.append([])
            groups[-1].append(pair)
        shuffler.shuffle(groups)
        for group in groups:
            length = -(-max(len(ids) for ids, _ in group) // 4) * 4
            ids_out, weights_out = torch.full((len(group), length), 2), torch.zeros(len(group), length)
            for row, (ids, weights) in enumerate(group):
                ids_out[row, : len(ids)] = torch.tensor(ids)
                weights_out[row, : len(ids)] = torch.tensor(weights)
            yield ids_out, weights_out


def stream_from(step: int, tokenizer: Tokenizer) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """(step, batch) from `step` on, phase after phase; the same with and without a restart."""
    ends = [begin for begin, _, _ in PHASES[1:]] + [sys.maxsize]
    for number, ((begin, limit, emphasis), end) in enumerate(zip(PHASES, ends, strict=True)):
        if step < end:
            stream = batches(SEED + number, tokenizer, limit, emphasis)
            yield from zip(range(step, end), islice(stream, step - begin, None), strict=False)
            step = end


def rate_at(step: int) -> float:
    """Learning rate of a step: warm-up, constant, then the cycles."""
    peak = CYCLES[0][2]
    for begin, end, high, low in CYCLES:
        if begin <= step < end:
            return low + (high - low) * 0.5 * (1 + math.cos(math.pi * (step - begin) / (end - begin)))
    return peak * min(1.0, (step + 1) / WARMUP)


def shifted_loss(network: Network, hidden: Tensor, ids: Tensor, weights: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy of predicting the token `shift` places ahead, summed; and the mean over replies."""
    targets, weights = ids.roll(-shift, 1), weights.roll(-shift, 1).clone()
    weights[:, -shift:] = 0
    chosen = weights.flatten().nonzero()[:, 0]
    each = F.cross_entropy(network.logits(hidden[chosen]), targets.flatten()[chosen], reduction="none")
    kept = weights.flatten()[chosen]
    reply = kept == 1
    return (each * kept).sum() / kept.sum().clamp_min(300), each.detach()[reply].mean()


def make_optimizer(network: Network) -> torch.optim.Optimizer:
    """AdamW; decay only on matrices of the blocks, faster steps for gains, sinks and other vectors."""
    groups: dict[str, dict[str, Any]] = {
        "matrices": {"params": [], "weight_decay": 0.05, "speed": 1.0},
        "mixing": {"params": [], "weight_decay": 0.0, "speed": 1.0},
        "vectors": {"params": [], "weight_decay": 0.0, "speed": 2.0},
    }
    for name, parameter in network.weights.items():
        kind = "mixing" if "hc_" in name or name.endswith(".ape") else "matrices" if parameter.dim() > 1 else "vectors"
        groups[kind]["params"].append(parameter)
    return torch.optim.AdamW(list(groups.values()), lr=CYCLES[0][2], betas=(0.9, 0.95), fused=True)


def balance_experts(network: Network) -> None:
    """Auxiliary-loss-free balancing: raise the selection bias of experts that got too few tokens."""
    for name, load in network.loads.items():
        if name in network.constants:
            network.constants[name] += 1e-3 * torch.sign(load.float().mean() - load)


def save_state(path: Path, **state: Any) -> None:
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)

    if not (out / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(SEED, CONFIG["vocab_size"]), out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    network = Network(CONFIG, SEED)
    optimizer = make_optimizer(network)
    first = 0
    if (out / "state.pt").exists():
        state = torch.load(out / "state.pt")
        network.load(state["tensors"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]

    started, tokens = time.monotonic(), 0
    with (out / "loss.jsonl").open("a", encoding="utf-8") as log:
        for step, (ids, weights) in stream_from(first, tokenizer):
            if step == arguments.steps:
                break
            network.quantized = step >= QUANTIZE_FROM
            for group in optimizer.param_groups:
                group["lr"] = group["speed"] * rate_at(step)
            main_hidden, draft_hidden = network(ids)
            loss, main_mean = shifted_loss(network, main_hidden, ids, weights, 1)
            draft_loss, draft_mean = shifted_loss(network, draft_hidden, ids, weights, 2)
            (loss + DRAFT_LOSS * draft_loss).backward()
            norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0).item()
            optimizer.step()
            optimizer.zero_grad()
            balance_experts(network)
            tokens += ids.numel()
            record = {
                "step": step,
                "length": ids.shape[1],
                "main": round(main_mean.item(), 4),
                "draft": round(draft_mean.item(), 4),
                "norm": round(norm, 3),
                "seconds": round(time.monotonic() - started, 2),
                "tokens": tokens,
            }
            log.write(json.dumps(record) + "\n")
            log.flush()
            if (step + 1) % 200 == 0 or step + 1 == arguments.steps:
                values = {name: value.clone() for name, value in network.tensors().items()}
                save_state(out / "state.pt", tensors=values, optimizer=optimizer.state_dict(), step=step + 1)


if __name__ == "__main__":
    main()
