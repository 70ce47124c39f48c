"""A start from which the model can copy.

Nearly every skill of the nano model is copying: a city into a call, a temperature into an answer, a code word out of a
system prompt.  Transformers copy with two heads in a row: one that looks at the previous token, and one that looks for
an earlier place whose previous token equals the current one.  Random weights find this pair only after tens of millions
of tokens, far more than an hour on two cores, so it is written into the first two layers; training does the rest.

The hidden channels are divided at the start: token codes, one constant, and room for what the heads find out.
"""

from typing import Any

import torch
from torch import Tensor

ROOM, MATCHED, CODE_SIZE, CONSTANT = 64, 48, 0.5, 4.0
POSITION_GAIN, VALUE_GAIN, HEAD_GAIN = 8.0, 1.5, 0.15
TURNING_PAIRS = 3


def plant_copying(tensors: dict[str, Tensor], config: dict[str, Any], generator: torch.Generator) -> None:
    """Overwrite the embedding, the head and head 0 of layers 0 and 1 in place."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    codes = hidden - ROOM - 1
    constant_channel, room = codes, slice(codes + 1, codes + 1 + MATCHED)
    first = torch.linalg.qr(torch.randn(codes, ROOM, generator=generator))[0].t()
    second = torch.linalg.qr(torch.randn(codes, MATCHED, generator=generator))[0].t()

    embedding = 0.02 * torch.randn(vocabulary, hidden, generator=generator)
    embedding[:, :codes] = CODE_SIZE * torch.randn(vocabulary, codes, generator=generator)
    embedding[:, constant_channel] = CONSTANT
    tensors["embed.weight"] = embedding
    tensors["head.weight"] *= 0.6
    tensors["head.weight"][:, room] = HEAD_GAIN * embedding[:, :codes] @ second.t()
    look_back_one_token(tensors, config, first, constant_channel)
    find_the_same_token(tensors, config, first, second)


def look_back_one_token(tensors: dict[str, Tensor], config: dict[str, Any], code: Tensor, constant: int) -> None:
    """Head 0 of layer 0 moves a projection of the previous token's code into the room.

    There are no biases, so the positional score comes from the constant channel: keys hold it in the fastest rotary
    channels, and the query holds the same turned back by one position.
    """
    attention, width = "layers.0.attn", config["head_dim"]
    first = width - config["qk_rope_head_dim"]
    keys, latent = tensors[f"{attention}.wkv.weight"], tensors[f"{attention}.wq_a.weight"]
    query = tensors[f"{attention}.wq_b.weight"][:width]
    keys *= 0.05
    keys[:ROOM, : code.shape[1]] = code
    latent[0] = 0.0
    latent[0, constant] = 4 * CODE_SIZE / CONSTANT
    query *= 0.05
    for pair in range(TURNING_PAIRS):
        channel = first + 2 * pair
        angle = torch.tensor(-(config["rope_theta"] ** (-2 * pair / config["qk_rope_head_dim"])))
        keys[channel : channel + 2] = 0.0
        keys[channel, constant] = CODE_SIZE / CONSTANT
        query[channel, 0], query[channel + 1, 0] = 2 * torch.cos(angle), 2 * torch.sin(angle)
    tensors[f"{attention}.kv_norm.weight"][:first] = 1.0
    tensors[f"{attention}.kv_norm.weight"][first : first + 2 * TURNING_PAIRS] = POSITION_GAIN
    write_into_room(tensors, attention, 0, ROOM, 0.35)


def find_the_same_token(tensors: dict[str, Tensor], config: dict[str, Any], code: Tensor, value: Tensor) -> None:
    """Head 0 of layer 1 looks for a place whose previous token is the current one, and fetches the token there."""
    attention, width, codes = "layers.1.attn", config["head_dim"], code.shape[1]
    keys, latent = tensors[f"{attention}.wkv.weight"], tensors[f"{attention}.wq_a.weight"]
    query = tensors[f"{attention}.wq_b.weight"][:width]
    keys *= 0.05
    keys[:MATCHED, codes + 1 : codes + 1 + MATCHED] = torch.eye(MATCHED)
    keys[MATCHED : 2 * MATCHED, :codes] = value
    latent[:MATCHED] = 0.0
    latent[:MATCHED, :codes] = code[:MATCHED]
    query *= 0.05
    query[:MATCHED, :MATCHED] = torch.eye(MATCHED)
    tensors[f"{attention}.kv_norm.weight"].fill_(VALUE_GAIN)
    compressor = f"{attention}.compressor"
    tensors[f"{compressor}.wkv.weight"].copy_(torch.cat((keys, keys)))
    tensors[f"{compressor}.norm.weight"].fill_(VALUE_GAIN)
    write_into_room(tensors, attention, MATCHED, MATCHED, 1.0)


def write_into_room(tensors: dict[str, Tensor], attention: str, start: int, count: int, gain: float) -> None:
    """Route `count` channels of head 0, from `start` on, through the first output group into the room."""
    inner, outer = tensors[f"{attention}.wo_a.weight"], tensors[f"{attention}.wo_b.weight"]
    inner[:count] *= 0.05
    inner[:count, start : start + count] += torch.eye(count)
    room = outer.shape[0] - ROOM
    outer[:, :count] *= 0.1
    outer[room : room + count, :count] = gain * torch.eye(count)
