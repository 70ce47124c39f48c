"""What a step contains, without any network."""

from __future__ import annotations

from dsv4.cache.block_allocator import BlockAllocator
from dsv4.cache.groups import cache_groups
from dsv4.scheduler.request import Request
from dsv4.scheduler.scheduler import Scheduler, SchedulerLimits, StepPlan


def scheduler(*, seqs: int = 4, budget: int = 256, extent: int = 256, slots: int = 4) -> Scheduler:
    allocator = BlockAllocator(
        cache_groups(sliding_window=128, max_model_len=2048), slots_per_partition=slots, num_partitions=1
    )
    return Scheduler(SchedulerLimits(seqs, budget, extent, 2048, 100), allocator)


def request(name: str, length: int, *, drafts: int = 0) -> Request:
    return Request(name, [1] * length, length, 2048, num_speculative_tokens=drafts)


def rows(plan: StepPlan) -> dict[str, tuple[int, int, int]]:
    return {each.request.request_id: (each.start, each.num_tokens, len(each.draft_token_ids)) for each in plan.rows}


def finish_step(books: Scheduler, plan: StepPlan) -> None:
    for each in plan.rows:
        new = [7] if each.samples else []
        books.update(each, new, [8] * each.request.num_speculative_tokens if each.samples else [])


def test_a_prompt_is_computed_in_chunks_and_sampled_once() -> None:
    books = scheduler(budget=128)
    books.add(request("a", 300))
    seen = []
    for _ in range(4):
        plan = books.schedule()
        seen.append((rows(plan)["a"], plan.rows[0].samples))
        finish_step(books, plan)
    assert seen == [((0, 128, 0), False), ((128, 128, 0), False), ((256, 44, 0), True), ((300, 1, 0), True)]


def test_decoding_requests_come_first_and_prompts_fill_the_rest() -> None:
    books = scheduler(budget=140)
    books.add(request("decoding", 10, drafts=3))
    finish_step(books, books.schedule())
    books.add(request("prompt", 500))
    assert rows(books.schedule()) == {"decoding": (10, 1, 3), "prompt": (0, 136, 0)}


def test_drafts_leave_room_for_a_waiting_prompt() -> None:
    books = scheduler(budget=16, seqs=16)
    for index in range(8):
        books.add(request(str(index), 1, drafts=9))
    finish_step(books, books.schedule())
    assert sum(count + drafts for _, count, drafts in rows(books.schedule()).values()) == 16
    books.add(request("prompt", 50))
    plan = rows(books.schedule())
    assert plan["prompt"][1] >= 4
    assert all(plan[str(index)][1] == 1 for index in range(8))


def test_the_extent_limits_one_prompt_and_others_get_the_rest() -> None:
    books = scheduler(budget=512, extent=128)
    for name in "abc":
        books.add(request(name, 1000))
    assert rows(books.schedule()) == {"a": (0, 128, 0), "b": (0, 128, 0), "c": (0, 128, 0)}


def test_at_most_max_num_seqs_run() -> None:
    books = scheduler(seqs=2)
    for name in "abc":
        books.add(request(name, 5))
    assert set(rows(books.schedule())) == {"a", "b"}
    assert (books.num_running, books.num_waiting) == (2, 1)


def test_the_newest_request_is_preempted_and_comes_back_before_later_ones() -> None:
    books = scheduler(slots=1, seqs=4, budget=2048, extent=2048)
    first, second, third = request("first", 120), request("second", 120), request("third", 3)
    books.add(first)
    books.add(second)
    while not books.num_preemptions:
        finish_step(books, books.schedule())
    assert second.num_preemptions == 1
    assert first.num_preemptions == 0
    assert second.table is None
    books.add(third)
    books.finish(first)
    plan = books.schedule()
    assert rows(plan)["second"] == (0, second.num_tokens, 0)
    assert second.num_tokens > 120
    assert plan.rows[0].samples
