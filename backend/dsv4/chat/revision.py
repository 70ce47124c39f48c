"""Which revision of the chat encoding a checkpoint wants, decided from its files read as data."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from dsv4.chat.protocol import Revision
from dsv4.errors import ConfigurationError

PROFILE_KEY = "dsv4_reasoning_effort_profile"
"""config.json key that states the revision; the only mark that survives a conversion."""

MAX_ENCODING_FILE_BYTES = 1 << 20


def detect_revision(config: Mapping[str, Any], encoding_source: str | None = None) -> Revision:
    """Return the revision of a checkpoint.

    ``config`` is the parsed config.json. ``encoding_source`` is the text of the checkpoint's
    ``encoding/encoding_dsv4.py`` if it ships one; it is parsed, never executed. The key in config.json wins.
    Without either mark the checkpoint is taken for the preview revision.

    Raises ConfigurationError if the key holds anything but ``preview`` or ``official``.
    """
    profile = config.get(PROFILE_KEY)
    if profile is not None:
        try:
            return Revision(profile)
        except ValueError:
            raise ConfigurationError(
                f"config.json: {PROFILE_KEY} must be 'preview' or 'official', not {profile!r}"
            ) from None
    if encoding_source is None or len(encoding_source.encode("utf-8", "replace")) > MAX_ENCODING_FILE_BYTES:
        return Revision.PREVIEW
    return _revision_of_source(encoding_source)


def _revision_of_source(source: str) -> Revision:
    constants = _module_constants(source)
    prompts = constants.get("REASONING_EFFORT_PROMPTS")
    if (
        constants.get("DEFAULT_REASONING_EFFORT") == "low"
        and isinstance(prompts, set)
        and {"low", "high", "max"} <= prompts
    ):
        return Revision.OFFICIAL
    return Revision.PREVIEW


def _module_constants(source: str) -> dict[str, Any]:
    """Map each module-level name to its string value, or to the set of string keys of its dict literal."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    constants: dict[str, Any] = {}
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if isinstance(value, ast.Constant):
            constants.update(dict.fromkeys(names, value.value))
        elif isinstance(value, ast.Dict):
            keys = {key.value for key in value.keys if isinstance(key, ast.Constant)}
            constants.update(dict.fromkeys(names, keys))
    return constants
