"""Recognising the tags of the tool-call markup in output text, complete or cut anywhere.

Inside this package control tokens of an output are single sentinel characters. Unpaired surrogates serve: no text
decoded from UTF-8 contains one, so a sentinel cannot be confused with text that spells the same token.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from dsv4.chat.protocol import DSML, THINK_END, THINK_START

DSML_MARK = "\ud800"
THINK_START_MARK = "\ud801"
THINK_END_MARK = "\ud802"

SENTINEL_SPELLING = {DSML_MARK: DSML, THINK_START_MARK: THINK_START, THINK_END_MARK: THINK_END}
_SENTINELS = re.compile(f"[{DSML_MARK}-{THINK_END_MARK}]")

MAX_NAME_LENGTH = 4096
"""Longest name of a function or parameter that is read; a longer one makes the tag malformed."""

PARAMETER_CLOSE_TAG = f"</{DSML_MARK}parameter>"

_BLOCK_NAMES = ("tool_calls", "toolcalls", "function_calls")
_TAG_START = re.compile(f"<(/?){DSML_MARK}([A-Za-z_]{{0,32}})")
_TAG_END = re.compile(r"\s{0,64}>")
_BLANK = re.compile(r"\s{0,64}")
_NAME = f'[^"<>]{{0,{MAX_NAME_LENGTH}}}'
_INVOKE_HEADER = re.compile(rf'\s{{1,64}}name="({_NAME})"\s{{0,64}}(/?)>')
_PARAMETER_HEADER = re.compile(
    rf'\s{{1,64}}(?:name="(?P<key>{_NAME})"\s{{1,64}}string="(?P<string>true|false)"'
    rf'|string="(?P<string_first>true|false)"\s{{1,64}}name="(?P<key_last>{_NAME})")\s{{0,64}}>'
)


def _prefix_pattern(*atoms: str) -> str:
    """A pattern for every prefix of the concatenated atoms, each of them a pattern of its own."""
    pattern = ""
    for atom in reversed(atoms):
        pattern = f"(?:{atom}{pattern})?"
    return pattern


def _attribute(name: str, value: str) -> list[str]:
    return [*map(re.escape, f'{name}="'), *([value] if value == _NAME else value), '"']


_INVOKE_HEADER_PREFIX = re.compile(_prefix_pattern(r"\s{1,64}", *_attribute("name", _NAME), r"\s{0,64}", "/?", ">"))
_PARAMETER_HEADER_PREFIX = re.compile(
    "|".join(
        _prefix_pattern(r"\s{1,64}", *first, r"\s{1,64}", *second, r"\s{0,64}", ">")
        for truth in ("true", "false")
        for first, second in (
            (_attribute("name", _NAME), _attribute("string", truth)),
            (_attribute("string", truth), _attribute("name", _NAME)),
        )
    )
)


class TagKind(enum.Enum):
    """``PARTIAL`` needs more text, ``MALFORMED`` is a call's tag that cannot be read, ``UNKNOWN`` any other tag."""

    BLOCK_OPEN = enum.auto()
    BLOCK_CLOSE = enum.auto()
    INVOKE_OPEN = enum.auto()
    INVOKE_CLOSE = enum.auto()
    PARAMETER_OPEN = enum.auto()
    PARAMETER_CLOSE = enum.auto()
    UNKNOWN = enum.auto()
    MALFORMED = enum.auto()
    PARTIAL = enum.auto()


@dataclass(frozen=True)
class Tag:
    """A tag at the start of a text. ``length`` is what it occupies, ``name`` its name attribute."""

    kind: TagKind
    length: int = 0
    name: str = ""
    is_string: bool = False
    self_closing: bool = False


_PARTIAL = Tag(TagKind.PARTIAL)


def spell(text: str) -> str:
    """Text with its control tokens spelled out."""
    if text.isascii() or not _SENTINELS.search(text):
        return text
    return _SENTINELS.sub(lambda match: SENTINEL_SPELLING[match[0]], text)


def read_tag(text: str) -> Tag:
    """Read the tag at the start of ``text``, which begins with ``<`` or ``</`` and the DSML token."""
    start = _TAG_START.match(text)
    assert start is not None
    if start.end() == len(text) and len(start[2]) < 32:
        return _PARTIAL
    closing, name, end = bool(start[1]), start[2], start.end()
    if name in _BLOCK_NAMES:
        return _read_plain_tag(text, end, TagKind.BLOCK_CLOSE if closing else TagKind.BLOCK_OPEN)
    if closing and name == "invoke":
        return _read_plain_tag(text, end, TagKind.INVOKE_CLOSE)
    if closing and name == "parameter":
        return _read_plain_tag(text, end, TagKind.PARAMETER_CLOSE)
    if name == "invoke":
        return _read_invoke_header(text, end)
    if name == "parameter":
        return read_parameter_header(text, end)
    return Tag(TagKind.UNKNOWN, end + text.startswith(">", end))


def _read_plain_tag(text: str, end: int, kind: TagKind) -> Tag:
    match = _TAG_END.match(text, end)
    if match:
        return Tag(kind, match.end())
    return _PARTIAL if _BLANK.fullmatch(text, end) else Tag(TagKind.UNKNOWN, end)


def _read_invoke_header(text: str, end: int) -> Tag:
    match = _INVOKE_HEADER.match(text, end)
    if match:
        return Tag(TagKind.INVOKE_OPEN, match.end(), spell(match[1]), self_closing=bool(match[2]))
    return _PARTIAL if _INVOKE_HEADER_PREFIX.fullmatch(text, end) else Tag(TagKind.MALFORMED, end)


def read_parameter_header(text: str, end: int) -> Tag:
    """Read the rest of a parameter's opening tag, whose name ends at ``end``."""
    match = _PARAMETER_HEADER.match(text, end)
    if match:
        key = match["key"] if match["key"] is not None else match["key_last"]
        is_string = (match["string"] or match["string_first"]) == "true"
        return Tag(TagKind.PARAMETER_OPEN, match.end(), spell(key), is_string)
    return _PARTIAL if _PARAMETER_HEADER_PREFIX.fullmatch(text, end) else Tag(TagKind.MALFORMED, end)
