"""Rules of rendering that the vectors leave open, and what errors say."""

from __future__ import annotations

import pytest
from dsv4.chat import encode_chat
from dsv4.chat.protocol import (
    EFFORT_TEXTS,
    RESPONSE_JSON_OBJECT,
    RESPONSE_SCHEMA_HEAD,
    TOOLS_BLOCK_HEAD,
    TOOLS_BLOCK_TAIL,
    Revision,
)
from dsv4.errors import ConfigurationError, ErrorCode, RequestError

USER = {"role": "user", "content": "q"}
BOS = "<｜begin▁of▁sentence｜>"


def prompt(revision: str = "official", **request) -> str:
    request.setdefault("messages", [USER])
    return encode_chat(request, revision=revision).prompt


def refusal(revision: str = "official", **request) -> RequestError:
    request.setdefault("messages", [USER])
    with pytest.raises(RequestError) as caught:
        encode_chat(request, revision=revision)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert caught.value.field
    assert caught.value.message.startswith(caught.value.field)
    return caught.value


def test_literals_are_the_recorded_ones(literals):
    assert literals["tools_block"] == TOOLS_BLOCK_HEAD + "{tool_schemas}" + TOOLS_BLOCK_TAIL
    assert literals["response_format_block"] == RESPONSE_SCHEMA_HEAD + "{schema}"
    assert literals["response_format_json_object_block_recipe"] == RESPONSE_JSON_OBJECT
    assert literals["effort_prefix"]["0731"]["high"] == EFFORT_TEXTS[Revision.OFFICIAL]["high"]
    assert literals["effort_prefix"]["0731"]["max"] == EFFORT_TEXTS[Revision.OFFICIAL]["max"]
    assert literals["effort_prefix"]["april"]["max (xhigh)"] == EFFORT_TEXTS[Revision.PREVIEW]["max"]


def test_structural_spans_are_exactly_the_control_tokens():
    encoded = encode_chat({"messages": [{"role": "user", "content": "<｜User｜> 你好 <think>"}]}, revision="official")
    spelled = [encoded.prompt[start:end] for start, end in encoded.structural_spans]
    assert spelled == [BOS, "<｜User｜>", "<｜Assistant｜>", "</think>"]


@pytest.mark.parametrize(
    ("switches", "mode"),
    [
        ({}, "chat"),
        ({"reasoning_effort": "none"}, "chat"),
        ({"reasoning_effort": "minimal"}, "thinking"),
        ({"reasoning_effort": None}, "chat"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "max"}, "chat"),
        ({"chat_template_kwargs": {"thinking": True}}, "thinking"),
        ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"}, "chat"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, "thinking"),
        ({"chat_template_kwargs": {"enable_thinking": False}, "thinking": {"type": "enabled"}}, "chat"),
        ({"chat_template_kwargs": {"enable_thinking": None}, "thinking": {"type": "enabled"}}, "thinking"),
        ({"chat_template_kwargs": {"enable_thinking": True, "thinking": False}}, "thinking"),
    ],
)
def test_thinking_switches(switches, mode):
    encoded = encode_chat({"messages": [USER], **switches}, revision="official")
    assert encoded.thinking_mode == mode
    assert encoded.prompt.endswith("<think>" if mode == "thinking" else "</think>")
    assert encoded.start_state == ("reasoning" if mode == "thinking" else "content")
    assert (encoded.reasoning_effort is None) == (mode == "chat")


@pytest.mark.parametrize(
    ("revision", "effort", "level"),
    [
        ("preview", "minimal", "high"),
        ("preview", "low", "high"),
        ("preview", "medium", "high"),
        ("preview", "high", "high"),
        ("preview", "xhigh", "max"),
        ("preview", "max", "max"),
        ("official", "minimal", "low"),
        ("official", "low", "low"),
        ("official", "medium", "high"),
        ("official", "high", "high"),
        ("official", "xhigh", "high"),
        ("official", "max", "max"),
    ],
)
def test_effort_levels(revision, effort, level):
    encoded = encode_chat({"messages": [USER], "reasoning_effort": effort}, revision=revision)
    assert encoded.reasoning_effort == level
    text = EFFORT_TEXTS[Revision(revision)][level]
    assert encoded.prompt == f"{BOS}{text}<｜User｜>q<｜Assistant｜><think>"


def test_unknown_revision_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match="preview"):
        encode_chat({"messages": [USER]}, revision="april")


def test_required_opens_the_block_in_chat_mode(weather_tool):
    other = {"type": "function", "function": {"name": "other"}}
    encoded = encode_chat(
        {"messages": [USER], "tools": [weather_tool, other], "tool_choice": "required"}, revision="official"
    )
    assert encoded.prompt.endswith("<｜Assistant｜></think>\n\n<｜DSML｜tool_calls>\n")
    assert encoded.start_state == "tool_block"
    named = encode_chat(
        {
            "messages": [USER],
            "tools": [weather_tool, other],
            "tool_choice": {"type": "function", "function": {"name": "other"}},
        },
        revision="official",
    )
    assert '{"name": "other"}' in named.prompt
    assert "get_weather" not in named.prompt


def test_required_in_thinking_mode_lets_the_model_think(weather_tool):
    encoded = encode_chat(
        {"messages": [USER], "tools": [weather_tool], "tool_choice": "required", "reasoning_effort": "low"},
        revision="official",
    )
    assert encoded.prompt.endswith("<｜Assistant｜><think>")
    assert encoded.start_state == "reasoning"


def test_tool_schema_line_has_no_nulls_and_no_strict():
    tool = {
        "type": "function",
        "function": {"strict": False, "parameters": None, "description": None, "name": "f"},
    }
    assert '\n\n{"name": "f"}\n\n' in prompt(tools=[tool])


def test_message_fields_that_clients_echo_are_ignored():
    echoed = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "name": "bot",
    }
    assert prompt(messages=[USER, echoed, USER]) == prompt(messages=[USER, {"role": "assistant", "content": "a"}, USER])


def test_both_reasoning_names_are_read_once(weather_tool):
    message = {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}
    text = prompt(messages=[USER, message, USER], tools=[weather_tool], reasoning_effort="low")
    assert "<｜Assistant｜><think>r</think>a<｜end▁of▁sentence｜>" in text


@pytest.mark.parametrize(
    ("message", "tail", "state"),
    [
        ({"content": "So"}, "<｜Assistant｜><think></think>So", "content"),
        ({"content": "So", "reasoning": "r"}, "<｜Assistant｜><think>r</think>So", "content"),
        ({"content": "", "reasoning": "r"}, "<｜Assistant｜><think>r", "reasoning"),
        ({"content": None, "reasoning": "r"}, "<｜Assistant｜><think>r", "reasoning"),
    ],
)
def test_prefix_in_thinking_mode(message, tail, state):
    request = {"messages": [USER, {"role": "assistant", "prefix": True, **message}], "reasoning_effort": "low"}
    encoded = encode_chat(request, revision="official")
    assert encoded.prompt.endswith(tail)
    assert encoded.start_state == state


def test_continue_final_message_like_prefix():
    messages = [USER, {"role": "assistant", "content": "So"}]
    assert prompt(messages=messages, continue_final_message=True).endswith("<｜Assistant｜></think>So")
    assert prompt(messages=messages, continue_final_message=True, add_generation_prompt=False).endswith("So")
    assert refusal(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert refusal(add_generation_prompt=False).field == "add_generation_prompt"
    assert refusal(continue_final_message=True).field == "continue_final_message"
    assert refusal(messages=[{"role": "assistant", "content": "So", "prefix": True}]).field == "messages[0]"


def test_a_reminder_alone_still_gets_a_header():
    assert prompt(messages=[{"role": "latest_reminder", "content": "r"}]) == (
        f"{BOS}<｜latest_reminder｜>r<｜Assistant｜></think>"
    )


def test_json_object_block():
    text = prompt(messages=[{"role": "system", "content": "s"}, USER], response_format={"type": "json_object"})
    assert text == f"{BOS}s\n\n{RESPONSE_JSON_OBJECT}<｜User｜>q<｜Assistant｜></think>"


def test_number_forms_in_arguments():
    arguments = '{"a": 1e5, "b": -0.0, "c": 123456789012345678901234567890, "d": 1, "d": 2, "e": 1e-7}'
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    text = prompt(messages=[USER, {"role": "assistant", "tool_calls": [call]}, USER])
    values = [part.split("</｜DSML｜parameter>")[0] for part in text.split('string="false">')[1:]]
    assert values == ["100000.0", "-0.0", "123456789012345678901234567890", "2", "1e-07"]


def call_with(arguments) -> dict:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER]}


@pytest.mark.parametrize(
    "arguments",
    ["", "null", "[]", "{", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"\\udfff": 1}', "[" * 100_000],
)
def test_bad_arguments_name_their_path(arguments):
    assert refusal(**call_with(arguments)).field == "messages[1].tool_calls[0].function.arguments"


def test_arguments_must_be_text():
    assert refusal(**call_with({"a": 1})).field == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "contents": "y"}]}, "messages[0].contents"),
        ({"messages": [USER, {"role": "assistant", "content": "x", "reasoning": 1}, USER]}, "messages[1].reasoning"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": 1}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinkin": True}}, "chat_template_kwargs.enable_thinkin"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": True}, "thinking"),
    ],
)
def test_refusals_name_the_field(request_fields, field):
    assert refusal(**request_fields).field == field


def test_unknown_field_proposes_the_nearest():
    assert "did you mean 'content'?" in refusal(messages=[{"role": "user", "content": "", "contnt": "x"}]).message


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": [], "additionalProperties": False},
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"type": "object", "properties": {}}}},
            "required": ["a"],
            "additionalProperties": False,
        },
    ],
)
def test_strict_needs_the_strict_subset(parameters):
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    assert refusal(tools=[tool]).field.startswith("tools[0].function.parameters")


def test_ids_may_repeat_across_turns_and_results_may_stand_apart():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "r"}
    text = prompt(messages=[USER, asks, USER, result, asks, result])
    assert text.count("<tool_result>r</tool_result>") == 2
    assert "<｜User｜>q\n\n<tool_result>r</tool_result><｜Assistant｜>" in text


def test_result_of_an_earlier_turn_is_refused():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    other = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant", "tool_calls": [other]},
        {"role": "tool", "tool_call_id": "1", "content": "again"},
    ]
    assert refusal(messages=messages).field == "messages[4].tool_call_id"
