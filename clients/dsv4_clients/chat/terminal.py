"""The terminal chat: reading lines, streaming answers, commands."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from dsv4_clients.chat.conversation import CommandError, Conversation
from dsv4_clients.merge import merge_delta
from dsv4_clients.openai_stream import ServerError, stream_events

HELP = """\
/system TEXT         set the system prompt (no text: remove it)
/thinking on|off|EFFORT
                     think before answering
/fold                hide or show the thinking
/set FIELD VALUE     set a request field, such as temperature 0.7 (no value: remove it)
/tools FILE          offer the function tools of a JSON file (no file: none)
/retry               ask the last question again
/undo                forget the last question and answer
/clear               forget all messages
/save FILE, /load FILE
                     write or read the conversation as JSON
/exit                leave (also Ctrl-D)
A line that ends with \\ goes on in the next one; a line of three double quotes starts and ends a block.
Ctrl-C stops an answer."""
BLOCK_QUOTE = '"""'

ReadLine = Callable[[str], str]


class TerminalChat:
    """One chat on one console. `read_line` gets a prompt and raises EOFError at the end."""

    def __init__(
        self, client: httpx.AsyncClient, conversation: Conversation, console: Console, read_line: ReadLine
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._console = console
        self._read_line = read_line
        self._folded = False

    async def run(self) -> None:
        """Read and answer until the end."""
        while True:
            try:
                text = await asyncio.to_thread(self._read_message)
            except EOFError:
                return
            except KeyboardInterrupt:
                continue
            if not text.strip():
                continue
            if text.startswith("/"):
                if not await self._obey(text):
                    return
            else:
                await self._ask(text)

    def _read_message(self) -> str:
        line = self._read_line("> ")
        if line.strip() == BLOCK_QUOTE:
            lines = []
            while (line := self._read_line("… ")).strip() != BLOCK_QUOTE:
                lines.append(line)
            return "\n".join(lines)
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self._read_line("… ")
        return line

    async def _obey(self, text: str) -> bool:
        """Carry out a command; False to leave."""
        name, _, argument = text[1:].strip().partition(" ")
        if name in ("exit", "quit"):
            return False
        try:
            await self._command(name, argument.strip())
        except CommandError as error:
            self._console.print(str(error), style="red", markup=False)
        return True

    async def _command(self, name: str, argument: str) -> None:
        conversation = self._conversation
        if name == "help":
            self._console.print(HELP, markup=False, highlight=False)
        elif name == "system":
            conversation.system = argument or None
        elif name == "thinking":
            conversation.set_thinking(argument)
        elif name == "fold":
            self._folded = not self._folded
        elif name == "set":
            field, _, value = argument.partition(" ")
            conversation.set_field(field, value.strip())
        elif name == "tools":
            conversation.set_tools(Path(argument) if argument else None)
        elif name in ("retry", "undo"):
            question = conversation.drop_last_turn()
            if name == "retry" and question is not None:
                await self._ask(question)
        elif name == "clear":
            conversation.messages.clear()
        elif name == "save":
            conversation.save(Path(argument))
        elif name == "load":
            conversation.load(Path(argument))
        else:
            raise CommandError(f"unknown command /{name}; /help lists them")

    async def _ask(self, text: str) -> None:
        self._conversation.ask(text)
        writer = _AnswerWriter(self._console, folded=self._folded)
        answering = asyncio.ensure_future(self._answer(writer))
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(signal.SIGINT, answering.cancel)
        try:
            await answering
        except ServerError as error:
            writer.end()
            self._console.print(str(error), style="red", markup=False)
        except asyncio.CancelledError:
            writer.end()
            self._console.print("stopped", style="dim")
        finally:
            with suppress(NotImplementedError, RuntimeError, ValueError):
                loop.remove_signal_handler(signal.SIGINT)
        if writer.message:
            self._conversation.answer({"role": "assistant", "content": "", **writer.message})
        else:
            self._conversation.drop_last_turn()

    async def _answer(self, writer: _AnswerWriter) -> None:
        events = stream_events(self._client, "/chat/completions", self._conversation.request())
        async with aclosing(events):
            async for chunk in events:
                writer.write(chunk)
        writer.end()
        writer.summarize()


class _AnswerWriter:
    """Prints an answer as it comes: thinking dimmed, calls of tools marked."""

    def __init__(self, console: Console, *, folded: bool) -> None:
        self.message: dict[str, Any] = {}
        self._console = console
        self._folded = folded
        self._part: str | None = None
        self._usage: dict[str, Any] = {}
        self._started = time.monotonic()
        self._first: float | None = None

    def write(self, chunk: dict[str, Any]) -> None:
        """Print one chunk of the stream."""
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices", ()):
            delta = {name: value for name, value in (choice.get("delta") or {}).items() if value and name != "role"}
            reasoning = delta.pop("reasoning_content", None) or delta.get("reasoning")
            delta.pop("reasoning", None)
            if reasoning:
                delta["reasoning_content"] = reasoning
            if delta and self._first is None:
                self._first = time.monotonic()
            merge_delta(self.message, delta)
            if reasoning:
                self._print("thinking", reasoning, "dim italic")
            if delta.get("content"):
                self._print("content", delta["content"], None)
            for call in delta.get("tool_calls", ()):
                function = call.get("function") or {}
                if function.get("name"):
                    self.end()
                    self._print("call", f"→ {function['name']} ", "cyan")
                self._print("call", function.get("arguments") or "", "cyan")

    def _print(self, part: str, text: str, style: str | None) -> None:
        if part != self._part:
            self.end()
            self._part = part
            if part == "thinking" and self._folded:
                self._console.print("thinking …", style="dim italic", end="")
        if not (part == "thinking" and self._folded):
            self._console.print(text, style=style, end="", markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        """Finish the line of the part that is being printed."""
        if self._part is not None:
            self._console.print()
            self._part = None

    def summarize(self) -> None:
        """One dim line with tokens and speed."""
        tokens = self._usage.get("completion_tokens")
        if not tokens or self._first is None:
            return
        seconds = max(time.monotonic() - self._first, 1e-6)
        line = f"{tokens} tokens, {tokens / seconds:.1f}/s, first after {self._first - self._started:.2f} s"
        details = self._usage.get("completion_tokens_details") or {}
        accepted, rejected = (details.get(f"{name}_prediction_tokens") or 0 for name in ("accepted", "rejected"))
        if accepted + rejected:
            line += f", {accepted / (accepted + rejected):.0%} of drafts accepted"
        self._console.print(line, style="dim", highlight=False)
