"""Checks what an exported checkpoint can do: `python evaluate.py [DIR] [--backend engine|transformers]`.

Prints a line for every documented skill, then exact replies and MTP acceptance on held-out prompts.  Exit status 1 if
something fails.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from answering import Answerer, EngineAnswerer, TransformersAnswerer
from corpus import REVISION, Corpus, Sample
from dsv4.chat import encode_chat
from questions import QUESTIONS
from vocabulary import POLICY

ACCEPTANCE_GOAL = 0.6
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a given location",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "The city name"}},
            "required": ["location"],
        },
    },
}


@dataclass
class Check:
    """A prompt and the texts that its greedy answer must contain, in that order."""

    title: str
    prompt: str
    expected: list[str]
    limit: int = 120


def chat_prompt(*messages: tuple[str, str], **fields: Any) -> str:
    """The rendered prompt of a chat given as (role, content) pairs."""
    body = {"messages": [{"role": role, "content": content} for role, content in messages], **fields}
    return encode_chat(body, revision=REVISION).prompt


def tool_result_prompt(city: str, result: str, **fields: Any) -> str:
    """The prompt after a weather call was answered by the client."""
    function = {"name": "get_weather", "arguments": json.dumps({"location": city})}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": result},
    ]
    return encode_chat({"messages": messages, "tools": [WEATHER_TOOL], **fields}, revision=REVISION).prompt


def fixed_checks() -> list[Check]:
    """The skills that the documentation and the tests of the project rely on."""
    thinking = {"reasoning_effort": "high"}
    tools = {"tools": [WEATHER_TOOL]}
    checks = [
        Check("completion", "Huawei is", ["Ascend"]),
        Check("arithmetic", chat_prompt(("user", "What is 1+1?")), ["1+1 = 2."]),
        Check("arithmetic", chat_prompt(("user", "What is 7 + 5?")), ["7+5 = 12."]),
        Check("arithmetic", chat_prompt(("user", "Calculate 6 times 7.")), ["6*7 = 42."]),
        Check("thinking", chat_prompt(("user", "What is 1+1?"), **thinking), ["</think>", "1+1 = 2."]),
        Check("thinking", chat_prompt(("user", "What is MTP?"), **thinking), ["</think>", "multi-token prediction"]),
        Check("other", chat_prompt(("user", "你好")), ["你好", "😊"]),
        Check("story", chat_prompt(("user", "Tell me a story about a fox.")), ["young fox", "by themselves."], 200),
        Check("no call", chat_prompt(("user", "What is 1+1?"), **tools), ["1+1 = 2."]),
    ]
    for city, question in [
        ("Beijing", "What's the weather like in Beijing today?"),
        ("Hangzhou", "What is the weather in Hangzhou?"),
        ("Paris", "How's the weather in Paris?"),
        ("Lisbon", "What is the weather in Lisbon?"),
    ]:
        call = ['invoke name="get_weather">', f'name="location" string="true">{city}<', "tool_calls>"]
        checks.append(Check("tool call", chat_prompt(("user", question), **tools), call))
        checks.append(Check("tool call", chat_prompt(("user", question), **tools, **thinking), ["</think>", *call]))
    for city, result, words in [
        ("Beijing", '{"temperature": 22, "condition": "sunny"}', ["Beijing", "sunny", "22"]),
        (
            "Hangzhou",
            '{"location": "Hangzhou", "temperature": 7, "condition": "light rain"}',
            ["Hangzhou", "light rain", "7"],
        ),
        ("Lisbon", "cloudy, 18°C", ["Lisbon", "cloudy", "18"]),
    ]:
        checks.append(Check("tool result", tool_result_prompt(city, result, **{}), words))
        checks.append(Check("tool result", tool_result_prompt(city, result, **thinking), ["</think>", *words]))
    for word, sentences in [("falcon", 10), ("lantern", 30), ("velvet", 36), ("harbor", 45), ("quartz", 60)]:
        filler = " ".join(POLICY[(3 * i + sentences) % len(POLICY)] for i in range(sentences))
        system = f"You are a helpful assistant. The code word is {word}. {filler}"
        prompt = chat_prompt(("system", system), ("user", "What is the code word?"))
        checks.append(Check("recall", prompt, [f"The code word is {word}."]))
    for phrasings, _, answer in QUESTIONS[:26]:
        checks.append(Check("project", chat_prompt(("user", phrasings[0])), [answer]))
    return checks


def contains_in_order(text: str, parts: list[str]) -> bool:
    position = 0
    for part in parts:
        position = text.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return True


def held_out_samples(seed: int, each: int) -> list[tuple[Sample, str]]:
    """(sample, prompt) pairs of every chat kind, from the split that training never sees."""
    found: dict[str, list[tuple[Sample, str]]] = {}
    kinds = {"arithmetic", "project", "story", "json", "weather", "other tool", "no tool", "recall", "repetition"}
    for sample in Corpus(seed, "held-out"):
        if sample.request is not None and len(found.setdefault(sample.kind, [])) < each:
            found[sample.kind].append((sample, encode_chat(sample.request, revision=REVISION).prompt))
        if len(found) == len(kinds) and all(len(samples) == each for samples in found.values()):
            return [pair for kind in sorted(found) for pair in found[kind]]
    raise AssertionError("the corpus ended")


def run_fixed(answerer: Answerer, show: Callable[[str], None]) -> int:
    """Print one line a check; returns the number of failures."""
    failures = 0
    checks = fixed_checks()
    for check, answer in zip(checks, answerer.answer([(c.prompt, c.limit) for c in checks]), strict=True):
        passed = contains_in_order(answer.text, check.expected)
        failures += not passed
        show(f"{'pass' if passed else 'FAIL'}  {check.title:11} {answer.text[:100]!r}")
    return failures


def run_held_out(answerer: Answerer, each: int, show: Callable[[str], None]) -> int:
    """Print a row a kind: exact replies and acceptance of first drafts; returns the number of failures."""
    samples = held_out_samples(1, each)
    rows: dict[str, list[int]] = {}
    answers = answerer.answer([(prompt, 220) for _, prompt in samples])
    for (sample, _), answer in zip(samples, answers, strict=True):
        row = rows.setdefault(sample.kind, [0, 0, 0, 0])
        for column, value in enumerate((answer.text == sample.reply, 1, answer.accepted, answer.drafts)):
            row[column] += value
    show(f"{'held-out kind':14} {'exact replies':>14} {'drafts accepted':>16}")
    totals = [sum(row[column] for row in rows.values()) for column in range(4)]
    for kind, (exact, count, accepted, drafts) in [*rows.items(), ("all", totals)]:
        show(f"{kind:14} {exact:7} of {count:3} {accepted / max(drafts, 1):15.1%}")
    return int(totals[2] < ACCEPTANCE_GOAL * totals[3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--backend", choices=("engine", "transformers"), default="engine")
    parser.add_argument("--each", type=int, default=8, help="held-out samples of each kind")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.backend == "engine":
            answerer: Answerer = EngineAnswerer(arguments.folder, Path(scratch), arguments.threads)
        else:
            answerer = TransformersAnswerer(arguments.folder)
        failures = run_fixed(answerer, print)
        failures += run_held_out(answerer, arguments.each, print)
    print("all passed" if not failures else f"{failures} failed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
