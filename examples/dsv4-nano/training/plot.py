"""Draws the loss curve of a run: `python plot.py --run DIR --out FILE.png`."""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
from train import PHASES, QUANTIZE_FROM

SMOOTHING = 0.95


def smoothed(values: list[float]) -> list[float]:
    """Exponential mean, started at the first value."""
    out = values[:1]
    for value in values[1:]:
        out.append(SMOOTHING * out[-1] + (1 - SMOOTHING) * value)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "loss.png")
    arguments = parser.parse_args()
    lines = (arguments.run / "loss.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = [record["step"] for record in records]
    for key, color, label in (
        ("main", "tab:blue", "main model: next token of replies and texts"),
        ("draft", "tab:orange", "MTP block: the token after it"),
    ):
        values = [record[key] for record in records]
        axes.plot(steps, values, color=color, alpha=0.15, linewidth=0.6)
        axes.plot(steps, smoothed(values), color=color, label=label)
    marks = [
        (PHASES[1][0], "long samples"),
        (QUANTIZE_FROM, "quantised weights"),
        (PHASES[2][0], "more sums"),
        (PHASES[3][0], "short sums"),
    ]
    for step, text in marks:
        axes.axvline(step, color="grey", linewidth=0.8, linestyle=":")
        axes.annotate(text, (step, 0.006), rotation=90, ha="right", va="bottom", fontsize=8, color="grey")
    axes.set(xlabel="step", ylabel="cross entropy (nats a token)", yscale="log", ylim=(0.005, 10))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
