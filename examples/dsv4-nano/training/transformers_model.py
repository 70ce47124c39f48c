"""Loads checkpoint tensors into transformers' `DeepseekV4ForCausalLM`, the independent implementation."""

import re
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

RENAMES = [
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.indexer\.weights_proj\.", ".compressor.indexer.scorer.weights_proj."),
    (r"\.indexer\.wq_b\.", ".compressor.indexer.q_b_proj."),
    (r"(compressor(\.indexer)?)\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_sink$", ".sinks"),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.experts\.w2$", ".experts.down_proj"),
]
GLOBAL_NAMES = {"embed.weight": "embed_tokens.weight", "norm.weight": "norm.weight"}


def transformers_state(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Training tensors under the names of transformers; the MTP block has no place there and is left out."""
    state: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.startswith("mtp.") or name.endswith(".experts.w3"):
            continue
        if name == "head.weight":
            state["lm_head.weight"] = value
        elif name in GLOBAL_NAMES:
            state[f"model.{GLOBAL_NAMES[name]}"] = value
        elif name.startswith("hc_head_"):
            state[f"model.hc_head.{name.removeprefix('hc_head_').join(['hc_', ''])}"] = value
        elif name.endswith(".experts.w1"):
            fused = torch.cat((value, tensors[name.removesuffix("w1") + "w3"]), 1)
            state[f"model.{name.replace('.ffn.', '.mlp.').removesuffix('w1')}gate_up_proj"] = fused
        else:
            for pattern, replacement in RENAMES:
                name = re.sub(pattern, replacement, name)
            state[f"model.{name}"] = value
    return state


def build_transformers_model(config: dict[str, Any], tensors: dict[str, Tensor]) -> DeepseekV4ForCausalLM:
    """An FP32 model in evaluation mode. Raises RuntimeError when a name is missing or unexpected."""
    fields = {key: value for key, value in config.items() if key not in {"quantization_config", "expert_dtype"}}
    fields.pop("torch_dtype", None)
    settings = DeepseekV4Config(**fields, attn_implementation="eager", experts_implementation="eager")
    model = DeepseekV4ForCausalLM(settings).float()
    model.load_state_dict(transformers_state(tensors), strict=True)
    return model.eval()
