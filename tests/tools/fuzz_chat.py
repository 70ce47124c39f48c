"""Coverage-guided fuzzing of the chat parser and encoder: ``python -m tests.tools.fuzz_chat -max_total_time=600``.

Needs atheris (not a dependency of the tests). Options are libFuzzer's. What it finds becomes a test in tests/unit/chat.
"""

from __future__ import annotations

import json
import sys

import atheris

with atheris.instrument_imports(include=["dsv4.chat"]):
    from dsv4.chat import ChatEnd, ChatParser, MessageBuilder, OutputFormat, encode_chat
    from dsv4.errors import RequestError

FRAGMENTS = [
    "<｜DSML｜tool_calls>\n",
    "</｜DSML｜tool_calls>",
    "<｜DSML｜toolcalls>",
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
    *("<", "</", ">", "/>", "\n", " ", '"', "12", '{"k": [1]}', "text ", "🌍", "｜", "<｜end▁of▁sentence｜>"),
    *("invoke", "parameter", "string=", 'name="', "true"),
]


def parse(output_format: OutputFormat, text: str, steps: tuple[int, ...]) -> tuple[object, ChatEnd]:
    """Parse a text cut into steps of these sizes, in turn. Returns the message without call ids, and the end."""
    parser, builder = ChatParser(output_format), MessageBuilder()
    start = turn = 0
    while start < len(text):
        size = steps[turn % len(steps)]
        builder.add(parser.push_text(text[start : start + size]).deltas)
        start, turn = start + size, turn + 1
    end = parser.finish("stop")
    builder.add(end.deltas)
    message = builder.message()
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return (message.get("reasoning"), message["content"], calls), end


def check_parser(data: atheris.FuzzedDataProvider) -> None:
    output_format = OutputFormat(
        start_state="reasoning" if data.ConsumeBool() else "content",
        tools=("f",),
        tool_choice="auto" if data.ConsumeIntInRange(0, 4) else "none",
        parallel_tool_calls=data.ConsumeBool(),
        include_reasoning=data.ConsumeBool(),
    )
    parts = []
    for _ in range(data.ConsumeIntInRange(0, 24)):
        fragment = FRAGMENTS[data.ConsumeIntInRange(0, len(FRAGMENTS) - 1)]
        parts.append(fragment if data.ConsumeIntInRange(0, 4) else data.ConsumeUnicode(6))
    text = "".join(parts)
    message, end = parse(output_format, text, (len(text) + 1,))
    for steps in ((1,), (2, 5, 3)):
        other, other_end = parse(output_format, text, steps)
        assert other == message, text
        assert (other_end.finish_reason, other_end.error) == (end.finish_reason, end.error), text
    reasoning, content, calls = message
    for published in (reasoning or "", content or ""):
        assert "<｜DSML｜" not in published, text
        assert "</｜DSML｜" not in published, text
    if end.finish_reason == "tool_calls":
        assert calls
        assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls), text


def check_encoder(data: atheris.FuzzedDataProvider) -> None:
    try:
        value = json.loads(data.ConsumeUnicode(300))
    except (ValueError, RecursionError):
        return
    try:
        encode_chat(value if isinstance(value, dict) else {"messages": value}, revision="official")
    except RequestError:
        return


def fuzz_one_input(raw: bytes) -> None:
    data = atheris.FuzzedDataProvider(raw)
    if data.ConsumeIntInRange(0, 3):
        check_parser(data)
    else:
        check_encoder(data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, fuzz_one_input)
    atheris.Fuzz()
