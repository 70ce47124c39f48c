"""DeepSeek V4 written for fast training on a CPU, with the parameters under their official checkpoint names.

The mathematics is that of transformers' `DeepseekV4ForCausalLM` (a unit test compares the logits), plus the multi-token
prediction block.  Differences are only in cost: hyper-connections run in fused kernels, large products in BF16, routed
experts over sorted rows, and the lightning indexer is left out, because every compressed entry is selected at the
lengths used in training (`index_topk` times four tokens), which makes the selection a no-op without a gradient.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from copying import plant_copying
from fake_quantization import quantize_fp8_blocks, quantize_mxfp4
from fast_kernels import Collapse, Mix, NormedProduct, Sinkhorn
from torch import Tensor, nn


class Bf16Product(torch.autograd.Function):
    """`x @ weight.T` with BF16 operands and an FP32 result; x [rows, in], weight [out, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x16, weight16 = x.bfloat16(), weight.bfloat16()
        ctx.save_for_backward(x16, weight16)
        return torch.mm(x16, weight16.t()).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x16, weight16 = ctx.saved_tensors
        g16 = gradients[0].bfloat16()
        return torch.mm(g16, weight16).float(), torch.mm(g16.t(), x16).float()


class GroupedProduct(torch.autograd.Function):
    """Rows of x, sorted by expert, times that expert's matrix; x [rows, in], weight [experts, out, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bounds: list[int]) -> Tensor:
        x16, weight16 = x.bfloat16(), weight.bfloat16()
        out = torch.empty(x.shape[0], weight.shape[1], dtype=torch.bfloat16)
        for expert in range(len(bounds) - 1):
            rows = slice(bounds[expert], bounds[expert + 1])
            torch.mm(x16[rows], weight16[expert].t(), out=out[rows])
        ctx.save_for_backward(x16, weight16)
        ctx.bounds = bounds
        return out.float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x16, weight16 = ctx.saved_tensors
        g16 = gradients[0].bfloat16()
        grad_x, grad_weight = torch.empty_like(x16), torch.empty_like(weight16)
        for expert in range(len(ctx.bounds) - 1):
            rows = slice(ctx.bounds[expert], ctx.bounds[expert + 1])
            torch.mm(g16[rows], weight16[expert], out=grad_x[rows])
            torch.mm(g16[rows].t(), x16[rows], out=grad_weight[expert])
        return grad_x.float(), grad_weight.float(), None


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root mean square normalisation over the last axis, weighted or not."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Interleaved rotation of the trailing channels; cosine and sine [..., rope_dim / 2] broadcast against x."""
    width = 2 * cosine.shape[-1]
    plain, turned = x[..., :-width], x[..., -width:].unflatten(-1, (-1, 2))
    a, b = turned[..., 0], turned[..., 1]
    turned = torch.stack((a * cosine - b * sine, a * sine + b * cosine), -1).flatten(-2)
    return torch.cat((plain, turned), -1)


def rotary_frequencies(config: dict[str, Any], compress: bool) -> Tensor:
    """Inverse frequencies of the main table, or the YaRN-scaled ones that compressed layers use."""
    width = config["qk_rope_head_dim"]
    base = config["compress_rope_theta"] if compress else config["rope_theta"]
    plain = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if not compress:
        return plain.float()
    scaling = config["rope_scaling"]
    original = scaling["original_max_position_embeddings"]

    def corrected(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(corrected(scaling["beta_fast"])), 0)
    high = min(math.ceil(corrected(scaling["beta_slow"])), width - 1)
    kept = 1 - ((torch.arange(width // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return (plain / scaling["factor"] * (1 - kept) + plain * kept).float()


class Network(nn.Module):
    """All parameters of the checkpoint in `self.weights`, keyed by official name; routed experts are stacked."""

    def __init__(self, config: dict[str, Any], seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.quantized = False
        self.full_precision = False
        generator = torch.Generator().manual_seed(seed)
        tensors = initial_weights(config, generator)
        self.weights = {name: nn.Parameter(value) for name, value in tensors.items() if trainable(name, value)}
        self.constants = {name: value for name, value in tensors.items() if not trainable(name, value)}
        for name, parameter in self.weights.items():
            self.register_parameter(name.replace(".", "/"), parameter)
        self.tables = {compress: rotary_frequencies(config, compress) for compress in (False, True)}
        self.loads: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that belongs to the checkpoint, detached, by official name."""
        return {name: value.detach() for name, value in {**self.weights, **self.constants}.items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy saved values in place."""
        for name, value in tensors.items():
            (self.weights[name].data if name in self.weights else self.constants[name]).copy_(value)

    # -- pieces -------------------------------------------------------------------------------------------------

    def matrix(self, name: str) -> Tensor:
        """A two-dimensional weight, rounded to its FP8 form (straight-through) when quantisation is on."""
        weight = self.weights[name]
        return quantize_fp8_blocks(weight) if self.quantized and is_fp8(name) else weight

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.full_precision:
            return F.linear(x, weight)
        return Bf16Product.apply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self.product(x, self.matrix(name))

    def collapse_weights(self, streams: Tensor, prefix: str) -> Tensor:
        """The 24 (or 4) raw mixing values of each token, [values, tokens]."""
        eps = self.config["rms_norm_eps"]
        return NormedProduct.apply(streams.flatten(1), self.weights[f"{prefix}_fn"], eps, not self.full_precision)

    def hyper_connection(self, streams: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        """streams [tokens, 4, hidden] -> collapsed [tokens, hidden], post [4, tokens], comb [4 in, 4 out, tokens]."""
        eps = self.config["hc_eps"]
        raw = self.collapse_weights(streams, prefix)
        scale, base = self.weights[f"{prefix}_scale"], self.weights[f"{prefix}_base"][:, None]
        pre = torch.sigmoid(raw[:4] * scale[0] + base[:4]) + eps
        post = 2 * torch.sigmoid(raw[4:8] * scale[1] + base[4:8])
        comb = torch.softmax((raw[8:] * scale[2] + base[8:]).view(4, 4, -1), dim=1) + eps
        comb = Sinkhorn.apply(comb, self.config["hc_sinkhorn_iters"], eps)
        return Collapse.apply(streams, pre), post, comb

    def head(self, streams: Tensor, prefix: str, norm: str) -> Tensor:
        """The collapsed and normed hidden state in front of the vocabulary projection, [tokens, hidden]."""
        raw = self.collapse_weights(streams, f"{prefix}hc_head")
        scale, base = self.weights[f"{prefix}hc_head_scale"], self.weights[f"{prefix}hc_head_base"][:, None]
        pre = torch.sigmoid(raw * scale[0] + base) + self.config["hc_eps"]
        return rms(Collapse.apply(streams, pre), self.weights[norm], self.config["rms_norm_eps"])

    def compress(self, x: Tensor, prefix: str, ratio: int) -> Tensor:
        """Compressed entries of every complete window: x [batch, length, hidden] -> [batch, windows, head_dim]."""
        batch, length, _ = x.shape
        windows, width = length // ratio, self.config["head_dim"]
        x = x[:, : windows * ratio]
        values = self.linear(x, f"{prefix}.wkv.weight").view(batch, windows, ratio, -1)
        gates = self.linear(x, f"{prefix}.wgate.weight").view(batch, windows, ratio, -1) + self.weights[f"{prefix}.ape"]
        if ratio == 4:
            before_values = F.pad(values[:, :-1, :, :width], (0, 0, 0, 0, 1, 0))
            before_gates = F.pad(gates[:, :-1, :, :width], (0, 0, 0, 0, 1, 0), value=-torch.inf)
            values = torch.cat((before_values, values[..., width:]), 2)
            gates = torch.cat((before_gates, gates[..., width:]), 2)
        entries = (values * gates.softmax(2)).sum(2)
        entries = rms(entries, self.weights[f"{prefix}.norm.weight"], self.config["rms_norm_eps"])
        angles = torch.arange(windows)[:, None] * ratio * self.tables[True]
        return rotate(entries, angles.cos(), angles.sin())

    def attention(self, x: Tensor, prefix: str, ratio: int) -> Tensor:
        """x [batch, length, hidden] -> [batch, length, hidden]."""
        config, eps = self.config, self.config["rms_norm_eps"]
        batch, length, _ = x.shape
        heads, width, groups = config["num_attention_heads"], config["head_dim"], config["o_groups"]
        positions = torch.arange(length)
        angles = positions[:, None] * self.tables[ratio > 0]
        cosine, sine = angles.cos(), angles.sin()

        latent = rms(self.linear(x, f"{prefix}.wq_a.weight"), self.weights[f"{prefix}.q_norm.weight"], eps)
        q = rms(self.linear(latent, f"{prefix}.wq_b.weight").view(batch, length, heads, width), None, eps)
        q = rotate(q, cosine[:, None], sine[:, None]).transpose(1, 2)
        kv = rms(self.linear(x, f"{prefix}.wkv.weight"), self.weights[f"{prefix}.kv_norm.weight"], eps)
        kv = rotate(kv, cosine, sine)
        distance = positions[:, None] - positions
        visible = (distance >= 0) & (distance < config["sliding_window"])
        if ratio and length >= ratio:
            entries = self.compress(x, f"{prefix}.compressor", ratio)
            kv = torch.cat((kv, entries), 1)
            visible = torch.cat((visible, torch.arange(entries.shape[1]) < ((positions + 1) // ratio)[:, None]), 1)
        out = attend_with_sink(q, kv, visible, self.weights[f"{prefix}.attn_sink"], width**-0.5, self.full_precision)
        out = rotate(out.transpose(1, 2), cosine[:, None], -sine[:, None])

        grouped = out.reshape(batch * length, groups, -1)
        latent_out = self.matrix(f"{prefix}.wo_a.weight").view(groups, config["o_lora_rank"], -1)
        out = torch.cat([self.product(grouped[:, group], latent_out[group]) for group in range(groups)], -1)
        return self.linear(out, f"{prefix}.wo_b.weight").view(batch, length, -1)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        limit = self.config["swiglu_limit"]
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

    def route(self, x: Tensor, token_ids: Tensor, prefix: str) -> tuple[Tensor, Tensor]:
        """Experts and their weights of each token, both [tokens, k]."""
        scores = F.softplus(F.linear(x, self.weights[f"{prefix}.gate.weight"])).sqrt()
        table = self.constants.get(f"{prefix}.gate.tid2eid")
        if table is not None:
            chosen = table[token_ids]
        else:
            biased = scores.detach() + self.constants[f"{prefix}.gate.bias"]
            chosen = biased.topk(self.config["num_experts_per_tok"], -1).indices
        weights = scores.gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]

    def experts(self, x: Tensor, token_ids: Tensor, prefix: str) -> Tensor:
        """Shared expert plus routed experts; x [tokens, hidden]."""
        chosen, weights = self.route(x, token_ids, prefix)
        flat, order = chosen.flatten().sort(stable=True)
        load = torch.bincount(flat, minlength=self.config["n_routed_experts"])
        self.loads[f"{prefix}.gate.bias"] = load
        bounds = [0, *load.cumsum(0).tolist()]
        gate_up = torch.cat((self.weights[f"{prefix}.experts.w1"], self.weights[f"{prefix}.experts.w3"]), 1)
        down = self.weights[f"{prefix}.experts.w2"]
        if self.quantized:
            gate_up, down = quantize_mxfp4(gate_up), quantize_mxfp4(down)
        rows = x[order // chosen.shape[1]]
        if self.full_precision:
            spans = [slice(bounds[e], bounds[e + 1]) for e in range(len(bounds) - 1)]
            hidden = torch.cat([F.linear(rows[span], gate_up[e]) for e, span in enumerate(spans)])
            hidden = self.gated(*hidden.chunk(2, -1))
            out = torch.cat([F.linear(hidden[span], down[e]) for e, span in enumerate(spans)])
        else:
            hidden = self.gated(*GroupedProduct.apply(rows, gate_up, bounds).chunk(2, -1))
            out = GroupedProduct.apply(hidden, down, bounds)
        out = out * weights.flatten()[order][:, None]
        routed = out[order.argsort()].view(*chosen.shape, -1).sum(1)
        shared = f"{prefix}.shared_experts"
        hidden = self.gated(self.linear(x, f"{shared}.w1.weight"), self.linear(x, f"{shared}.w3.weight"))
        return routed + self.linear(hidden, f"{shared}.w2.weight")

    def block(self, streams: Tensor, token_ids: Tensor, prefix: str, ratio: int) -> Tensor:
        """One decoder block; streams [tokens, 4, hidden], token_ids [batch, length]."""
        eps = self.config["rms_norm_eps"]
        collapsed, post, comb = self.hyper_connection(streams, f"{prefix}.hc_attn")
        normed = rms(collapsed, self.weights[f"{prefix}.attn_norm.weight"], eps).view(*token_ids.shape, -1)
        update = self.attention(normed, f"{prefix}.attn", ratio)
        streams = Mix.apply(streams, update.flatten(0, 1), post, comb)
        collapsed, post, comb = self.hyper_connection(streams, f"{prefix}.hc_ffn")
        normed = rms(collapsed, self.weights[f"{prefix}.ffn_norm.weight"], eps)
        return Mix.apply(streams, self.experts(normed, token_ids.flatten(), f"{prefix}.ffn"), post, comb)

    # -- whole model --------------------------------------------------------------------------------------------

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Final hidden states of the main model and of the MTP block, both [tokens, hidden] with tokens = batch*length.

        Row p of the second predicts token p + 2; its last row of every sequence sees a wrapped token and is to be
        ignored.  Sequences are padded on the right, so that causality alone keeps padding out.
        """
        config, eps = self.config, self.config["rms_norm_eps"]
        embedded = F.embedding(token_ids, self.weights["embed.weight"])
        streams = embedded.flatten(0, 1)[:, None].expand(-1, config["hc_mult"], -1).contiguous()
        for layer in range(config["num_hidden_layers"]):
            streams = self.block(streams, token_ids, f"layers.{layer}", config["compress_ratios"][layer])
        main = self.head(streams, "", "norm.weight")

        following = token_ids.roll(-1, 1)
        e = rms(embedded.roll(-1, 1).flatten(0, 1), self.weights["mtp.0.enorm.weight"], eps)
        h = rms(streams, self.weights["mtp.0.hnorm.weight"], eps)
        draft = self.linear(e, "mtp.0.e_proj.weight")[:, None] + self.linear(h, "mtp.0.h_proj.weight")
        draft = self.block(draft, following, "mtp.0", config["compress_ratios"][-1])
        return main, self.head(draft, "mtp.0.", "mtp.0.norm.weight")

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, vocabulary]."""
        return self.product(hidden, self.weights["head.weight"])


def attend_with_sink(q: Tensor, kv: Tensor, visible: Tensor, sink: Tensor, scale: float, exact: bool) -> Tensor:
    """Attention of q [batch, heads, length, width] to shared keys that are also values, kv [batch, keys, width].

    The sink is one more key of every head whose logit is the head's parameter and whose value is zero.  It is expressed
    as a key with an extra channel, so that an ordinary fused attention call handles it.
    """
    batch, heads, length, width = q.shape
    keys = kv.shape[1]
    extra = 8
    query = torch.cat((q * scale, q.new_ones(batch, heads, length, extra)), -1)
    key = F.pad(kv, (0, extra))[:, None].expand(-1, heads, -1, -1)
    sink_key = F.pad(sink[None, :, None, None], (width, extra - 1)).expand(batch, -1, -1, -1)
    key = torch.cat((key, sink_key), 2)
    value = F.pad(kv, (0, extra, 0, 1))[:, None].expand(-1, heads, -1, -1)
    mask = torch.zeros(length, keys + 1).masked_fill_(~F.pad(visible, (0, 1), value=True), -torch.inf)
    if exact:
        return ((query @ key.transpose(-1, -2) + mask).softmax(-1) @ value)[..., :width]
    operands = (tensor.bfloat16() for tensor in (query, key, value, mask[None, None]))
    return F.scaled_dot_product_attention(*operands, scale=1.0)[..., :width].float()


def is_fp8(name: str) -> bool:
    """Whether the official checkpoint stores this matrix as FP8 with 128x128 block scales."""
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf == "wkv":
        return ".compressor." not in name
    return leaf in {"wq_a", "wq_b", "wo_a", "wo_b", "e_proj", "h_proj"} or ".shared_experts." in name


def trainable(name: str, value: Tensor) -> bool:
    return value.is_floating_point() and not name.endswith("gate.bias")


def initial_weights(config: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Random start, by official name.  Matrices are scaled by their input width."""
    hidden, width, experts = config["hidden_size"], config["head_dim"], config["n_routed_experts"]
    heads, inner, vocabulary = config["num_attention_heads"], config["moe_intermediate_size"], config["vocab_size"]
    q_rank, groups, o_rank = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    tensors: dict[str, Tensor] = {}

    def normal(name: str, *shape: int, gain: float = 1.0) -> None:
        tensors[name] = torch.randn(*shape, generator=generator) * (gain * shape[-1] ** -0.5)

    def ones(name: str, size: int) -> None:
        tensors[name] = torch.ones(size)

    def mixing(prefix: str, favourite: int) -> None:
        base = torch.cat((torch.full((4,), -0.5), torch.zeros(4), torch.full((16,), -1.5)))
        base[favourite] = 1.0
        base[8:].view(4, 4).fill_diagonal_(2.0)
        normal(f"{prefix}_fn", 24, 4 * hidden, gain=0.5)
        tensors[f"{prefix}_base"], tensors[f"{prefix}_scale"] = base, torch.full((3,), 0.5)

    def head(prefix: str) -> None:
        normal(f"{prefix}hc_head_fn", 4, 4 * hidden, gain=0.5)
        tensors[f"{prefix}hc_head_base"], tensors[f"{prefix}hc_head_scale"] = torch.zeros(4), torch.full((1,), 0.5)

    def compressor(prefix: str, ratio: int, size: int) -> None:
        channels = size * (2 if ratio == 4 else 1)
        normal(f"{prefix}.wkv.weight", channels, hidden)
        normal(f"{prefix}.wgate.weight", channels, hidden)
        tensors[f"{prefix}.ape"] = torch.zeros(ratio, channels)
        ones(f"{prefix}.norm.weight", size)

    def block(prefix: str, ratio: int, hashed: bool, index: int) -> None:
        mixing(f"{prefix}.hc_attn", (2 * index) % 4)
        mixing(f"{prefix}.hc_ffn", (2 * index + 1) % 4)
        ones(f"{prefix}.attn_norm.weight", hidden)
        ones(f"{prefix}.ffn_norm.weight", hidden)
        attention = f"{prefix}.attn"
        tensors[f"{attention}.attn_sink"] = torch.zeros(heads)
        normal(f"{attention}.wq_a.weight", q_rank, hidden)
        ones(f"{attention}.q_norm.weight", q_rank)
        normal(f"{attention}.wq_b.weight", heads * width, q_rank)
        normal(f"{attention}.wkv.weight", width, hidden)
        tensors[f"{attention}.kv_norm.weight"] = torch.full((width,), 1.5)
        normal(f"{attention}.wo_a.weight", groups * o_rank, heads * width // groups)
        normal(f"{attention}.wo_b.weight", hidden, groups * o_rank, gain=0.1)
        if ratio:
            compressor(f"{attention}.compressor", ratio, width)
        if ratio == 4:
            index_heads, index_width = config["index_n_heads"], config["index_head_dim"]
            normal(f"{attention}.indexer.wq_b.weight", index_heads * index_width, q_rank)
            normal(f"{attention}.indexer.weights_proj.weight", index_heads, hidden)
            compressor(f"{attention}.indexer.compressor", ratio, index_width)
        normal(f"{prefix}.ffn.gate.weight", experts, hidden)
        if hashed:
            drawn = torch.rand(vocabulary, experts, generator=generator).topk(config["num_experts_per_tok"], -1)
            tensors[f"{prefix}.ffn.gate.tid2eid"] = drawn.indices
        else:
            tensors[f"{prefix}.ffn.gate.bias"] = torch.zeros(experts)
        normal(f"{prefix}.ffn.experts.w1", experts, inner, hidden)
        normal(f"{prefix}.ffn.experts.w3", experts, inner, hidden)
        normal(f"{prefix}.ffn.experts.w2", experts, hidden, inner, gain=0.15)
        for leaf in ("w1", "w3"):
            normal(f"{prefix}.ffn.shared_experts.{leaf}.weight", inner, hidden)
        normal(f"{prefix}.ffn.shared_experts.w2.weight", hidden, inner, gain=0.15)

    tensors["embed.weight"] = torch.randn(vocabulary, hidden, generator=generator) * 0.5
    normal("head.weight", vocabulary, hidden, gain=0.5)
    ones("norm.weight", hidden)
    head("")
    ratios = config["compress_ratios"]
    for layer in range(config["num_hidden_layers"]):
        block(f"layers.{layer}", ratios[layer], layer < config["num_hash_layers"], layer)
    plant_copying(tensors, config, generator)
    block("mtp.0", ratios[-1], False, config["num_hidden_layers"])
    head("mtp.0.")
    for name in ("enorm", "hnorm", "norm"):
        ones(f"mtp.0.{name}.weight", hidden)
    normal("mtp.0.e_proj.weight", hidden, hidden, gain=0.7)
    normal("mtp.0.h_proj.weight", hidden, hidden, gain=0.7)
    return tensors
