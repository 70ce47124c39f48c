"""Whether a request thinks, and how hard."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4.chat.fields import Json, join_path, read_boolean, read_choice, read_object, refuse_unknown
from dsv4.chat.protocol import EFFORT_TEXTS, Revision
from dsv4.errors import invalid_argument

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# The preview revision knows one level below max; the official one three.
_RESOLVED_EFFORT = {
    Revision.PREVIEW: {
        "minimal": "high",
        "low": "high",
        "medium": "high",
        "high": "high",
        "xhigh": "max",
        "max": "max",
    },
    Revision.OFFICIAL: {
        "minimal": "low",
        "low": "low",
        "medium": "high",
        "high": "high",
        "xhigh": "high",
        "max": "max",
    },
}

DEFAULT_EFFORT = "high"
"""Effort of a request that turns thinking on without naming one."""


@dataclass(frozen=True)
class Thinking:
    """``effort`` is the resolved level, None in chat mode. ``drop_history`` removes reasoning before the last turn."""

    enabled: bool
    effort: str | None
    effort_text: str
    drop_history: bool


def resolve_thinking(request: dict[str, Json], revision: Revision, *, has_tools: bool) -> Thinking:
    """Apply the switches of a request.

    Chat is the default; an effort above ``none`` turns thinking on; an explicit switch
    (``chat_template_kwargs.enable_thinking``, then ``chat_template_kwargs.thinking``, then ``thinking.type``)
    wins over the effort. With tools in the prompt the reasoning of earlier turns stays in it, too.
    """
    kwargs = _read_template_kwargs(request.get("chat_template_kwargs"))
    requested = _read_effort(request.get("reasoning_effort"), "reasoning_effort")
    if requested is None:
        requested = _read_effort(kwargs.get("reasoning_effort"), "chat_template_kwargs.reasoning_effort")
    switch = _read_switch(kwargs, request.get("thinking"))
    enabled = switch if switch is not None else requested not in (None, "none")
    drop_history = kwargs.get("drop_thinking")
    drop_history = not has_tools and (drop_history is None or drop_history)
    if not enabled:
        return Thinking(False, None, "", drop_history)
    if requested in (None, "none"):
        requested = DEFAULT_EFFORT
    effort = _RESOLVED_EFFORT[revision][requested]
    return Thinking(True, effort, EFFORT_TEXTS[revision][effort], drop_history)


def _read_effort(value: Json, path: str) -> str | None:
    return None if value is None else read_choice(value, path, REASONING_EFFORTS)


def _read_template_kwargs(value: Json) -> dict[str, Json]:
    if value is None:
        return {}
    path = "chat_template_kwargs"
    kwargs = read_object(value, path)
    if "tools" in kwargs:
        raise invalid_argument(join_path(path, "tools"), "declare tools in the request's tools field")
    refuse_unknown(kwargs, path, ("enable_thinking", "thinking", "drop_thinking", "reasoning_effort"))
    for name in ("enable_thinking", "thinking", "drop_thinking"):
        if kwargs.get(name) is not None:
            read_boolean(kwargs[name], join_path(path, name))
    return kwargs


def _read_switch(kwargs: dict[str, Json], thinking: Json) -> bool | None:
    type_switch: bool | None = None
    if thinking is not None:
        entry = read_object(thinking, "thinking")
        refuse_unknown(entry, "thinking", ("type",))
        kind = read_choice(entry.get("type"), "thinking.type", ("enabled", "disabled"))
        type_switch = kind == "enabled"
    for name in ("enable_thinking", "thinking"):
        if kwargs.get(name) is not None:
            return bool(kwargs[name])
    return type_switch
