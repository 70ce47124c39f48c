"""Each operator of the W8A8 form against a plain computation: integers exactly, the rest in FP64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from dsv4.model import DeepseekV4Model, cpu_kernels, hyper_connection, int8_linear, ops
from dsv4.model.attention import attend
from dsv4.model.cpu_kernels import grouped_int8_products
from dsv4.model.indexer import select_highest
from dsv4.model.routed_experts import LocalInt8Experts

from tests.unit.model.random_model import Caches


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def q8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The dynamic quantiser in NumPy FP32."""
    largest = np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(1e-4))
    multiplier = np.float32(127) / largest
    return np.rint(x * multiplier).astype(np.int64), np.float32(1) / multiplier


@pytest.mark.parametrize("quantize", [ops.quantize_rows, ops.quantize_rows_with_tensors])
def test_quantize_rows(quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
    x = random(50, 96) * torch.logspace(-6, 3, 50)[:, None]
    x[3] = 0
    values, scale = quantize(x)
    expected_values, expected_scale = q8(x.numpy())
    assert np.array_equal(values.numpy(), expected_values)
    assert np.array_equal(scale.numpy(), expected_scale)
    assert values.abs().max() == 127
    assert scale[3] == pytest.approx(1e-4 / 127, rel=1e-6)


@pytest.mark.parametrize("quantize", [ops.quantize_rows, ops.quantize_rows_with_tensors])
def test_quantize_rows_keeps_a_nan(quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
    x = random(2, 32)
    x[0, 7] = float("nan")
    _, scale = quantize(x)
    assert scale[0].isnan()
    assert scale[1].isfinite()


def test_quantize_rows_rounds_half_to_even() -> None:
    values, _ = ops.quantize_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]))
    assert values.tolist() == [[127, 0, 2, 2, 0, -2]]


@pytest.mark.parametrize("depth", [64, 1024, 4096])
@pytest.mark.parametrize("fast", [False, True])
def test_integer_matmul_is_exact(depth: int, fast: bool) -> None:
    if fast and not int8_linear.has_fast_integer_matmul(torch.device("cpu")):
        pytest.skip("no VNNI")
    x, weight = integers(20, depth, seed=1), integers(48, depth, seed=2)
    x[0], weight[0], weight[1] = 127, 127, -127  # the largest sums
    expected = (x.long() @ weight.long().T).float()
    assert torch.equal(int8_linear.integer_matmul(x.float(), weight, fast=fast), expected)


def test_int8_linear_applies_row_then_channel_scale() -> None:
    x, weight = integers(5, 64, seed=1), integers(32, 64, seed=2)
    row_scale, channel_scale = random(5, 1, seed=3).abs(), random(32, seed=4).abs()
    layer = int8_linear.Int8Linear(weight, channel_scale, torch.device("cpu"))
    expected = ((x.long() @ weight.long().T).float() * row_scale) * channel_scale
    assert torch.equal(layer(x.float(), row_scale), expected)


def test_grouped_products_are_exact() -> None:
    x, weight = integers(40, 96, seed=1), integers(8, 48, 96, seed=2)
    experts = torch.randint(0, 8, (40,), generator=torch.Generator().manual_seed(3)).sort().values
    expected = torch.stack([weight[expert].long() @ row.long() for row, expert in zip(x, experts, strict=True)])
    assert torch.equal(grouped_int8_products(x, weight, experts), expected.float())


def test_linear_does_not_depend_on_company() -> None:
    x, weight = random(33, 200, seed=1), random(70, 200, seed=2)
    together = ops.linear(x, weight)
    assert torch.allclose(together.double(), x.double() @ weight.double().T, atol=1e-4)
    for rows in (1, 2, 15, 16, 17):
        assert torch.equal(ops.linear(x[:rows], weight), together[:rows])


def test_hadamard_matrix_is_orthonormal() -> None:
    matrix = ops.hadamard_matrix(128, device=torch.device("cpu"))
    assert set(matrix.abs().unique().tolist()) == {0.08837890625}
    assert torch.allclose(matrix @ matrix.T, torch.eye(128), atol=1e-3)
    assert matrix[1, :4].sign().tolist() == [1, -1, 1, -1]
    with pytest.raises(ValueError, match="power of two"):
        ops.hadamard_matrix(96, device=torch.device("cpu"))


def test_swiglu_clamps() -> None:
    gate = torch.tensor([[-20.0, 5.0, 15.0]])
    up = torch.tensor([[-15.0, 15.0, 2.0]])
    actual = ops.swiglu(torch.cat((gate, up), dim=1), 10.0)[0].tolist()
    expected = [-20 / (1 + math.exp(20)) * -10, 5 / (1 + math.exp(-5)) * 10, 10 / (1 + math.exp(-10)) * 2]
    assert actual == pytest.approx(expected, rel=1e-6)


def reference_sinkhorn(logits: np.ndarray, iterations: int, epsilon: float) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(axis=2, keepdims=True))
    mapping = exponentials / exponentials.sum(axis=2, keepdims=True) + epsilon
    mapping /= mapping.sum(axis=1, keepdims=True) + epsilon
    for _ in range(iterations - 1):
        mapping /= mapping.sum(axis=2, keepdims=True) + epsilon
        mapping /= mapping.sum(axis=1, keepdims=True) + epsilon
    return mapping


@pytest.mark.parametrize("split", [cpu_kernels.split_mixes, hyper_connection.split_mixes])
def test_split_mixes(split: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    mixes = random(30, 24, scale=3.0)
    exact = mixes.double().numpy()
    expected = (
        1 / (1 + np.exp(-exact[:, :4])) + 1e-6,
        2 / (1 + np.exp(-exact[:, 4:8])),
        reference_sinkhorn(exact[:, 8:].reshape(-1, 4, 4), 20, 1e-6),
    )
    for actual, reference in zip(split(mixes, 4, 20, 1e-6), expected, strict=True):
        assert np.abs(actual.numpy() - reference).max() < 1e-5


def test_hyper_connection(random_w8a8: DeepseekV4Model) -> None:
    """Read and write against FP64, with the first index of the mapping as the source."""
    connection = random_w8a8.blocks[0]._attention_connection
    hidden, streams = random_w8a8.config.hidden_size, 4
    bundle, output = random(6, streams, hidden, seed=1), random(6, hidden, seed=2)
    flat = bundle.double().flatten(1)
    normed = flat / (flat.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()
    mixes = (normed @ connection._function.double().T) * connection._scale.double() + connection._base.double()
    read_weights = mixes[:, :4].sigmoid() + 1e-6
    write_weights = 2 * mixes[:, 4:8].sigmoid()
    mapping = torch.from_numpy(reference_sinkhorn(mixes[:, 8:].reshape(-1, 4, 4).numpy(), 20, 1e-6))
    expected_input = torch.einsum("nc,nch->nh", read_weights, bundle.double())
    expected_bundle = write_weights[:, :, None] * output.double()[:, None] + torch.einsum(
        "nio,nih->noh", mapping, bundle.double()
    )
    u, actual_write, actual_mapping = connection.read(bundle)
    assert (u - expected_input).abs().max() < 1e-5
    assert (actual_mapping - mapping).abs().max() < 1e-5
    assert (connection.write(output, bundle, actual_write, actual_mapping) - expected_bundle).abs().max() < 1e-4


@pytest.mark.parametrize("round_weights", [False, True])
def test_attend(round_weights: bool) -> None:
    rows, heads, width = 4, 3, 16
    query = random(rows, heads, width, seed=1)
    window, entries = random(rows, 128, width, seed=2), random(rows, 256, width, seed=3)
    sink = torch.tensor([0.5, -2.0, 4.0])
    valid = torch.rand(rows, 384, generator=torch.Generator().manual_seed(4)) < 0.3
    valid[:, 0] = True
    valid[1, 128:] = False
    keys = torch.where(valid[:, :, None], torch.cat((window, entries), dim=1), 0.0)
    mask = torch.where(valid, 0.0, float("-inf"))[:, None]

    scores = torch.einsum("nhd,nkd->nhk", query.double(), keys.double()) * 0.25
    scores = scores.masked_fill(~valid[:, None], float("-inf"))
    with_sink = torch.cat((scores, sink.double().view(1, heads, 1).expand(rows, heads, 1)), dim=2)
    expected = torch.einsum("nhk,nkd->nhd", with_sink.softmax(dim=2)[:, :, :-1], keys.double())

    sources, masks = list(keys.split((128, 256), dim=1)), list(mask.split((128, 256), dim=2))
    actual = attend(query, sources, masks, sink, 0.25, round_weights=round_weights)
    assert (actual - expected).abs().max() < (4e-3 if round_weights else 1e-5)
    assert torch.equal(
        actual[1],
        attend(query[1:2], [sources[0][1:2]], [masks[0][1:2]], sink, 0.25, round_weights=round_weights)[0],
    )


def test_select_highest_takes_the_lowest_column_among_equals() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (50, 200), generator=generator).float()
    valid = torch.arange(200) < torch.randint(0, 201, (50, 1), generator=generator)
    selected, present = select_highest(scores.masked_fill(~valid, 9.0), valid, 20)
    assert selected.shape == (50, 32)
    for row in range(50):
        candidates = sorted((-float(scores[row, j]), j) for j in range(200) if valid[row, j])
        assert selected[row][present[row]].tolist() == sorted(j for _, j in candidates[:20])


def test_output_projection_scales_each_group(random_w8a8: DeepseekV4Model) -> None:
    """`wo_b` takes one activation scale per row and group, and sums the groups in FP32 in order."""
    attention = random_w8a8.blocks[1]._attention
    config = random_w8a8.config
    output = ops.round_bf16(random(5, config.num_attention_heads, config.head_dim))
    output[:, : config.num_attention_heads // config.o_groups] *= 100  # groups of very different size
    grouped = output.view(5, config.o_groups, -1).transpose(0, 1)
    down = ops.batched_linear(grouped, attention._output_down)
    total = np.zeros((5, config.hidden_size), dtype=np.float32)
    for group in range(config.o_groups):
        values, scale = q8(down[group].numpy())
        weight = attention._output_up[group].weight.long().numpy()
        total = total + (values @ weight.T).astype(np.float32) * scale
    expected = torch.from_numpy(total * attention._output_scale.numpy()).bfloat16().float()
    assert torch.equal(attention._project_output(output), expected)
    exact = torch.einsum("gnk,grk->gnr", grouped.double(), attention._output_down.double())
    assert (down - exact).abs().max() < 1e-3


def test_gate_quantises_before_the_rms_factor(random_w8a8: DeepseekV4Model) -> None:
    """Router, shared and routed experts from the un-normed BF16 input, each step in its stated order."""
    layer = random_w8a8.blocks[4].experts
    config = random_w8a8.config
    u = ops.round_bf16(random(7, config.hidden_size, scale=3.0))
    routed = layer.routed_experts
    assert isinstance(routed, LocalInt8Experts)

    product = (u * layer._norm).numpy()
    factor = ops.inverse_rms(u, config.rms_norm_eps).numpy()
    values, scale = q8(product)
    row_scale = scale * factor
    logits = product.astype(np.float64) @ layer._router._weight.double().numpy().T * factor
    scores = np.sqrt(np.log1p(np.exp(logits)))
    order = np.argsort(-(scores + layer._router._bias.numpy()), axis=1, kind="stable")
    chosen = order[:, : config.num_experts_per_tok]
    weights = np.take_along_axis(scores, chosen, axis=1)
    weights = weights / weights.sum(axis=1, keepdims=True) * config.routed_scaling_factor

    expert_ids, route_weights = layer._router(
        torch.from_numpy(product), torch.from_numpy(factor), torch.zeros(7).long()
    )
    assert np.array_equal(expert_ids.numpy(), chosen)
    assert np.abs(route_weights.numpy() - weights).max() < 1e-5

    def expert(
        row: int, w_in: torch.Tensor, s_in: torch.Tensor, w_out: torch.Tensor, s_out: torch.Tensor, route: float
    ):
        hidden = (w_in.long().numpy() @ values[row]).astype(np.float32) * row_scale[row] * s_in.numpy()
        hidden_values, hidden_scale = q8(ops.swiglu(torch.from_numpy(hidden), config.swiglu_limit).numpy())
        out = (w_out.long().numpy() @ hidden_values).astype(np.float32) * (hidden_scale * np.float32(route))
        return torch.from_numpy(out * s_out.numpy()).bfloat16().float()

    actual_routes = routed(torch.from_numpy(values).float(), torch.from_numpy(row_scale), expert_ids, route_weights)
    for row in range(7):
        shared_in, shared_out = layer._shared_in, layer._shared_out
        total = expert(row, shared_in.weight, shared_in.scale, shared_out.weight, shared_out.scale, 1.0)
        for k in range(config.num_experts_per_tok):
            e = int(expert_ids[row, k])
            route = expert(
                row,
                routed._values_in[e],
                routed._scale_in[e],
                routed._values_out[e],
                routed._scale_out[e],
                float(route_weights[row, k]),
            )
            assert torch.equal(actual_routes[row, k], route)
            total = total + route
        assert torch.equal(layer(u, torch.zeros(7).long())[row], total.bfloat16().float())


def test_routed_experts_give_the_same_bits_in_any_way(random_w8a8: DeepseekV4Model) -> None:
    """Few routes run in the compiled loop, many through library calls."""
    routed = random_w8a8.blocks[0].experts.routed_experts
    config = random_w8a8.config
    generator = torch.Generator().manual_seed(0)
    x, row_scale = integers(100, config.hidden_size).float(), random(100, 1, seed=1).abs() / 100
    expert_ids = torch.randint(0, config.n_routed_experts, (100, 2), generator=generator)
    route_weights = random(100, 2, seed=2).abs()
    together = routed(x, row_scale, expert_ids, route_weights)
    parts = [
        routed(*part) for part in zip(*(t.split(3) for t in (x, row_scale, expert_ids, route_weights)), strict=True)
    ]
    assert torch.equal(together, torch.cat(parts))


def test_indexer_keys_and_scores(random_w8a8: DeepseekV4Model) -> None:
    """Keys are rotated, rounded to BF16 and quantised; scores follow from the integers."""
    model, config = random_w8a8, random_w8a8.config
    indexer = model.blocks[1]._attention._indexer
    assert indexer is not None
    caches = Caches(config, "w8a8", fill_nan=False)
    ids = torch.randint(0, config.vocab_size, (128,), generator=torch.Generator().manual_seed(1))
    batch = caches.batch((0, 0, ids))
    model.forward(batch, caches.pools)
    slots = model._addresses.build(batch, caches.pools).compression[4]
    keys, scales = caches.pools.pages["idx"][1]
    state = caches.pools.pages["csa_inner_state"][1][0]

    entries = indexer.compressor.close_windows(slots, state)
    matrix = ops.hadamard_matrix(config.index_head_dim, device=torch.device("cpu")).double()
    rotated = (ops.round_bf16(entries).double() @ matrix).float().bfloat16().float()
    values, expected_scales = q8(rotated.numpy())
    write = slots.entry_write["idx"]
    assert (keys[write].numpy() == values).mean() > 0.999
    assert np.abs(keys[write].numpy() - values).max() <= 1
    assert np.allclose(scales[write].numpy(), expected_scales, rtol=1e-2)

    queries, query_scales = indexer._queries(
        ops.quantize_rows(random(128, config.q_lora_rank)), model._addresses.build(batch, caches.pools).rotations[4]
    )
    assert query_scales is not None
    head_weights = random(128, config.index_n_heads, seed=3)
    index_keys = slots.entries["idx"]
    actual = indexer._scores(queries, query_scales, head_weights, index_keys, caches.pools.pages["idx"][1])
    products = torch.einsum("nhd,nkd->nhk", queries.double(), keys[index_keys.slots].double())
    assert torch.equal(products, products.round())
    weighted = (products * query_scales.double() * scales[index_keys.slots].double().transpose(1, 2)).relu()
    expected = (weighted * head_weights.double()[:, :, None]).sum(dim=1)
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("layer", [1, 2], ids=["ratio 4", "ratio 128"])
def test_compressor_pools_windows(random_w8a8: DeepseekV4Model, layer: int) -> None:
    """Entries from states that were written in uneven calls, against FP64 over whole sequences."""
    model, config = random_w8a8, random_w8a8.config
    compressor = model.blocks[layer]._attention._compressor
    assert compressor is not None
    ratio, width = config.layer_ratio(layer), config.head_dim
    caches = Caches(config, "w8a8")
    state = caches.pools.pages["csa_state" if ratio == 4 else "hca_state"][layer][0]
    projected = random(260, compressor.state_width, seed=1)
    bias = compressor._state_bias.double()
    rows = projected.double() + bias[torch.arange(260) % ratio]
    values, gates = rows.chunk(2, dim=1)

    start = 0
    for size in (3, 1, 120, 4, 1, 128, 3):
        batch = caches.batch((0, start, torch.zeros(size, dtype=torch.int64)))
        addresses = model._addresses.build(batch, caches.pools)
        slots = addresses.compression[ratio]
        compressor.write_state(projected[start : start + size], slots, state)
        closing = [t for t in range(start, start + size) if (t + 1) % ratio == 0]
        assert slots.num_closing == len(closing)
        for actual, t in zip(compressor.close_windows(slots, state) if closing else [], closing, strict=True):
            own = slice(t + 1 - ratio, t + 1)
            window_values, window_gates = values[own, -width:], gates[own, -width:]
            if ratio == 4 and t > 4:
                previous = slice(t + 1 - 2 * ratio, t + 1 - ratio)
                window_values = torch.cat((values[previous, :width], window_values))
                window_gates = torch.cat((gates[previous, :width], window_gates))
            entry = (window_gates.softmax(dim=0) * window_values).sum(dim=0)
            entry = entry / (entry.square().mean() + config.rms_norm_eps).sqrt() * compressor._norm.double()
            rotation = model._addresses._compress.at(torch.tensor([t + 1 - ratio]))
            assert (actual - rotation.apply(entry[None])[0]).abs().max() < 1e-5
        start += size
