"""The step loop against the one-at-a-time oracle of the network double."""

from __future__ import annotations

import pytest
from dsv4.engine.protocol import FinishReason
from dsv4.errors import RequestError

from tests.unit.engine.toy_engine import ToyEngine
from tests.unit.engine.toy_model import continuation

PROMPTS = {"a": [1, 2, 3], "b": list(range(20)) * 7, "c": [5] * 129, "d": [7] * 260, "e": [9]}


@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 5, 9, 40])
@pytest.mark.parametrize("budget", [16, 64, 512])
def test_tokens_do_not_depend_on_speculation_or_chunks(drafts: int, budget: int) -> None:
    engine = ToyEngine(drafts=drafts, max_num_batched_tokens=budget, slots=8, partitions=2)
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, max_tokens=30)
    engine.run()
    for name, prompt in PROMPTS.items():
        assert engine.tokens(name) == continuation(prompt, 30)
        assert engine.end(name).finish_reason is FinishReason.LENGTH


def test_drafts_are_accepted_and_counted() -> None:
    engine = ToyEngine(drafts=3, agreement=1.0)
    engine.add("a", [1], max_tokens=41)
    engine.run()
    usage = engine.end("a").usage
    assert usage is not None
    assert (usage.draft_tokens, usage.accepted_draft_tokens) == (30, 30)
    assert len(engine.outputs["a"]) == 11


@pytest.mark.parametrize("drafts", [0, 1, 3, 9])
def test_requests_may_run_to_the_context_limit(drafts: int) -> None:
    """The reservation for drafts must not exceed the context, nor throw out a neighbour."""
    engine = ToyEngine(drafts=drafts, max_model_len=256, slots=4, max_num_seqs=4)
    for name in "abcd":
        engine.add(name, [ord(name) % 7] * 200)
    engine.run()
    for name in "abcd":
        assert engine.tokens(name) == continuation([ord(name) % 7] * 200, 56)
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_preempted_requests_lose_and_repeat_nothing(drafts: int) -> None:
    engine = ToyEngine(drafts=drafts, slots=1, max_num_seqs=8)
    prompts = {str(index): [index] * (20 + 11 * index) for index in range(8)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=120)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert engine.tokens(name) == continuation(prompt, 120)
    assert all(use.used == 0 for use in engine.allocator.use().values())


def test_a_new_request_does_not_wait_for_running_ones() -> None:
    engine = ToyEngine(slots=8)
    engine.add("long", [1], max_tokens=250)
    for _ in range(20):
        engine.step()
    engine.add("new", [2] * 40, max_tokens=5)
    engine.step()
    assert len(engine.tokens("new")) == 1


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = ToyEngine(max_model_len=1500, slots=4, max_num_batched_tokens=256)
    engine.add("long", [1] * 1400, max_tokens=2)
    engine.step()
    engine.add("short", [2] * 60, max_tokens=2)
    engine.step()
    assert engine.tokens("short")
    assert not engine.tokens("long")
    engine.run()
    assert engine.tokens("long") == continuation([1] * 1400, 2)


def test_priority_and_arrival_decide_who_runs_first() -> None:
    engine = ToyEngine(max_num_seqs=1)
    for name, priority in (("late", 5), ("second", 1), ("third", 1), ("first", 0)):
        engine.add(name, [1], max_tokens=1, priority=priority)
    order = []
    while engine.core.has_work:
        order += [output.request_id for output in engine.step()]
    assert order == ["first", "second", "third", "late"]


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_abort_in_every_phase_frees_everything(phase: str) -> None:
    engine = ToyEngine(drafts=2, max_num_seqs=1 if phase == "waiting" else 8, max_num_batched_tokens=64, slots=4)
    engine.add("other", [1, 2], max_tokens=30)
    engine.add("target", [3] * 150, max_tokens=30)
    while phase == "decode" and not engine.tokens("target"):
        engine.step()
    if phase == "prefill":
        engine.step()
        engine.step()
    engine.core.abort("target")
    engine.core.abort("target")
    engine.core.abort("unknown")
    engine.run()
    assert len(engine.tokens("target")) <= 6
    assert engine.tokens("other") == continuation([1, 2], 30)
    assert all(use.used == 0 for use in engine.allocator.use().values())


def test_deadlines_in_the_queue_and_while_running() -> None:
    engine = ToyEngine(max_num_seqs=1)
    engine.add("running", [1], max_tokens=250, timeout=5.0)
    engine.add("queued", [2], max_tokens=5, timeout=2.0)
    engine.add("patient", [3], max_tokens=5)
    engine.step()
    engine.now = 3.0
    engine.step()
    assert str(engine.end("queued").error).startswith("[DEADLINE]")
    engine.now = 5.0
    engine.run()
    assert str(engine.end("running").error).startswith("[DEADLINE]")
    assert engine.tokens("patient") == continuation([3], 5)


def test_the_queue_is_bounded() -> None:
    engine = ToyEngine(max_queued_requests=2)
    engine.add("a", [1], max_tokens=1)
    engine.add("b", [1], max_tokens=1)
    with pytest.raises(RequestError, match=r"\[QUEUE_FULL\]"):
        engine.add("c", [1], max_tokens=1)
    engine.outputs.pop("c")
    engine.run()
    engine.add("c", [1], max_tokens=1)


@pytest.mark.parametrize(
    ("prompt", "parameters", "field"),
    [
        ([], {}, "input_ids"),
        ([23], {}, "input_ids"),
        ([-1], {}, "input_ids"),
        ([1] * 300, {}, "input_ids"),
        ([1], {"stop_token_ids": [23]}, "stop_token_ids"),
        ([1], {"logit_bias": {"23": 1.0}}, "logit_bias"),
        ([1], {"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_refused_requests_leave_nothing_behind(prompt: list[int], parameters: dict[str, object], field: str) -> None:
    engine = ToyEngine()
    with pytest.raises(RequestError, match=field):
        engine.add("bad", prompt, **parameters)
    assert not engine.core.has_work
    engine.add("bad", [1], max_tokens=1)


def test_a_request_that_breaks_a_step_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ToyEngine(drafts=2, slots=4)
    forward = engine.model.forward

    def fragile(batch: object, pools: object) -> object:
        if 123 in batch.positions.tolist():  # type: ignore[attr-defined]
            raise RuntimeError("device error")
        return forward(batch, pools)  # type: ignore[arg-type]

    engine.add("good", [1, 2], max_tokens=12)
    engine.step()
    monkeypatch.setattr(engine.model, "forward", fragile)
    engine.add("bad", [2] * 150, max_tokens=3)
    engine.run()
    assert str(engine.end("bad").error).startswith("[INTERNAL]")
    assert engine.tokens("good") == continuation([1, 2], 12)


def test_logits_that_are_not_finite_end_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ToyEngine(drafts=1)
    monkeypatch.setattr(engine.model, "logits", lambda bundle: bundle[:, 0, :1].float() * float("nan"))
    engine.add("a", [1], max_tokens=3)
    engine.run()
    assert "no finite logits" in str(engine.end("a").error)


@pytest.mark.parametrize("drafts", [0, 1, 3, 9])
def test_eos_and_stop_tokens_end_inside_a_speculative_step(drafts: int) -> None:
    reference = continuation([4, 4], 40)
    eos = reference[17]
    first = reference.index(eos)
    engine = ToyEngine(drafts=drafts, eos=eos, agreement=1.0)
    engine.add("eos", [4, 4], max_tokens=40)
    engine.add("ignored", [4, 4], max_tokens=40, ignore_eos=True)
    engine.add("token", [4, 4], max_tokens=40, ignore_eos=True, stop_token_ids=[eos])
    engine.run()
    assert engine.tokens("eos") == engine.tokens("token") == reference[: first + 1]
    assert engine.end("eos").finish_reason is FinishReason.STOP
    assert engine.end("eos").stop_reason is None
    assert engine.end("token").stop_reason == eos
    assert engine.tokens("ignored") == reference


@pytest.mark.parametrize("drafts", [1, 3])
def test_sampled_tokens_do_not_depend_on_speculation_or_company(drafts: int) -> None:
    def sample(engine: ToyEngine, company: int) -> list[int]:
        for index in range(company):
            engine.add(f"other {index}", [index], max_tokens=20, temperature=1.0)
        engine.add("a", [1, 2], max_tokens=50, temperature=1.5, seed=11, top_p=0.95)
        engine.run()
        return engine.tokens("a")

    alone = sample(ToyEngine(slots=4), 0)
    assert len(set(alone)) > 3
    assert alone != continuation([1, 2], 50)
    assert sample(ToyEngine(drafts=drafts, slots=4), 0) == alone
    assert sample(ToyEngine(drafts=drafts, slots=1, max_num_batched_tokens=16), 6) == alone
