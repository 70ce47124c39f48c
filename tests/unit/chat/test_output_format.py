"""The struct between the encode step and the engine."""

from __future__ import annotations

import json

import pytest
from dsv4.chat import OutputFormat
from dsv4.errors import RequestError


def test_round_trip():
    formats = [
        OutputFormat(),
        OutputFormat(start_state="reasoning", tools=("f", "g"), tool_choice="auto", parallel_tool_calls=False),
        OutputFormat("tool_block", ("f",), "named", "f", include_reasoning=False),
    ]
    for written in formats:
        assert OutputFormat.from_dict(json.loads(json.dumps(written.to_dict()))) == written
    assert OutputFormat.from_dict({}) == OutputFormat()
    assert OutputFormat.from_dict({"tools": None}) == OutputFormat()


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([], "output_format"),
        ({"start": "content"}, "output_format.start"),
        ({"start_state": "middle"}, "output_format.start_state"),
        ({"start_state": "tool_block"}, "output_format.start_state"),
        ({"tools": "f"}, "output_format.tools"),
        ({"tools": [1]}, "output_format.tools[0]"),
        ({"tool_choice": "auto"}, "output_format.tool_choice"),
        ({"tools": ["f"], "tool_choice": "named"}, "output_format.tool_name"),
        ({"tools": ["f"], "tool_choice": "named", "tool_name": "g"}, "output_format.tool_name"),
        ({"tools": ["f"], "tool_choice": "auto", "tool_name": "f"}, "output_format.tool_name"),
        ({"parallel_tool_calls": 1}, "output_format.parallel_tool_calls"),
        ({"include_reasoning": "no"}, "output_format.include_reasoning"),
        ({"type": "text"}, "output_format.type"),
    ],
)
def test_bad_fields_are_named(value, field):
    with pytest.raises(RequestError) as caught:
        OutputFormat.from_dict(value)
    assert caught.value.field == field
