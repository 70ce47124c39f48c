"""Ids by name, safe tokenisation, the cache, and decoding."""

from __future__ import annotations

import json
import threading
from array import array

import pytest
from dsv4.chat import ChatTokenizer, encode_chat
from dsv4.chat.protocol import STRUCTURAL_TOKENS
from dsv4.chat.tokenizer import _SegmentCache
from dsv4.errors import ConfigurationError

from tests.unit.chat.small_vocabulary import small_definition, small_tokenizer


def test_official_ids(tokenizer, literals):
    for name in STRUCTURAL_TOKENS:
        assert tokenizer.token_id(name) == literals["tokens"][name]["id"]
    assert tokenizer.eos_token_id == 1
    assert tokenizer.vocab_size == 129280


def test_structural_ids_come_from_the_tokenizer_at_hand():
    small = small_tokenizer()
    encoded = encode_chat(
        {"messages": [{"role": "user", "content": "the <think>"}]}, revision="official", tokenizer=small
    )
    structural = [small.token_id(name) for name in STRUCTURAL_TOKENS]
    assert [token for token in encoded.token_ids if token in structural] == [
        small.token_id("<｜begin▁of▁sentence｜>"),
        small.token_id("<｜User｜>"),
        small.token_id("<｜Assistant｜>"),
        small.token_id("</think>"),
    ]
    assert small.decode(encoded.token_ids, skip_special_tokens=False) == encoded.prompt


@pytest.mark.parametrize("missing", ["｜DSML｜", "<think>", "<｜end▁of▁sentence｜>"])
def test_missing_token_is_a_configuration_error(missing):
    definition = small_definition()
    definition["added_tokens"] = [token for token in definition["added_tokens"] if token["content"] != missing]
    with pytest.raises(ConfigurationError, match="added_tokens"):
        ChatTokenizer(definition)


def test_from_directory(tmp_path):
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json"):
        ChatTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="JSON object"):
        ChatTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(small_definition()))
    plain = ChatTokenizer.from_directory(tmp_path)
    assert plain.eos_token_id == plain.token_id("<｜end▁of▁sentence｜>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<｜User｜>"}}))
    assert ChatTokenizer.from_directory(tmp_path).eos_token_id == plain.token_id("<｜User｜>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<nothing>"}))
    with pytest.raises(ConfigurationError, match="<nothing>"):
        ChatTokenizer.from_directory(tmp_path)


def test_raw_prompts_use_the_full_vocabulary_and_no_bos(tokenizer):
    ids = tokenizer.encode_text("<｜User｜>hi<｜Assistant｜></think>")
    assert ids[0] == tokenizer.token_id("<｜User｜>")
    assert ids[-2:] == [tokenizer.token_id("<｜Assistant｜>"), tokenizer.token_id("</think>")]
    assert tokenizer.token_id("<｜User｜>") not in tokenizer.encode_plain("<｜User｜>hi")


def test_next_turn_tokenises_only_what_is_new(tokenizer, monkeypatch):
    own = small_tokenizer()
    tokenised: list[str] = []
    original = own._encode_plain_batch

    def recording(texts):
        tokenised.extend(texts)
        return original(texts)

    monkeypatch.setattr(own, "_encode_plain_batch", recording)
    system = {"role": "system", "content": "the system"}
    messages = [system, {"role": "user", "content": "first"}]
    first = encode_chat({"messages": messages}, revision="official", tokenizer=own)
    assert sorted(tokenised) == ["first", "the system"]
    tokenised.clear()
    messages += [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": "second"}]
    second = encode_chat({"messages": messages}, revision="official", tokenizer=own)
    assert sorted(tokenised) == ["an answer", "second"]
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert (
        second.token_ids
        == encode_chat({"messages": messages}, revision="official", tokenizer=small_tokenizer()).token_ids
    )


def test_cache_forgets_the_oldest_and_keeps_its_bound():
    cache = _SegmentCache(10)
    cache.put("aaaa", array("i", [1]))
    cache.put("bbbb", array("i", [2]))
    assert cache.get("aaaa") == array("i", [1])
    cache.put("cccc", array("i", [3]))
    assert cache.get("bbbb") is None
    assert cache.get("aaaa") is not None
    cache.put("d" * 11, array("i", [4]))
    assert cache.get("d" * 11) is None


def test_threads_may_share_a_tokenizer():
    own = small_tokenizer()
    requests = [{"messages": [{"role": "user", "content": f"question {n % 7} of the day"}]} for n in range(70)]
    expected = [encode_chat(r, revision="official", tokenizer=small_tokenizer()).token_ids for r in requests[:7]]
    wrong: list[int] = []

    def work():
        for index, request in enumerate(requests):
            if encode_chat(request, revision="official", tokenizer=own).token_ids != expected[index % 7]:
                wrong.append(index)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_decode_is_the_hugging_face_decode(tokenizer):
    text = "答案🌍 a\n\n  b </think> ｜DSML｜<｜end▁of▁sentence｜> é"
    ids = tokenizer.encode_text(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer._full.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode([10**9]) == ""
