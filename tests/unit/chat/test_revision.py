"""Telling the revision from a checkpoint's files, read as data."""

from __future__ import annotations

import pytest
from dsv4.chat import Revision, detect_revision
from dsv4.errors import ConfigurationError

OFFICIAL = """
DEFAULT_REASONING_EFFORT = "low"
REASONING_EFFORT_PROMPTS: dict = {"low": "", "high": "H", "max": "M"}
def encode_messages(messages): ...
"""
PREVIEW = 'REASONING_EFFORT_MAX = "text"\nraise SystemExit("this file must not be executed")\n'


@pytest.mark.parametrize(
    ("config", "source", "revision"),
    [
        ({}, None, Revision.PREVIEW),
        ({}, OFFICIAL, Revision.OFFICIAL),
        ({}, PREVIEW, Revision.PREVIEW),
        ({"dsv4_reasoning_effort_profile": "preview"}, OFFICIAL, Revision.PREVIEW),
        ({"dsv4_reasoning_effort_profile": "official"}, PREVIEW, Revision.OFFICIAL),
        ({"dsv4_reasoning_effort_profile": None}, OFFICIAL, Revision.OFFICIAL),
        ({}, "not python (", Revision.PREVIEW),
        ({}, "(" * 20_000, Revision.PREVIEW),
        ({}, "a = 1\0", Revision.PREVIEW),
        ({}, OFFICIAL + "#" * (1 << 20), Revision.PREVIEW),
        ({}, OFFICIAL.replace('"low"\n', '"high"\n'), Revision.PREVIEW),
        ({}, OFFICIAL.replace(', "max": "M"', ""), Revision.PREVIEW),
        ({"dspark_block_size": 5}, None, Revision.PREVIEW),
    ],
)
def test_detection(config, source, revision):
    assert detect_revision(config, source) is revision


def test_unknown_profile_names_the_key():
    with pytest.raises(ConfigurationError, match="dsv4_reasoning_effort_profile"):
        detect_revision({"dsv4_reasoning_effort_profile": "0731"})
