"""A row's result depends on its own sequence only: not on company, chunks, block ids or what pages held before."""

from __future__ import annotations

import pytest
import torch
from dsv4.model import DeepseekV4Model, ForwardBatch

from tests.unit.model.random_model import Caches, run_sequence

LENGTHS = [300, 129, 5, 260]


def sequences(vocab_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def run_mixed(model: DeepseekV4Model, caches: Caches, ids: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Prefill tiles and decode rows of all sequences in one call each, in random sizes and orders."""
    generator = torch.Generator().manual_seed(seed)
    done = [0] * len(ids)
    outputs: list[list[torch.Tensor]] = [[] for _ in ids]
    while any(done[i] < len(ids[i]) for i in range(len(ids))):
        parts = []
        for sequence in torch.randperm(len(ids), generator=generator).tolist():
            most = int(torch.tensor([1, 3, 8, 128])[torch.randint(0, 4, (1,), generator=generator)])
            size = min(int(torch.randint(1, most + 1, (1,), generator=generator)), len(ids[sequence]) - done[sequence])
            if size:
                parts.append((sequence, done[sequence], ids[sequence][done[sequence] : done[sequence] + size]))
                done[sequence] += size
        bundles = model.forward(caches.batch(*parts), caches.pools).split([len(part) for _, _, part in parts])
        for (sequence, _, _), bundle in zip(parts, bundles, strict=True):
            outputs[sequence].append(bundle)
    return [torch.cat(output) for output in outputs]


def test_mixed_batches_equal_sequences_alone(random_model: DeepseekV4Model) -> None:
    model = random_model
    ids = sequences(model.config.vocab_size)
    alone = [run_sequence(model, Caches(model.config, model.numerics), tokens, [128, 128, 44])[0] for tokens in ids]
    mixed = run_mixed(model, Caches(model.config, model.numerics, num_sequences=len(ids)), ids, seed=1)
    for one, other in zip(alone, mixed, strict=True):
        if model.numerics == "w8a8":
            assert torch.equal(one, other)
        else:
            assert (one - other).abs().max() < 1e-4


def test_reused_pages_do_not_matter(random_model: DeepseekV4Model) -> None:
    model = random_model
    first, second, *_ = sequences(model.config.vocab_size)
    caches = Caches(model.config, model.numerics)
    run_sequence(model, caches, first, [128, 128, 44])
    caches.shuffle(seed=9)
    again, again_predicted = run_sequence(model, caches, second, [100, 1, 28])
    fresh, fresh_predicted = run_sequence(model, Caches(model.config, model.numerics), second, [100, 1, 28])
    assert torch.equal(again, fresh)
    assert torch.equal(again_predicted, fresh_predicted)


def test_rejected_rows_are_overwritten(random_w8a8: DeepseekV4Model) -> None:
    """Rows of a wrong draft, entries they closed included, leave no trace once their positions run again."""
    model = random_w8a8
    ids = sequences(model.config.vocab_size)[3][:140]
    wrong = (ids + 1) % model.config.vocab_size
    caches = Caches(model.config, "w8a8")
    outputs = [model.forward(caches.batch((0, 0, ids[:120])), caches.pools)]
    for start in range(120, 140, 4):
        model.forward(caches.batch((0, start, wrong[start : start + 8])), caches.pools)
        outputs.append(model.forward(caches.batch((0, start, ids[start : start + 4])), caches.pools))
    expected, _ = run_sequence(model, Caches(model.config, "w8a8"), ids, [128, 12])
    assert torch.equal(torch.cat(outputs), expected)


def test_logits_do_not_depend_on_the_number_of_rows(random_w8a8: DeepseekV4Model) -> None:
    generator = torch.Generator().manual_seed(0)
    config = random_w8a8.config
    bundle = torch.randn(40, config.hc_mult, config.hidden_size, generator=generator)
    together = random_w8a8.logits(bundle)
    assert torch.equal(together, torch.cat([random_w8a8.logits(row) for row in bundle.split(1)]))
    assert torch.equal(together, torch.cat([random_w8a8.logits(rows) for rows in bundle.split(7)]))


def test_a_row_without_a_block_is_refused(random_w8a8: DeepseekV4Model) -> None:
    caches = Caches(random_w8a8.config, "w8a8")
    caches.tables["csa_state"][:, 1] = -1
    with pytest.raises(ValueError, match="no block in group csa_state"):
        random_w8a8.forward(caches.batch((0, 0, torch.arange(8))), caches.pools)


def test_rows_see_neither_later_rows_nor_other_sequences(random_w8a8: DeepseekV4Model) -> None:
    model = random_w8a8
    ids = sequences(model.config.vocab_size)[1]
    caches = Caches(model.config, "w8a8", num_sequences=2)
    whole = model.forward(caches.batch((0, 0, ids[:64]), (1, 0, ids[64:128])), caches.pools)
    caches = Caches(model.config, "w8a8", num_sequences=2)
    changed = ids.flip(0)
    other = model.forward(caches.batch((0, 0, torch.cat((ids[:40], changed[:24]))), (1, 0, changed[:64])), caches.pools)
    assert torch.equal(whole[:40], other[:40])
    assert not torch.equal(whole[40:64], other[40:64])


def test_order_of_rows_of_different_sequences_is_free(random_w8a8: DeepseekV4Model) -> None:
    model = random_w8a8
    ids = sequences(model.config.vocab_size)[0]
    caches = Caches(model.config, "w8a8", num_sequences=2)
    batch = caches.batch((0, 0, ids[:20]), (1, 0, ids[20:40]))
    straight = model.forward(batch, caches.pools)
    order = torch.stack((torch.arange(20), torch.arange(20, 40)), dim=1).flatten()
    interleaved = ForwardBatch(
        batch.token_ids[order], batch.positions[order], batch.sequence_index[order], batch.block_tables
    )
    caches = Caches(model.config, "w8a8", num_sequences=2)
    assert torch.equal(model.forward(interleaved, caches.pools), straight[order])
