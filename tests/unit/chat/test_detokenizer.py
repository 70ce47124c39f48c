"""Incremental text equals the whole, and stop strings cut at the right token in steps of any size."""

from __future__ import annotations

import random

import pytest
from dsv4.chat import IncrementalDetokenizer, OutputStream, StopMatcher
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.replay_vectors import default_tokenizer

TOKENIZER = default_tokenizer()
TRICKY = "a b🌍🧑‍🚀é中文 the\n\n\t</think>｜DSML｜<｜User｜><｜end▁of▁sentence｜>𠮷ไทย ﷽ العربية"


def cut(ids, rng):
    start = 0
    while start < len(ids):
        size = rng.randint(1, 4)
        yield ids[start : start + size]
        start += size


@given(st.text(max_size=40) | st.text(TRICKY, max_size=40), st.integers())
@settings(max_examples=150, deadline=None)
def test_text_round_trip(text, seed):
    ids = TOKENIZER.encode_plain(text)
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    pieces = [detokenizer.push(step) for step in cut(ids, random.Random(seed))]
    assert "".join(pieces) + detokenizer.finish() == text


@given(st.lists(st.integers(0, 129_400) | st.integers(3, 300), max_size=25), st.booleans(), st.integers())
@settings(max_examples=300, deadline=None)
def test_any_ids_equal_the_full_decode(ids, skip, seed):
    """Random ids make broken UTF-8: it reads as in Hugging Face, except that a cut-off end is dropped."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip_special_tokens=skip)
    text = "".join(detokenizer.push(step) for step in cut(ids, random.Random(seed))) + detokenizer.finish()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)
    reference = TOKENIZER._full.decode(ids, skip_special_tokens=skip)
    assert text == reference or (reference.endswith("\ufffd") and text == reference[:-1])


def test_nothing_incomplete_is_published():
    ids = TOKENIZER.encode_plain("🧑‍🚀")
    assert len(ids) > 2
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    for count, token in enumerate(ids, 1):
        published = detokenizer.push([token])
        assert "\ufffd" not in published
        assert TOKENIZER.decode(ids[:count]).endswith(published)


def reference_stop(text, stops):
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@given(
    st.text("abc", max_size=25),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(),
)
@settings(max_examples=500, deadline=None)
def test_stop_matcher_against_a_plain_search(text, stops, seed):
    matcher = StopMatcher(stops)
    seen = ""
    for piece in cut(text, random.Random(seed)):
        found = matcher.advance(piece)
        if found is not None:
            assert (len(seen) + found[0], found[1]) == reference_stop(text, stops)
            return
        seen += piece
        longest = max(
            n for n in range(len(seen) + 1) if n == 0 or any(len(s) > n and s.startswith(seen[-n:]) for s in stops)
        )
        assert matcher.held == longest
    assert reference_stop(text, stops) is None


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def run(ids, stops, size, **options):
    stream = OutputStream(TOKENIZER, stops, **options)
    text, count = "", 0
    for start in range(0, len(ids), size):
        step = stream.push(ids[start : start + size])
        text += step.text
        count += step.token_count
        if step.stop is not None:
            assert stream.push([5]).token_count == 0
            return text, count, step.stop
    return text + "".join(stream.finish()), count, None


PARTS = ["a", "b", "🌍", "\n", "中", " the", "stop", "st"]
STOPS = ["ab", "stop", "🌍", "a🌍", "\n中", " the the", "bb", "pst", "e", "\n\n"]


@given(st.lists(st.sampled_from(PARTS), max_size=15), st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_stop_inside_multi_token_steps(parts, stops):
    ids = TOKENIZER.encode_plain("".join(parts))
    whole = TOKENIZER.decode(ids)
    alone = run(ids, stops, 1)
    for size in (2, 3, 4, 100):
        assert run(ids, stops, size) == alone
    text, count, stop = alone
    expected = reference_stop(whole, stops)
    if expected is None:
        assert (text, count, stop) == (whole, len(ids), None)
    else:
        end, found = expected
        assert stop == found
        assert text == whole[: end - len(found)]
        assert len(TOKENIZER.decode(ids[:count])) >= end > len(TOKENIZER.decode(ids[: count - 1]))
        included = run(ids, stops, 2, include_stop=True)
        assert included == (whole[:end], count, found)


def test_hold_back_is_released_at_once():
    stream = OutputStream(TOKENIZER, ["</end>"])
    published = [stream.push(TOKENIZER.encode_plain(piece)).text for piece in ("a", "<", "/", "x")]
    assert published == ["a", "", "", "</x"]
