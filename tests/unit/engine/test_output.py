"""What clients see: text, stop strings inside speculative steps, chat deltas, logprobs, constrained outputs."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from dsv4.chat import MessageBuilder, OutputFormat
from dsv4.engine.output_queue import MAX_UNREAD_OUTPUTS, OutputQueue, merge_outputs
from dsv4.engine.protocol import FinishReason, RequestOutput
from dsv4.errors import RequestError

from tests.unit.chat.small_vocabulary import small_tokenizer
from tests.unit.engine.toy_engine import ToyEngine
from tests.unit.engine.toy_model import ToyModel

TOKENIZER = small_tokenizer()
VOCABULARY = TOKENIZER.vocab_size
EOS = TOKENIZER.eos_token_id
PROMPT = [5, 6, 7]


class ScriptedModel(ToyModel):
    """Says one fixed answer to PROMPT, then EOS; drafts are right at 7 of 10 positions."""

    def __init__(self, script: list[int]) -> None:
        super().__init__()
        self._script = [*script, EOS]

    def logits(self, bundle: torch.Tensor) -> torch.Tensor:
        return self._scores(bundle[:, 0, 1].long() + 1 - len(PROMPT))

    def mtp_logits(self, bundle: torch.Tensor) -> torch.Tensor:
        positions = bundle[:, 0, 1].long()
        return self._scores(positions + 2 - len(PROMPT), wrong=positions % 10 >= 7)

    def _scores(self, indices: torch.Tensor, wrong: torch.Tensor | None = None) -> torch.Tensor:
        tokens = torch.tensor([self._script[min(max(int(index), 0), len(self._script) - 1)] for index in indices])
        if wrong is not None:
            tokens = torch.where(wrong, 0, tokens)
        return torch.nn.functional.one_hot(tokens, VOCABULARY).float() * 10.0


class NoisyModel(ToyModel):
    """Random scores that depend on the sequence alone."""

    def logits(self, bundle: torch.Tensor) -> torch.Tensor:
        rows = [torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(int(s))) for s in bundle[:, 0, 0]]
        return torch.stack(rows)

    def mtp_logits(self, bundle: torch.Tensor) -> torch.Tensor:
        return self.logits(bundle)


def answer(text: str, drafts: int, **parameters: Any) -> ToyEngine:
    model = ScriptedModel(TOKENIZER.encode_text(text))
    engine = ToyEngine(model=model, vocabulary=VOCABULARY, tokenizer=TOKENIZER, drafts=drafts, eos=EOS)
    engine.add("a", PROMPT, **{"max_tokens": 200, **parameters})
    engine.run()
    return engine


@pytest.mark.parametrize("drafts", [0, 1, 3, 9])
@pytest.mark.parametrize("stop", ["in", "s sunny", "er in", "e", "天", "y and 天"])
def test_stop_strings_inside_speculative_steps(stop: str, drafts: int) -> None:
    text = "the weather in Paris is sunny and 天气 很好"
    engine = answer(text, drafts, stop=[stop, "never"])
    assert engine.text("a") == text[: text.index(stop)]
    assert engine.end("a").finish_reason is FinishReason.STOP
    assert engine.end("a").stop_reason == stop
    kept = answer(text, drafts, stop=[stop], include_stop_str_in_output=True)
    assert kept.text("a") == text[: text.index(stop)] + stop
    # The tokens go up to the one that completes the stop string.
    assert stop in TOKENIZER.decode(engine.tokens("a"))
    assert stop not in TOKENIZER.decode(engine.tokens("a")[:-1])


@pytest.mark.parametrize("drafts", [0, 3])
def test_text_is_the_same_in_pieces_and_as_a_whole(drafts: int) -> None:
    text = "天气 很好, the weather is a < b </ c\n\n 天"
    engine = answer(text, drafts)
    assert engine.text("a") == text
    assert engine.tokens("a") == [*TOKENIZER.encode_text(text), EOS]
    usage = engine.end("a").usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, len(engine.tokens("a")))


def test_a_stop_token_is_no_text() -> None:
    token = TOKENIZER.encode_text("the weather in Rome")[-1]
    engine = answer("the weather in Rome is", 3, stop_token_ids=[token])
    assert engine.tokens("a")[-1] == token
    assert engine.text("a") == TOKENIZER.decode(engine.tokens("a")[:-1])
    assert engine.end("a").stop_reason == token


@pytest.mark.parametrize("drafts", [0, 1, 4])
def test_reasoning_and_a_tool_call_as_deltas(drafts: int) -> None:
    text = (
        "the weather</think>in Paris\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    form = OutputFormat(start_state="reasoning", tools=("weather",), tool_choice="auto")
    engine = answer(text, drafts, output_format=form.to_dict())
    builder = MessageBuilder()
    outputs = engine.outputs["a"]
    builder.add([output.chat_delta for output in outputs if output.chat_delta is not None])
    message = builder.message()
    assert message["reasoning_content"] == "the weather"
    assert message["content"] == "in Paris" == engine.text("a")
    function = message["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("weather", {"city": "Paris"})
    assert engine.end("a").finish_reason is FinishReason.TOOL_CALLS
    usage = engine.end("a").usage
    assert usage is not None
    assert usage.reasoning_tokens == len(TOKENIZER.encode_text("the weather"))


def test_an_unreadable_tool_call_is_an_error() -> None:
    form = OutputFormat(tools=("weather",), tool_choice="auto")
    engine = answer('\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n', 0, output_format=form.to_dict())
    assert str(engine.end("a").error).startswith("[INTERNAL] invalid model output")


@pytest.mark.parametrize("drafts", [0, 3])
def test_log_probabilities(drafts: int) -> None:
    engine = answer("the weather", drafts, logprobs=2)
    entries = [entry for output in engine.outputs["a"] for entry in output.logprobs or []]
    assert [entry.token_id for entry in entries] == engine.tokens("a")
    expected = 10.0 - math.log(math.exp(10.0) + VOCABULARY - 1)
    assert all(entry.logprob == pytest.approx(expected) for entry in entries)
    assert all(entry.top[0][0] == entry.token_id and len(entry.top) == 2 for entry in entries)
    assert engine.end("a").cumulative_logprob == pytest.approx(expected * len(entries))


@pytest.mark.parametrize("drafts", [0, 3])
def test_minimum_length_bias_and_penalties(drafts: int) -> None:
    assert len(answer("the", drafts, min_tokens=12, max_tokens=30).tokens("a")) > 12
    banned = TOKENIZER.encode_text("the weather")[0]
    assert banned not in answer("the weather", drafts, logit_bias={str(banned): -100.0}).tokens("a")
    repeated = answer("the the the the the the the the", drafts, frequency_penalty=2.0, presence_penalty=2.0).tokens(
        "a"
    )
    plain = answer("the the the the the the the the", drafts).tokens("a")
    assert plain.count(TOKENIZER.encode_text(" the")[0]) == 7 > repeated.count(TOKENIZER.encode_text(" the")[0])


CONSTRAINTS: list[tuple[dict[str, Any], Any]] = [
    ({"choice": ["yes", 'no "x"', "天气"]}, lambda text: text in ("yes", 'no "x"', "天气")),
    ({"regex": "[a-c]{3}-[0-9]{2,4}"}, lambda text: text[:3].isalpha() and text[4:].isdigit()),
    (
        {"json": {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}},
        lambda text: json.loads(text)["n"] in (1, 22),
    ),
    ({"grammar": 'root ::= "(" root ")" | "x"'}, lambda text: text.strip("()") == "x"),
]


@pytest.mark.parametrize(("constraint", "valid"), CONSTRAINTS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_outputs_match_with_and_without_drafts(
    constraint: dict[str, Any], valid: Any, temperature: float
) -> None:
    texts = []
    for drafts in (0, 3):
        engine = ToyEngine(
            model=NoisyModel(), vocabulary=VOCABULARY, tokenizer=TOKENIZER, drafts=drafts, eos=EOS, max_model_len=300
        )
        engine.add("a", PROMPT, structured_outputs=constraint, temperature=temperature, seed=3, ignore_eos=True)
        engine.run()
        texts.append(engine.text("a"))
        if engine.end("a").finish_reason is FinishReason.STOP:
            assert valid(engine.text("a"))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        ({"regex": "("}, "structured_outputs.regex"),
        ({"grammar": "root ::= missing"}, "structured_outputs.grammar"),
        ({"json": {"type": "nonsense"}}, "structured_outputs.json"),
        ({"unknown": 1}, "structured_outputs"),
        ({"choice": []}, "structured_outputs.choice"),
    ],
)
def test_bad_constraints_are_refused(constraint: dict[str, Any], field: str) -> None:
    engine = ToyEngine(vocabulary=VOCABULARY, tokenizer=TOKENIZER, eos=EOS)
    with pytest.raises(RequestError, match=field.replace(".", r"\.")):
        engine.add("a", PROMPT, structured_outputs=constraint)
    assert not engine.core.has_work


async def test_a_slow_reader_gets_everything_in_few_outputs() -> None:
    queue = OutputQueue()
    for number in range(5000):
        queue.put(
            RequestOutput(
                request_id="a",
                token_ids=[number],
                text=f"{number} ",
                num_prompt_tokens=3,
                chat_delta={"content": f"{number} "},
                finish_reason=FinishReason.STOP if number == 4999 else None,
            )
        )
    outputs = [await queue.get()]
    while not outputs[-1].finished:
        outputs.append(await queue.get())
    assert len(outputs) <= MAX_UNREAD_OUTPUTS
    assert [token for output in outputs for token in output.token_ids] == list(range(5000))
    assert "".join(output.text for output in outputs) == "".join(f"{number} " for number in range(5000))
    assert merge_outputs(outputs).chat_delta == {"content": "".join(f"{number} " for number in range(5000))}
