"""From a chat request to the prompt of the model."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from dsv4.chat.fields import Json, read_boolean
from dsv4.chat.messages import read_messages
from dsv4.chat.prompt import Prompt, StartState, SystemAdditions, check_last_turn, render_prompt
from dsv4.chat.protocol import Revision
from dsv4.chat.response_format import ResponseFormat, read_response_format
from dsv4.chat.thinking import Thinking, resolve_thinking
from dsv4.chat.tools import Tool, ToolChoice, read_tool_choice, read_tools
from dsv4.errors import ConfigurationError, invalid_argument


class PromptTokenizer(Protocol):
    """What encoding needs of a tokenizer; ``dsv4.chat.tokenizer.ChatTokenizer`` is the one."""

    def encode_prompt(self, prompt: Prompt) -> array[int]:
        """Ids of a prompt: structural tokens by name, the text between them without the added vocabulary."""


@dataclass(frozen=True)
class EncodedChat:
    """A rendered request.

    ``token_array`` holds int32 ids, None when no tokenizer was given. ``start_state`` is where the output starts:
    the last think token of the prompt decides, so encoder and parser cannot disagree.
    """

    segments: Prompt
    token_array: array[int] | None
    thinking: Thinking
    start_state: StartState
    tools: tuple[Tool, ...]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    include_reasoning: bool
    response_format: ResponseFormat

    @cached_property
    def prompt(self) -> str:
        """The prompt's text. Structural tokens and look-alikes in user text read the same here; the ids differ."""
        return self.segments.render()

    @property
    def structural_spans(self) -> list[tuple[int, int]]:
        """Character ranges of ``prompt`` that are control tokens."""
        return self.segments.structural_spans()

    @property
    def token_ids(self) -> list[int]:
        """The prompt's ids. Raises ValueError when the chat was encoded without a tokenizer."""
        if self.token_array is None:
            raise ValueError("encode_chat was called without a tokenizer")
        return self.token_array.tolist()

    @property
    def thinking_mode(self) -> str:
        """``thinking`` or ``chat``."""
        return "thinking" if self.thinking.enabled else "chat"

    @property
    def reasoning_effort(self) -> str | None:
        """The effort after mapping to the levels of the revision; None in chat mode."""
        return self.thinking.effort

    @property
    def drop_thinking(self) -> bool:
        """Whether the reasoning of earlier turns is left out."""
        return self.thinking.drop_history


def encode_chat(request: Mapping[str, Json], *, revision: str, tokenizer: PromptTokenizer | None = None) -> EncodedChat:
    """Render an OpenAI chat request as a DeepSeek V4 prompt.

    Reads ``messages``, ``tools``, ``tool_choice``, ``parallel_tool_calls``, ``response_format``,
    ``reasoning_effort``, ``thinking``, ``chat_template_kwargs``, ``continue_final_message`` and
    ``include_reasoning``; every other field is left to the caller. ``revision`` is ``preview`` or ``official``.

    Raises RequestError INVALID_ARGUMENT naming the JSON path at fault, ConfigurationError for an unknown revision.
    """
    body = dict(request)
    known_revision = _read_revision(revision)
    tools = read_tools(body.get("tools"))
    choice = read_tool_choice(body.get("tool_choice"), tools)
    parallel = _read_flag(body, "parallel_tool_calls", True)
    include_reasoning = _read_flag(body, "include_reasoning", True)
    response_format = read_response_format(body.get("response_format"))
    listed = [] if choice.mode == "none" else [tool for tool in tools if choice.name in (None, tool.name)]
    thinking = resolve_thinking(body, known_revision, has_tools=bool(listed))

    turns = read_messages(body.get("messages"))
    continue_final = turns[-1].prefix or _read_continuation(body)
    check_last_turn(turns, continue_final, len(body["messages"]))
    if continue_final and choice.demands_call:
        raise invalid_argument("tool_choice", "cannot demand a call while the last message is continued")

    prompt, start_state = render_prompt(
        turns,
        thinking=thinking,
        additions=SystemAdditions([tool.schema_line for tool in listed], response_format.prompt_block),
        continue_final=continue_final,
        open_tool_block=choice.demands_call and not thinking.enabled,
    )
    return EncodedChat(
        segments=prompt,
        token_array=None if tokenizer is None else tokenizer.encode_prompt(prompt),
        thinking=thinking,
        start_state=start_state,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        include_reasoning=include_reasoning,
        response_format=response_format,
    )


def _read_revision(revision: str) -> Revision:
    try:
        return Revision(revision)
    except ValueError:
        raise ConfigurationError(f"chat revision must be 'preview' or 'official', not {revision!r}") from None


def _read_flag(body: Mapping[str, Json], name: str, default: bool) -> bool:
    return default if body.get(name) is None else read_boolean(body[name], name)


def _read_continuation(body: Mapping[str, Json]) -> bool:
    """``continue_final_message``, and vLLM's ``add_generation_prompt``, which must say the opposite."""
    continued = _read_flag(body, "continue_final_message", False)
    if _read_flag(body, "add_generation_prompt", not continued) == continued:
        raise invalid_argument("add_generation_prompt", "must be the opposite of continue_final_message")
    return continued
