"""Streaming behaviour of the parser: what is published when, finish reasons, options, and stop strings."""

from __future__ import annotations

import json

import pytest
from dsv4.chat import ChatParser, MessageBuilder, OutputFormat

from tests.tools.replay_vectors import default_tokenizer
from tests.unit.chat.small_vocabulary import small_tokenizer

TOKENIZER = default_tokenizer()
BLOCK_OPEN, BLOCK_CLOSE = "<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"


def invoke(name, *parameters):
    return f'<｜DSML｜invoke name="{name}">\n' + "".join(parameters) + "</｜DSML｜invoke>\n"


def parameter(name, value, string=True):
    truth = "true" if string else "false"
    return f'<｜DSML｜parameter name="{name}" string="{truth}">{value}</｜DSML｜parameter>\n'


def new_parser(**options):
    stop = options.pop("stop_strings", ())
    tokenizer = options.pop("tokenizer", TOKENIZER)
    include = options.pop("include_stop", False)
    options.setdefault("tools", ("f", "g"))
    options.setdefault("tool_choice", "auto" if options["tools"] else "none")
    return ChatParser(OutputFormat(**options), tokenizer, stop_strings=stop, include_stop=include)


def parse(text, reason="stop", *, step=1, **options):
    parser = new_parser(**options)
    builder = MessageBuilder()
    tokenizer = options.get("tokenizer", TOKENIZER)
    ids = tokenizer.encode_text(text)
    stopped = None
    for start in range(0, len(ids), step):
        result = parser.push(ids[start : start + step])
        builder.add(result.deltas)
        if result.stop is not None or result.error is not None:
            stopped = start + result.token_count
            break
    end = parser.finish(reason)
    builder.add(end.deltas)
    return builder.message(), end, parser, stopped


def test_deltas_have_openai_shape():
    parser = new_parser(start_state="reasoning")
    ids = TOKENIZER.encode_text("hm</think>ok\n\n" + BLOCK_OPEN + invoke("f", parameter("a", "x")) + BLOCK_CLOSE)
    deltas = parser.push(ids).deltas + parser.finish("stop").deltas
    call_id = deltas[2]["tool_calls"][0]["id"]
    assert call_id.startswith("call_")
    assert deltas == [
        {"role": "assistant", "reasoning_content": "hm", "reasoning": "hm"},
        {"content": "ok"},
        {"tool_calls": [{"index": 0, "id": call_id, "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": "x"}'}}]},
    ]


def test_empty_output_still_has_a_role():
    parser = new_parser()
    assert parser.push([TOKENIZER.eos_token_id]).deltas == []
    assert parser.finish("stop").deltas == [{"role": "assistant", "content": ""}]


def test_text_is_published_with_its_token():
    parser = new_parser(start_state="reasoning")
    for token in TOKENIZER.encode_text("Let me think about it"):
        assert parser.push([token]).deltas


def test_without_tools_nothing_is_held():
    parser = new_parser(tools=())
    for piece in ("a\n\n", "<", "</"):
        deltas = parser.push(TOKENIZER.encode_plain(piece)).deltas
        assert deltas[-1]["content"] == piece


def test_string_arguments_stream_while_json_waits():
    parser = new_parser()
    seen = []
    text = BLOCK_OPEN + '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">one two'
    for delta in parser.push(TOKENIZER.encode_text(text)).deltas:
        seen += [entry["function"]["arguments"] for entry in delta["tool_calls"]]
    assert "".join(seen) == '{"a": "one two'
    rest = '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">12'
    deltas = parser.push(TOKENIZER.encode_text(rest)).deltas
    assert deltas == [{"tool_calls": [{"index": 0, "function": {"arguments": '"'}}]}]


def test_markers_of_one_step_are_split():
    text = "r</think>c\n\n" + BLOCK_OPEN + invoke("f") + invoke("g", parameter("n", "[1]", string=False)) + BLOCK_CLOSE
    message, end, _, _ = parse(text, step=10_000, start_state="reasoning")
    assert (message["reasoning"], message["content"], end.finish_reason) == ("r", "c", "tool_calls")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": "{}"},
        {"name": "g", "arguments": '{"n": [1]}'},
    ]


def test_tool_block_start_state():
    text = invoke("f", parameter("a", "x")) + BLOCK_CLOSE
    message, end, _, _ = parse(text, start_state="tool_block", tool_choice="required")
    assert end.finish_reason == "tool_calls"
    assert message["content"] is None


def test_hidden_reasoning_counts():
    text = "think\nmore</think>answer"
    message, _, parser, _ = parse(text, start_state="reasoning", include_reasoning=False)
    assert message == {"role": "assistant", "content": "answer"}
    assert parser.reasoning_tokens == 3
    shown, _, parser, _ = parse(text, start_state="reasoning", step=4)
    assert shown["reasoning_content"] == shown["reasoning"] == "think\nmore"
    assert parser.reasoning_tokens == 3


def test_none_swallows_calls_and_their_mistakes():
    broken = BLOCK_OPEN + invoke("f", '<｜DSML｜parameter name="a">x</｜DSML｜parameter>')
    for block in (BLOCK_OPEN + invoke("f") + BLOCK_CLOSE, broken, BLOCK_OPEN):
        message, end, _, _ = parse("text\n\n" + block, tool_choice="none")
        assert message == {"role": "assistant", "content": "text"}
        assert end.finish_reason == "stop"


def test_parallel_off_returns_the_first_call_only():
    second = invoke("g", parameter("a", "1"), parameter("a", "2"))
    message, end, _, _ = parse(BLOCK_OPEN + invoke("f") + second + BLOCK_CLOSE, parallel_tool_calls=False)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    assert end.finish_reason == "tool_calls"


@pytest.mark.parametrize("reason", ["length", "abort", "error", "deadline"])
def test_other_reasons_are_kept(reason):
    complete = BLOCK_OPEN + invoke("f", parameter("a", "x")) + BLOCK_CLOSE
    assert parse(complete, reason)[1].finish_reason == reason
    cut = complete[: complete.index("x</") + 1]
    message, end, _, _ = parse(cut, reason)
    assert end.finish_reason == reason
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "x'


LENIENT = {
    "attributes swapped": BLOCK_OPEN + '<｜DSML｜invoke name="f"><｜DSML｜parameter string="true" name="a">x'
    "</｜DSML｜parameter></｜DSML｜invoke>" + BLOCK_CLOSE,
    "function_calls": "<｜DSML｜function_calls>" + invoke("f", parameter("a", "x")) + "</｜DSML｜function_calls>",
    "prose in the block": BLOCK_OPEN + "calling:\n" + invoke("f", parameter("a", "x")) + "done" + BLOCK_CLOSE,
    "next call closes the call": BLOCK_OPEN + invoke("f", parameter("a", "x")).removesuffix("</｜DSML｜invoke>\n"),
    "no wrapper, text behind": invoke("f", parameter("a", "x")) + "dropped",
    "stray closer": BLOCK_OPEN + invoke("f", parameter("a", "x"), "</｜DSML｜parameter>\n") + BLOCK_CLOSE,
    "end inside the closer": BLOCK_OPEN + invoke("f", parameter("a", "x")).removesuffix(">\n"),
    "JSON body": BLOCK_OPEN + invoke("f", '{"a": "x"}\n') + BLOCK_CLOSE,
}


@pytest.mark.parametrize("text", LENIENT.values(), ids=LENIENT)
def test_clear_shapes_are_read(text):
    message, end, _, _ = parse("ok" + text)
    assert end.finish_reason == "tool_calls"
    assert message["content"] == "ok"
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"a": "x"}]


UNREADABLE = {
    "string attribute missing": BLOCK_OPEN
    + '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">x</｜DSML｜parameter>',
    "string attribute maybe": BLOCK_OPEN + '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="maybe">x',
    "not JSON": BLOCK_OPEN + invoke("f", parameter("a", "x", string=False)),
    "empty JSON": BLOCK_OPEN + invoke("f", parameter("a", "", string=False)),
    "infinite": BLOCK_OPEN + invoke("f", parameter("a", "-Infinity", string=False)),
    "too large": BLOCK_OPEN + invoke("f", parameter("a", "1e999", string=False)),
    "given twice": BLOCK_OPEN + invoke("f", parameter("a", "1"), parameter("a", "2")),
    "text in a call": BLOCK_OPEN + invoke("f", "a=1\n"),
    "body and parameters": BLOCK_OPEN + invoke("f", '{"b": 1}', parameter("a", "2")),
    "array body": BLOCK_OPEN + invoke("f", "[1]"),
    "parameter without call": BLOCK_OPEN + parameter("a", "1"),
    "no name": BLOCK_OPEN + '<｜DSML｜invoke name="">\n</｜DSML｜invoke>',
    "end in a value": BLOCK_OPEN + '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x',
    "end in a name": BLOCK_OPEN + '<｜DSML｜invoke name="f',
    "end in the opener": "text <｜DSML｜tool_ca",
    "end before parameters": BLOCK_OPEN + '<｜DSML｜invoke name="f">\n',
    "block without a call": BLOCK_OPEN,
    "endless name": BLOCK_OPEN + '<｜DSML｜invoke name="' + "x" * 5000 + '">',
}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_what_would_lose_or_invent_an_argument_is_an_error(text):
    for step in (1, 3, 10_000):
        message, end, parser, _ = parse(text, step=step)
        assert end.finish_reason == "error"
        assert end.error
        assert "DSML" not in (message["content"] or "")
        assert parser.push([5]).error == end.error


def test_unknown_tags_never_reach_content():
    message, end, _, _ = parse("a <｜DSML｜foo>b</｜DSML｜foo> </｜DSML｜invoke> c ｜DSML｜ <｜DSML｜ d")
    assert "<｜DSML｜" not in message["content"]
    assert "</｜DSML｜" not in message["content"]
    assert message["content"] == "a b  c ｜DSML｜  d"
    assert end.finish_reason == "stop"


@pytest.mark.parametrize("text", ["</</｜DSML｜foo>｜DSML｜x", "<</think>｜DSML｜x", "<<think>r</think>/｜DSML｜x"])
def test_dropped_markers_do_not_leave_a_tag_behind(text):
    message, _, _, _ = parse(text)
    assert message["content"] in ("</x", "<x")


def test_markers_inside_values_are_data():
    value = 'a</think><think>"\\\n\t<｜DSML｜invoke name="f"></｜DSML｜invoke></｜DSML｜tool_calls></｜DSML｜param'
    message, end, _, _ = parse(BLOCK_OPEN + invoke("f", parameter("a", value)) + BLOCK_CLOSE)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": value}
    assert end.finish_reason == "tool_calls"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 10_000])
def test_stop_string_cuts_content_at_its_token(step):
    text = "reason</think>one two STOP three"
    message, end, _, stopped = parse(text, step=step, start_state="reasoning", stop_strings=["STOP"])
    assert message["content"] == "one two "
    assert message["reasoning"] == "reason"
    assert end.finish_reason == "stop"
    assert stopped == len(TOKENIZER.encode_text("reason</think>one two STOP"))
    included, _, _, _ = parse(text, step=step, stop_strings=["STOP"], include_stop=True)
    assert included["content"].endswith("one two STOP")


def test_stop_string_inside_a_call_keeps_the_prefix():
    text = BLOCK_OPEN + invoke("f", parameter("a", "one two")) + BLOCK_CLOSE
    message, end, _, _ = parse(text, stop_strings=["two"])
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "one '
    assert end.finish_reason == "stop"


def test_stop_string_may_be_a_marker():
    message, end, _, stopped = parse("r</think>answer", start_state="reasoning", stop_strings=["</think>"])
    assert message["reasoning"] == "r"
    assert end.finish_reason == "stop"
    assert stopped == len(TOKENIZER.encode_text("r</think>"))


def test_small_vocabulary_with_all_tokens_special():
    for special in (False, True):
        text = "the</think>weather\n\n" + BLOCK_OPEN + invoke("f", parameter("city", "Paris")) + BLOCK_CLOSE
        message, end, _, _ = parse(text, tokenizer=small_tokenizer(special=special), start_state="reasoning")
        assert (message["reasoning"], message["content"], end.finish_reason) == ("the", "weather", "tool_calls")
        assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'


def test_text_and_tokens_agree_on_held_text():
    parser = ChatParser(OutputFormat())
    deltas = [parser.push_text(piece).deltas for piece in ("2 <", "thin", "g", " </think", ">")]
    assert [[delta["content"] for delta in step] for step in deltas] == [["2 "], [], ["<thing"], [" "], []]


def test_push_needs_a_tokenizer():
    with pytest.raises(ValueError, match="tokenizer"):
        ChatParser(OutputFormat()).push([1])
