from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from dsv4.checkpoint import load_weights
from dsv4.checkpoint.dequantize import dequantize_fp8, dequantize_mxfp4, quantize_rows_int8
from dsv4.config import ModelConfig
from dsv4.errors import CheckpointError
from dsv4.model import DeepseekV4Model
from safetensors.torch import load_file, save_file

from tests.unit.model.random_model import Caches, run_sequence, small_config, write_checkpoint

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def power(exponent_byte: int) -> float:
    return 2.0 ** (exponent_byte - 127)


def test_dequantize_fp8_with_partial_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(130, 300, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.randint(100, 140, (2, 3), generator=generator, dtype=torch.uint8)
    actual = dequantize_fp8(weight, scale.view(torch.float8_e8m0fnu))
    for row, column in ((0, 0), (127, 255), (128, 127), (129, 299), (5, 256)):
        expected = float(weight[row, column]) * power(int(scale[row // 128, column // 128]))
        assert float(actual[row, column]) == expected


def test_dequantize_mxfp4_takes_the_low_nibble_first() -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-128, 128, (4, 40), generator=generator, dtype=torch.int8)
    scale = torch.randint(120, 130, (4, 3), generator=generator, dtype=torch.uint8)
    actual = dequantize_mxfp4(packed, scale.view(torch.float8_e8m0fnu))
    assert actual.shape == (4, 80)
    for row in range(4):
        for column in range(80):
            byte = int(packed[row, column // 2]) & 0xFF
            code = byte >> 4 if column % 2 else byte & 15
            value = (-1 if code & 8 else 1) * E2M1[code & 7] * power(int(scale[row, column // 32]))
            assert float(actual[row, column]) == value


def test_quantize_rows_int8() -> None:
    weight = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[4] *= 1e-6
    values, scale = quantize_rows_int8(weight)
    rows = weight.numpy()
    expected_scale = np.maximum(np.abs(rows).max(axis=1), np.float32(1e-4)) / np.float32(127)
    expected = np.clip(np.rint(rows / expected_scale[:, None]), -127, 127)
    assert np.array_equal(scale.numpy(), expected_scale)
    assert np.array_equal(values.numpy(), expected)


def test_source_checkpoint_in_both_numerics(tmp_path: Path) -> None:
    """W8A8 from a source checkpoint equals W8A8 from its converted form."""
    source, converted = tmp_path / "source", tmp_path / "converted"
    config = write_checkpoint(source, small_config(), kind="source")
    weights = load_weights(source, config, numerics="w8a8")
    exact = load_weights(source, config, numerics="float")
    name = "layers.3.ffn.experts.2.w2.weight"
    values, scale = weights.quantized(name)
    expected_values, expected_scale = quantize_rows_int8(exact.matrix(name))
    assert torch.equal(values, expected_values)
    assert torch.equal(scale, expected_scale)
    wkv = "layers.0.attn.wkv.weight"
    assert torch.equal(weights.matrix(wkv), exact.matrix(wkv).bfloat16().float())

    converted_config = write_checkpoint(converted, small_config())
    tensors = load_file(converted / "model.safetensors")
    for tensor_name, tensor in tensors.items():
        if tensor_name.endswith(".scale"):
            continue
        if tensor.dtype == torch.int8:
            tensors[tensor_name], tensors[tensor_name.removesuffix("weight") + "scale"] = weights.quantized(tensor_name)
        elif tensor.dim() == 2 and tensor.dtype == torch.bfloat16:
            tensors[tensor_name] = weights.matrix(tensor_name).bfloat16()
        else:
            tensors[tensor_name] = weights.stored(tensor_name).clone()
    save_file(tensors, converted / "model.safetensors")
    ids = torch.arange(40)
    outputs = []
    for directory, model_config in ((source, config), (converted, converted_config)):
        loaded = load_weights(directory, model_config, numerics="w8a8")
        model = DeepseekV4Model(model_config, loaded, numerics="w8a8")
        outputs.append(run_sequence(model, Caches(model_config, "w8a8"), ids, [40])[0])
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(*outputs)


def test_form_is_recognised_without_a_quantization_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config())
    document = json.loads((tmp_path / "config.json").read_text())
    del document["quantization_config"]
    assert load_weights(tmp_path, ModelConfig.from_dict(document), numerics="float").kind == "w8a8"


def test_errors_name_file_and_tensor(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path, small_config())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)

    def with_change(name: str, tensor: torch.Tensor | None) -> pytest.ExceptionInfo[CheckpointError]:
        changed = {key: value for key, value in tensors.items() if key != name}
        if tensor is not None:
            changed[name] = tensor
        save_file(changed, path)
        with pytest.raises(CheckpointError) as caught:
            load_weights(tmp_path, config, numerics="w8a8")
        return caught

    name = "layers.1.attn.indexer.wq_b.weight"
    assert with_change(name, None).match(f"{tmp_path}.*tensor {name} is missing")
    assert with_change(name, torch.zeros(3, 3, dtype=torch.int8)).match(rf"{path}: tensor {name} has shape \[3, 3\]")
    assert with_change(name, tensors[name].float()).match(f"{path}: tensor {name} is F32, expected I8")


def test_index_errors(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path, small_config())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"embed.weight": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match="not a bare file name"):
        load_weights(tmp_path, config, numerics="w8a8")
    index.write_text(json.dumps({"weight_map": {"nothing": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor nothing is missing, but the index"):
        load_weights(tmp_path, config, numerics="w8a8")
    index.write_text(json.dumps({"weight_map": {"embed.weight": "absent.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"absent\.safetensors"):
        load_weights(tmp_path, config, numerics="w8a8")
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="weight_map"):
        load_weights(tmp_path, config, numerics="w8a8")
