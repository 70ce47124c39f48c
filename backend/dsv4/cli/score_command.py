"""`dsv4 score`: teacher-forced logits of a checkpoint, to compare implementations with."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

    from dsv4.model import DeepseekV4Model


class NumericsOption(enum.Enum):
    """What the network computes with."""

    FLOAT = "float"
    W8A8 = "w8a8"


def register(app: typer.Typer) -> None:
    """Mount the command."""
    app.command("score")(score)


def score(
    model: Annotated[Path, typer.Option(help="Checkpoint directory, source or converted.", file_okay=False)],
    ids: Annotated[Path, typer.Option(help='JSON file: a list of token ids, or {"ids": [...]}.', dir_okay=False)],
    out: Annotated[Path, typer.Option(help="safetensors file to write.", dir_okay=False)],
    numerics: Annotated[
        NumericsOption, typer.Option(help="FP32 on dequantised weights, or the INT8 arithmetic of the NPU kernels.")
    ] = NumericsOption.W8A8,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves it to PyTorch.")] = 0,
) -> None:
    """Write the logits that a checkpoint gives every token of a text.

    Row i of `logits` [tokens, vocab] follows token i. Row i of `mtp_logits` [tokens - 1, vocab], written when the
    checkpoint has a prediction layer, is its prediction of token i + 2 from the model's streams at i and token i + 1.
    """
    import torch
    from safetensors.torch import save_file

    from dsv4.checkpoint import load_weights
    from dsv4.config import ModelConfig
    from dsv4.model import DeepseekV4Model

    if threads:
        torch.set_num_threads(threads)
    config = ModelConfig.from_directory(model)
    token_ids = read_ids(ids, config.vocab_size)
    weights = load_weights(model, config, numerics=numerics.value)
    with torch.inference_mode():
        network = DeepseekV4Model(config, weights, numerics=numerics.value)
        tensors = teacher_forced_logits(network, torch.tensor(token_ids))
    save_file(tensors, out, metadata={"format": "pt", "numerics": numerics.value})
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    typer.echo(f"{out}: {shapes}")


def read_ids(path: Path, vocab_size: int) -> list[int]:
    """Token ids of a JSON file. Raises ConfigurationError when it holds anything else."""
    import json

    from dsv4.errors import ConfigurationError

    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--ids {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"--ids {path}: not JSON: {error}") from error
    token_ids = document.get("ids") if isinstance(document, dict) else document
    if not isinstance(token_ids, list) or not token_ids:
        raise ConfigurationError(f'--ids {path}: neither a list of token ids nor {{"ids": [...]}}')
    for index, token in enumerate(token_ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ConfigurationError(f"--ids {path}: ids[{index}] is {token!r}, must be an integer below {vocab_size}")
    return token_ids


def teacher_forced_logits(network: DeepseekV4Model, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """`logits` and, where there is a prediction layer, `mtp_logits` of one sequence, walked in tiles through caches."""
    import torch

    from dsv4.cache.groups import MAX_ROWS_PER_SEQUENCE, cache_groups
    from dsv4.model import CachePools, ForwardBatch

    num_tokens = token_ids.shape[0]
    config = network.config
    groups = cache_groups(sliding_window=config.sliding_window, max_model_len=num_tokens)
    num_blocks = {group.name: group.blocks_for(num_tokens) for group in groups}
    predictors = len(network.prediction_layers)
    pools = CachePools(
        config, groups, num_blocks, numerics=network.numerics, device=network.device, num_mtp_layers=predictors
    )
    tables = {
        group.name: torch.nn.functional.pad(
            torch.arange(num_blocks[group.name]), (0, group.blocks_per_request - num_blocks[group.name]), value=-1
        )[None]
        for group in groups
    }

    def batch(tokens: torch.Tensor, start: int) -> ForwardBatch:
        positions = torch.arange(start, start + tokens.shape[0])
        return ForwardBatch(tokens, positions, torch.zeros_like(positions), tables)

    logits, predictions = [], []
    for start in range(0, num_tokens, MAX_ROWS_PER_SEQUENCE):
        end = min(start + MAX_ROWS_PER_SEQUENCE, num_tokens)
        streams = network.forward(batch(token_ids[start:end], start), pools)
        logits.append(network.logits(streams))
        following = token_ids[start + 1 : end + 1]
        if predictors and following.shape[0]:
            predicted = network.forward_mtp(streams[: following.shape[0]], batch(following, start), pools)
            predictions.append(network.mtp_logits(predicted))
    result = {"logits": torch.cat(logits)}
    if predictions:
        result["mtp_logits"] = torch.cat(predictions)
    return result
