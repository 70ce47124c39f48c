"""Rendering turns into the prompt: the exact text, with the places of its structural tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dsv4.chat.messages import Block, Call, Turn
from dsv4.chat.protocol import (
    ASSISTANT,
    BEGIN_OF_SENTENCE,
    DSML,
    END_OF_SENTENCE,
    LATEST_REMINDER,
    STRUCTURAL_SPLITTER,
    THINK_END,
    THINK_START,
    TOOL_CALLS_OPEN,
    TOOL_RESULT_CLOSE,
    TOOL_RESULT_OPEN,
    TOOLS_BLOCK_HEAD,
    TOOLS_BLOCK_TAIL,
    USER,
)
from dsv4.chat.thinking import Thinking
from dsv4.errors import invalid_argument

StartState = Literal["content", "reasoning", "tool_block"]


@dataclass
class Prompt:
    """A prompt as ``texts[0] tokens[0] texts[1] tokens[1] … texts[-1]``.

    ``tokens`` are structural: each becomes one id. ``texts`` are everything between them, which is tokenised without
    the added vocabulary, so that no text can turn into a control token.
    """

    texts: list[str] = field(default_factory=lambda: [""])
    tokens: list[str] = field(default_factory=list)

    def token(self, name: str) -> None:
        """Append one structural token."""
        self.tokens.append(name)
        self.texts.append("")

    def text(self, text: str) -> None:
        """Append text in which nothing is structural."""
        self.texts[-1] = self.texts[-1] + text if self.texts[-1] else text

    def template(self, text: str) -> None:
        """Append text of the protocol itself, whose spelled tokens are structural."""
        for index, part in enumerate(STRUCTURAL_SPLITTER.split(text)):
            if index % 2:
                self.token(part)
            elif part:
                self.text(part)

    def render(self) -> str:
        """The prompt as one string."""
        parts = [self.texts[0]]
        for token, text in zip(self.tokens, self.texts[1:], strict=True):
            parts += (token, text)
        return "".join(parts)

    def structural_spans(self) -> list[tuple[int, int]]:
        """Character ranges ``[start, end)`` of the structural tokens in ``render()``."""
        spans = []
        position = 0
        for text, token in zip(self.texts, self.tokens, strict=False):
            position += len(text)
            spans.append((position, position + len(token)))
            position += len(token)
        return spans


@dataclass(frozen=True)
class SystemAdditions:
    """What the first system turn carries besides its content."""

    tool_schema_lines: Sequence[str] = ()
    format_block: str = ""

    def __bool__(self) -> bool:
        return bool(self.tool_schema_lines or self.format_block)


def render_prompt(
    turns: Sequence[Turn],
    *,
    thinking: Thinking,
    additions: SystemAdditions,
    continue_final: bool = False,
    open_tool_block: bool = False,
) -> tuple[Prompt, StartState]:
    """Render a conversation and say in which state the model's output starts.

    ``continue_final`` leaves the last assistant turn open. ``open_tool_block`` ends the prompt inside a block of calls.
    """
    turns = list(turns)
    if additions and all(turn.role != "system" for turn in turns):
        turns.insert(0, Turn("system"))
    if thinking.enabled and thinking.drop_history:
        turns = _drop_history(turns)
    renderer = _Renderer(turns, thinking, additions, continue_final)
    prompt = renderer.render()
    state: StartState = renderer.start_state
    if open_tool_block:
        prompt.text("\n\n")
        prompt.template(TOOL_CALLS_OPEN + "\n")
        state = "tool_block"
    return prompt, state


def _last_user_index(turns: Sequence[Turn]) -> int:
    return max((index for index, turn in enumerate(turns) if turn.is_user_side), default=-1)


def _drop_history(turns: Sequence[Turn]) -> list[Turn]:
    """Before the last user turn, assistants lose their reasoning and developer turns disappear."""
    last_user = _last_user_index(turns)
    kept = []
    for index, turn in enumerate(turns):
        if index >= last_user:
            kept.append(turn)
        elif turn.role == "assistant":
            kept.append(replace(turn, reasoning=None))
        elif turn.role != "developer":
            kept.append(turn)
    return kept


class _Renderer:
    def __init__(
        self, turns: Sequence[Turn], thinking: Thinking, additions: SystemAdditions, continue_final: bool
    ) -> None:
        self._turns = turns
        self._thinking = thinking
        self._additions = additions
        self._continue_final = continue_final
        self._last_user = _last_user_index(turns)
        self._first_system = next((index for index, turn in enumerate(turns) if turn.role == "system"), -1)
        self._prompt = Prompt()
        self.start_state: StartState = "content"

    def render(self) -> Prompt:
        self._prompt.token(BEGIN_OF_SENTENCE)
        self._prompt.text(self._thinking.effort_text)
        for index, turn in enumerate(self._turns):
            if turn.role == "assistant":
                self._render_assistant(index, turn)
                continue
            if turn.role == "system":
                self._render_system(index, turn)
            elif turn.role == "user":
                self._render_user(turn.blocks)
            else:
                self._prompt.token(LATEST_REMINDER if turn.role == "latest_reminder" else USER)
                self._prompt.text(turn.content)
            if self._opens_answer(index):
                self._render_header(index)
        return self._prompt

    def _render_system(self, index: int, turn: Turn) -> None:
        self._prompt.text(turn.content)
        if index != self._first_system:
            return
        if self._additions.tool_schema_lines:
            self._prompt.template("\n\n" + TOOLS_BLOCK_HEAD)
            self._prompt.text("\n".join(self._additions.tool_schema_lines) + TOOLS_BLOCK_TAIL)
        if self._additions.format_block:
            self._prompt.text("\n\n" + self._additions.format_block)

    def _render_user(self, blocks: Sequence[Block]) -> None:
        self._prompt.token(USER)
        for position, block in enumerate(blocks):
            if position:
                self._prompt.text("\n\n")
            if block.call_id is None:
                self._prompt.text(block.text)
            else:
                self._prompt.text(TOOL_RESULT_OPEN + block.text + TOOL_RESULT_CLOSE)

    def _opens_answer(self, index: int) -> bool:
        """The header of an answer is written by the turn before it.

        A system turn opens one only directly before an answer; a user turn also before a reminder; a last reminder
        only if no user turn before it did.
        """
        turn = self._turns[index]
        following = self._turns[index + 1].role if index + 1 < len(self._turns) else None
        if turn.is_user_side:
            return following in (None, "assistant", "latest_reminder")
        if turn.role == "system":
            return following in (None, "assistant")
        return following is None and not (index > 0 and self._turns[index - 1].is_user_side)

    def _thinks_after(self, index: int) -> bool:
        return self._thinking.enabled and (not self._thinking.drop_history or index >= self._last_user)

    def _render_header(self, index: int) -> None:
        thinks = self._thinks_after(index)
        self._prompt.token(ASSISTANT)
        self._prompt.token(THINK_START if thinks else THINK_END)
        self.start_state = "reasoning" if thinks else "content"

    def _render_assistant(self, index: int, turn: Turn) -> None:
        is_open = self._continue_final and index == len(self._turns) - 1
        if self._thinking.enabled and (not self._thinking.drop_history or index > self._last_user):
            self._prompt.text(turn.reasoning or "")
            if is_open and not turn.content:
                return
            self._prompt.token(THINK_END)
        self.start_state = "content"
        self._prompt.text(turn.content)
        if turn.calls:
            self._render_calls(turn.calls)
        if not is_open:
            self._prompt.token(END_OF_SENTENCE)

    def _render_calls(self, calls: Sequence[Call]) -> None:
        prompt = self._prompt
        prompt.text("\n\n<")
        prompt.token(DSML)
        prompt.text("tool_calls>\n")
        for call in calls:
            prompt.text("<")
            prompt.token(DSML)
            prompt.text(f'invoke name="{call.name}">\n')
            for position, (name, value, is_string) in enumerate(call.parameters):
                prompt.text("\n<" if position else "<")
                prompt.token(DSML)
                prompt.text(f'parameter name="{name}" string="{"true" if is_string else "false"}">{value}</')
                prompt.token(DSML)
                prompt.text("parameter>")
            prompt.text("\n</")
            prompt.token(DSML)
            prompt.text("invoke>\n")
        prompt.text("</")
        prompt.token(DSML)
        prompt.text("tool_calls>")


def check_last_turn(turns: Sequence[Turn], continue_final: bool, message_count: int) -> None:
    """A conversation ends with something to answer, or with an assistant turn that is to be continued.

    Raises INVALID_ARGUMENT: a closed last assistant turn would leave the model nothing to say.
    """
    path = f"messages[{message_count - 1}]"
    if not continue_final:
        if turns[-1].role == "assistant":
            raise invalid_argument(
                path, "the last message is from the assistant; set prefix (or continue_final_message) to continue it"
            )
        return
    if turns[-1].role != "assistant":
        raise invalid_argument("continue_final_message", "needs a last message from the assistant")
    if turns[-1].calls:
        raise invalid_argument("continue_final_message", "cannot continue a message that has tool_calls")
    if len(turns) < 2 or not turns[-2].is_user_side:
        raise invalid_argument(path, "only an answer to a user or tool message can be continued")
