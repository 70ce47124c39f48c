"""How an output is to be split: written by the encode step, read by the engine, plain JSON in between."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dsv4.chat.fields import (
    join_path,
    read_array,
    read_boolean,
    read_choice,
    read_object,
    read_string,
    refuse_unknown,
)
from dsv4.errors import invalid_argument

START_STATES = ("content", "reasoning", "tool_block")
CHOICE_MODES = ("none", "auto", "required", "named")


@dataclass(frozen=True)
class OutputFormat:
    """What ``ChatParser`` needs to know.

    ``start_state`` is where the prompt left the model. ``tools`` are the names the client declared; without any, tool
    markup is ordinary text. ``tool_choice`` ``none`` swallows calls. With ``parallel_tool_calls`` off only the first
    call is returned. ``include_reasoning`` off hides the reasoning, which still counts as tokens.
    """

    start_state: Literal["content", "reasoning", "tool_block"] = "content"
    tools: tuple[str, ...] = ()
    tool_choice: Literal["none", "auto", "required", "named"] = "none"
    tool_name: str | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    type: Literal["chat"] = "chat"

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that ``from_dict`` reads."""
        return {**asdict(self), "tools": list(self.tools)}

    @classmethod
    def from_dict(cls, value: Any, path: str = "output_format") -> OutputFormat:
        """Validate and read; missing fields have their defaults. Raises INVALID_ARGUMENT naming the field."""
        entry = read_object(value, path)
        refuse_unknown(entry, path, cls.__dataclass_fields__)
        default = cls()

        def given(name: str) -> Any:
            return getattr(default, name) if entry.get(name) is None else entry[name]

        read_choice(given("type"), join_path(path, "type"), ("chat",))
        tools_path = join_path(path, "tools")
        tools = tuple(
            read_string(name, f"{tools_path}[{index}]")
            for index, name in enumerate(read_array(given("tools"), tools_path))
        )
        start_state = read_choice(given("start_state"), join_path(path, "start_state"), START_STATES)
        tool_choice = read_choice(given("tool_choice"), join_path(path, "tool_choice"), CHOICE_MODES)
        tool_name = given("tool_name")
        name_path = join_path(path, "tool_name")
        if (tool_choice == "named") != (tool_name is not None):
            raise invalid_argument(name_path, "must be set exactly when tool_choice is 'named'")
        if tool_name is not None and read_string(tool_name, name_path) not in tools:
            raise invalid_argument(name_path, f"{tool_name!r} is not among the tools")
        if not tools and tool_choice != "none":
            raise invalid_argument(join_path(path, "tool_choice"), "must be 'none' without tools")
        if start_state == "tool_block" and tool_choice not in ("required", "named"):
            raise invalid_argument(join_path(path, "start_state"), "'tool_block' needs a demanded call")
        return cls(
            start_state=start_state,  # type: ignore[arg-type]
            tools=tools,
            tool_choice=tool_choice,  # type: ignore[arg-type]
            tool_name=tool_name,
            parallel_tool_calls=read_boolean(given("parallel_tool_calls"), join_path(path, "parallel_tool_calls")),
            include_reasoning=read_boolean(given("include_reasoning"), join_path(path, "include_reasoning")),
        )
