"""Writes the checkpoint of a training run: `python export.py --run DIR --out DIR`."""

import argparse
import shutil
from pathlib import Path

import torch
from checkpoint import write_checkpoint
from configuration import CONFIG


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1])
    arguments = parser.parse_args()
    state = torch.load(arguments.run / "state.pt")
    total = write_checkpoint(state["tensors"], CONFIG, arguments.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(arguments.run / name, arguments.out / name)
    print(f"step {state['step']}: {total / 1e6:.2f} MB of tensors in {arguments.out}")


if __name__ == "__main__":
    main()
