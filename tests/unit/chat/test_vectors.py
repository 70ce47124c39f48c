"""Every case of the recorded vectors, and proof that the replay can fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tools.replay_vectors import (
    Report,
    check_encode,
    check_parse,
    check_refusal,
    check_stream,
    replay_file,
)
from tests.unit.chat.conftest import DATA

ENCODE = json.loads((DATA / "encode.json").read_text(encoding="utf-8"))
PARSE = json.loads((DATA / "parse.json").read_text(encoding="utf-8"))

# Cases on which implementations disagree and where this project has a rule of its own.
OTHER_RULE = {
    "dev_trailing_assistant_closed": "refused unless prefix or continue_final_message asks to continue",
    "dev_task_action_chat": "the task field of the checkpoint's encoder is not part of the API",
    "dev_task_query_thinking": "the task field of the checkpoint's encoder is not part of the API",
}


def by_name(cases: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in cases]


@pytest.mark.parametrize("case", by_name(ENCODE["cases"]))
def test_encode(case, tokenizer):
    problem = check_encode(case, tokenizer)
    if case["name"] in OTHER_RULE:
        assert not case["must_pass"]
        assert problem is not None
        assert problem.startswith("refused: [INVALID_ARGUMENT]")
    else:
        assert problem is None


@pytest.mark.parametrize("case", by_name(ENCODE["error_cases"]))
def test_refusal(case, tokenizer):
    assert check_refusal(case, tokenizer) is None


@pytest.mark.parametrize("case", by_name(PARSE["cases"]))
def test_parse(case, tokenizer):
    assert check_parse(case, tokenizer) is None


@pytest.mark.parametrize("case", by_name(PARSE["stream_cases"]))
def test_stream(case):
    assert check_stream(case) is None


def test_replay_notices_wrong_expectations(tokenizer, tmp_path):
    encode_case = {**ENCODE["cases"][1], "expected_prompt": "something else"}
    wrong_ids = {**ENCODE["cases"][1], "expected_token_ids": [1, 2, 3]}
    accepted = {**ENCODE["error_cases"][0], "request": {"messages": [{"role": "user", "content": "fine"}]}}
    vectors = {"meta": {"format": "encode-vectors/1"}, "cases": [encode_case, wrong_ids], "error_cases": [accepted]}
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(vectors), encoding="utf-8")
    report: Report = replay_file(path, tokenizer)
    assert report.passed == 0
    assert len(report.failures) == 3

    parse_case = next(case for case in PARSE["cases"] if case["name"] == "dev_call_only")
    wrong = json.loads(json.dumps(parse_case))
    wrong["expected"]["tool_calls"][0]["arguments_json"] = {"query": "another"}
    assert check_parse(wrong, tokenizer) is not None
    assert check_parse({**parse_case, "engine_finish": "length"}, tokenizer) is not None
