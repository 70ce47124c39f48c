"""The literal strings of the DeepSeek V4 chat protocol. They are data: the model was trained on exactly these bytes."""

from __future__ import annotations

import enum
import re


class Revision(str, enum.Enum):
    """The two published revisions of the chat encoding. They differ only in the reasoning-effort texts."""

    PREVIEW = "preview"
    """April 2026: V4-Flash, V4-Pro, V4-Flash-DSpark."""
    OFFICIAL = "official"
    """0731: V4-Flash-0731, V4-Pro-0813."""


BEGIN_OF_SENTENCE = "<｜begin▁of▁sentence｜>"
END_OF_SENTENCE = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
THINK_START = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"

STRUCTURAL_TOKENS = (
    BEGIN_OF_SENTENCE,
    END_OF_SENTENCE,
    USER,
    ASSISTANT,
    LATEST_REMINDER,
    THINK_START,
    THINK_END,
    DSML,
)
"""Every token that the encoder writes as one id. A tokenizer without one of them cannot serve chat."""

STRUCTURAL_SPLITTER = re.compile("(" + "|".join(map(re.escape, STRUCTURAL_TOKENS)) + ")")

TOOL_CALLS_OPEN = f"<{DSML}tool_calls>"
TOOL_CALLS_CLOSE = f"</{DSML}tool_calls>"
INVOKE_CLOSE = f"</{DSML}invoke>"
PARAMETER_CLOSE = f"</{DSML}parameter>"
TOOL_RESULT_OPEN = "<tool_result>"
TOOL_RESULT_CLOSE = "</tool_result>"

TOOLS_BLOCK_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, \
arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK_START}), you MUST output your complete reasoning inside \
{THINK_START}...{THINK_END} BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_END} with tool calls or final response.

### Available Tool Schemas

"""

TOOLS_BLOCK_TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

RESPONSE_SCHEMA_HEAD = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"

RESPONSE_JSON_OBJECT = (
    "You are a helpful assistant designed to output JSON.\n## Response Format:\n\nReply with JSON object ONLY."
)

_EFFORT_ABSOLUTE_MAXIMUM = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)

_EFFORT_BEYOND_MAXIMUM = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose "
    "the problem into its most fundamental components, trace every causal chain to its root, and resolve the "
    "underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)

EFFORT_TEXTS: dict[Revision, dict[str, str]] = {
    Revision.PREVIEW: {"high": "", "max": _EFFORT_ABSOLUTE_MAXIMUM},
    Revision.OFFICIAL: {"low": "", "high": _EFFORT_ABSOLUTE_MAXIMUM, "max": _EFFORT_BEYOND_MAXIMUM},
}
"""Text between BOS and the first message in thinking mode, by revision and resolved effort."""
