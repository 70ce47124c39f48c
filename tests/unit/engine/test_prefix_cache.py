"""Prefix hits: how long they are, that they change no token, and that shared pages are never written."""

from __future__ import annotations

import pytest

from tests.unit.engine.toy_engine import ToyEngine
from tests.unit.engine.toy_model import continuation

SHARED = [(index * 7 + index // 9) % 23 for index in range(640)]


def engine(drafts: int = 0, **options: object) -> ToyEngine:
    return ToyEngine(
        drafts=drafts,
        prefix_caching=True,
        max_model_len=1024,
        **{"slots": 6, **options},  # type: ignore[arg-type]
    )


def cached_tokens(toy: ToyEngine, name: str) -> int:
    usage = toy.end(name).usage
    assert usage is not None
    return usage.cached_tokens


@pytest.mark.parametrize("budget", [64, 128, 200, 512])
@pytest.mark.parametrize(("drafts", "hit"), [(0, 640), (1, 512), (3, 512), (9, 512)])
def test_hit_length(drafts: int, hit: int, budget: int) -> None:
    """With speculation the last page also depends on the first token after it, in which the prompts differ here."""
    toy = engine(drafts, max_num_batched_tokens=budget, max_prefill_extent=budget)
    prompts = {"first": [*SHARED, 1, 2, 3], "second": [*SHARED, 4, 5, 6, 7]}
    for name, prompt in prompts.items():
        toy.add(name, prompt, max_tokens=20)
        toy.run()
        assert toy.tokens(name) == continuation(prompt, 20)
    assert cached_tokens(toy, "first") == 0
    assert cached_tokens(toy, "second") == hit


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_same_prompt_again_computes_at_least_one_token(drafts: int) -> None:
    toy = engine(drafts)
    for name in ("first", "second"):
        toy.add(name, SHARED[:256], max_tokens=10)
        toy.run()
        assert toy.tokens(name) == continuation(SHARED[:256], 10)
    assert cached_tokens(toy, "second") == 128


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_next_turn_of_a_conversation_finds_the_answer_too(drafts: int) -> None:
    toy = engine(drafts)
    first = SHARED[:300]
    toy.add("first", first, max_tokens=200)
    toy.run()
    second = [*first, *toy.tokens("first"), 1, 2, 3]
    toy.add("second", second, max_tokens=10)
    toy.run()
    assert cached_tokens(toy, "second") == 384
    assert toy.tokens("second") == continuation(second, 10)


@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_requests_share_pages_while_they_run(drafts: int) -> None:
    toy = engine(drafts, max_num_seqs=6)
    prompts = {str(index): [*SHARED[:400], index, index] for index in range(6)}
    toy.add("0", prompts["0"], max_tokens=300)
    while not toy.tokens("0"):
        toy.step()
    for name in "12345":
        toy.add(name, prompts[name], max_tokens=300)
    toy.step()
    assert toy.allocator.use()["cmp_c4"].used < 6 * 4
    toy.run()
    for name, prompt in prompts.items():
        assert toy.tokens(name) == continuation(prompt, 300)
    assert all(cached_tokens(toy, name) == 384 for name in "12345")


def test_hits_do_not_crowd_one_partition() -> None:
    toy = engine(partitions=2, max_num_seqs=8, slots=4)
    toy.add("first", [*SHARED, 1], max_tokens=2)
    toy.run()
    for index in range(8):
        toy.add(str(index), [*SHARED, index], max_tokens=40)
    while toy.core.has_work:
        toy.step()
        assert max(toy.allocator.requests_per_partition) <= 4
    for index in range(8):
        assert toy.tokens(str(index)) == continuation([*SHARED, index], 40)


def test_pages_are_forgotten_when_their_blocks_are_needed() -> None:
    toy = engine(slots=1, max_num_seqs=2)
    toy.add("first", [*SHARED, 1], max_tokens=5)
    toy.run()
    other = [(token * 3 + 1) % 23 for token in SHARED]
    toy.add("other", [*other, 1], max_tokens=300)
    toy.run()
    toy.add("again", [*SHARED, 2], max_tokens=5)
    toy.run()
    assert toy.tokens("other") == continuation([*other, 1], 300)
    assert toy.tokens("again") == continuation([*SHARED, 2], 5)
    assert cached_tokens(toy, "again") < 640


def test_a_preempted_request_finds_its_own_pages() -> None:
    toy = engine(2, slots=2, max_num_seqs=4, max_num_batched_tokens=512)
    prompts = {str(index): [(token + index) % 23 for token in SHARED[:140]] for index in range(4)}
    for name, prompt in prompts.items():
        toy.add(name, prompt, max_tokens=300)
    resumed = []
    while toy.core.has_work:
        toy.step()
        running = [request for request in toy.scheduler.requests.values() if request.table is not None]
        resumed += [request.table.num_cached_tokens for request in running if request.num_preemptions and request.table]
    assert max(resumed) >= 128
    for name, prompt in prompts.items():
        assert toy.tokens(name) == continuation(prompt, 300)
