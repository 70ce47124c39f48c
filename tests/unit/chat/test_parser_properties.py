"""Properties of the parser over generated outputs: round trips, any cut, and anything a model could generate."""

from __future__ import annotations

import json
import random

from dsv4.chat import ChatParser, MessageBuilder, OutputFormat, encode_chat
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.replay_vectors import default_tokenizer

TOKENIZER = default_tokenizer()
LOOK_ALIKES = [
    "<｜DSML｜tool_calls>",
    "</｜DSML｜tool_calls>",
    '<｜DSML｜invoke name="f">',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="a" string="true">',
    "</｜DSML｜",
    "｜DSML｜",
    "<think>",
    "</think>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "</tool_result>",
    "<",
    "</",
    '"',
    "\\",
    "\n",
    "\x00",
    "\u2028",
    "é",
    "🧑‍🚀",
    "日本",
]
plain_text = st.text(st.characters(codec="utf-8"), max_size=12)
tricky_text = st.lists(st.sampled_from(LOOK_ALIKES) | plain_text, max_size=5).map("".join)
value_text = tricky_text.filter(lambda text: "</｜DSML｜parameter>" not in text)
keys = tricky_text.map(lambda text: "".join(c for c in text if c not in '"<>'))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | value_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(value_text, inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(keys, json_values, max_size=4)


def feed(parser, ids, rng):
    builder = MessageBuilder()
    start = 0
    while start < len(ids):
        size = rng.choice((1, 1, 2, 3, 8, 100))
        builder.add(parser.push(ids[start : start + size]).deltas)
        start += size
    end = parser.finish("stop")
    builder.add(end.deltas)
    return builder.message(), end


@given(
    st.lists(arguments, min_size=1, max_size=3),
    tricky_text,
    st.none() | tricky_text,
    st.integers(),
)
@settings(max_examples=100, deadline=None)
def test_what_was_encoded_is_parsed_back(calls, content, reasoning, seed):
    """A turn of the history, cut out of the prompt by its ids, parses to the message it was rendered from."""
    tool_calls = [
        {"id": str(index), "type": "function", "function": {"name": "f", "arguments": json.dumps(call)}}
        for index, call in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls, "reasoning_content": reasoning}
    request = {
        "messages": [{"role": "user", "content": "q"}, message, {"role": "user", "content": "next"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "reasoning_effort": None if reasoning is None else "low",
    }
    encoded = encode_chat(request, revision="official", tokenizer=TOKENIZER)
    ids = encoded.token_ids
    begin = ids.index(TOKENIZER.token_id("<｜Assistant｜>")) + 2
    end_of_turn = ids.index(TOKENIZER.eos_token_id)
    start_state = "content" if reasoning is None else "reasoning"
    parser = ChatParser(OutputFormat(start_state=start_state, tools=("f",), tool_choice="auto"), TOKENIZER)
    parsed, end = feed(parser, ids[begin:end_of_turn], random.Random(seed))
    assert end.finish_reason == "tool_calls", end.error
    assert [json.loads(call["function"]["arguments"]) for call in parsed["tool_calls"]] == calls
    assert (parsed["content"] or "") == content.rstrip("\n")
    assert parsed.get("reasoning", "") == (reasoning or "")


DSML_ID = TOKENIZER.token_id("｜DSML｜")
CONTROL = [DSML_ID, TOKENIZER.token_id("<think>"), TOKENIZER.token_id("</think>"), TOKENIZER.eos_token_id]
FRAGMENTS = [
    "<｜DSML｜tool_calls>\n",
    "</｜DSML｜tool_calls>",
    '<｜DSML｜invoke name="f">\n',
    '<｜DSML｜invoke name="f"/>',
    "</｜DSML｜invoke>\n",
    '<｜DSML｜parameter name="a" string="true">',
    '<｜DSML｜parameter name="b" string="false">',
    '<｜DSML｜parameter string="false" name="c">',
    "<｜DSML｜parameter name=",
    "</｜DSML｜parameter>\n",
    "</think>",
    "<think>",
    "<｜DSML｜",
    "</｜DSML｜",
    "<",
    "</",
    "\n",
    "\n\n",
    "12",
    '{"k": [1]}',
    '"',
    ">",
    "text ",
    "🌍",
]
fragment_ids = st.sampled_from(FRAGMENTS).map(TOKENIZER.encode_text)
any_ids = st.lists(
    fragment_ids
    | st.sampled_from(CONTROL).map(lambda token: [token])
    | st.integers(-5, 130_000).map(lambda token: [max(token, 0)]),
    max_size=25,
).map(lambda parts: [token for part in parts for token in part])
formats = st.builds(
    OutputFormat,
    start_state=st.sampled_from(["content", "reasoning"]),
    tools=st.just(("f",)),
    tool_choice=st.sampled_from(["auto", "auto", "none"]),
    parallel_tool_calls=st.booleans(),
    include_reasoning=st.booleans(),
)


def check_invariants(message, end, output_format):
    for name in ("content", "reasoning"):
        text = message.get(name) or ""
        assert "<｜DSML｜" not in text
        assert "</｜DSML｜" not in text
    if end.finish_reason == "tool_calls":
        assert message["tool_calls"]
        for call in message["tool_calls"]:
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
    else:
        assert end.finish_reason in ("stop", "error")
    if output_format.tool_choice == "none":
        assert "tool_calls" not in message
    if not output_format.parallel_tool_calls:
        assert len(message.get("tool_calls", ())) <= 1


def without_ids(message):
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message.get("reasoning"), message["content"], calls


@given(any_ids, formats, st.integers())
@settings(max_examples=300, deadline=None)
def test_anything_a_model_could_generate(ids, output_format, seed):
    whole = ChatParser(output_format, TOKENIZER)
    builder = MessageBuilder()
    builder.add(whole.push(ids).deltas)
    end = whole.finish("stop")
    builder.add(end.deltas)
    check_invariants(builder.message(), end, output_format)

    cut = ChatParser(output_format, TOKENIZER)
    message, cut_end = feed(cut, ids, random.Random(seed))
    assert without_ids(message) == without_ids(builder.message())
    assert (cut_end.finish_reason, cut_end.error) == (end.finish_reason, end.error)
    assert cut.reasoning_tokens == whole.reasoning_tokens


@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=20).map("".join), formats, st.integers())
@settings(max_examples=200, deadline=None)
def test_any_text(text, output_format, seed):
    rng = random.Random(seed)
    results = []
    for size in (len(text) + 1, 1, rng.randint(2, 7)):
        parser, builder = ChatParser(output_format), MessageBuilder()
        for start in range(0, len(text), size):
            builder.add(parser.push_text(text[start : start + size]).deltas)
        end = parser.finish("stop")
        builder.add(end.deltas)
        check_invariants(builder.message(), end, output_format)
        results.append((without_ids(builder.message()), end.finish_reason))
    assert results[0] == results[1] == results[2]


@given(any_ids)
@settings(max_examples=100, deadline=None)
def test_without_tools_markup_is_text(ids):
    ids = [token for token in ids if token not in (CONTROL[1], CONTROL[2])]
    parser = ChatParser(OutputFormat(), TOKENIZER)
    message, end = feed(parser, ids, random.Random(0))
    assert end.finish_reason == "stop"
    text = message["content"]
    whole = TOKENIZER.decode(ids)
    # A character cut off by the DSML token reads as U+FFFD on both sides; only the very end is dropped.
    assert text == whole
