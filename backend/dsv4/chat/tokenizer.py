"""The checkpoint's tokenizer as chat needs it: control tokens only where the encoder puts them."""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dsv4.chat.prompt import Prompt
from dsv4.chat.protocol import END_OF_SENTENCE, STRUCTURAL_TOKENS
from dsv4.errors import ConfigurationError

DEFAULT_CACHE_CHARACTERS = 32_000_000
"""Text kept with its ids; at four characters a token about 8 million tokens, 64 to 160 MB when full."""

PARALLEL_CHARACTERS = 8_000
"""Text from which on a prompt is tokenised by several threads."""


class ChatTokenizer:
    """Two views of one tokenizer.json: with the added vocabulary for raw prompts, without it for user text.

    Ids of control tokens are looked up by name, so any checkpoint's vocabulary works. Text that was encoded before is
    remembered, so the next turn of a conversation tokenises only what is new. Safe to share between threads.
    """

    def __init__(
        self,
        definition: dict[str, Any],
        *,
        eos_token: str = END_OF_SENTENCE,
        cache_characters: int = DEFAULT_CACHE_CHARACTERS,
    ) -> None:
        """``definition`` is the parsed tokenizer.json; it must describe a byte-level BPE.

        Raises ConfigurationError when a token of the chat protocol is missing.
        """
        self._full = Tokenizer.from_str(json.dumps(definition))
        self._full.no_truncation()
        self._full.no_padding()
        self._plain = Tokenizer.from_str(json.dumps({**definition, "added_tokens": []}))
        self._plain.no_truncation()
        self._plain.no_padding()
        added: list[dict[str, Any]] = definition.get("added_tokens") or []
        self._added_ids = {str(token["content"]): int(token["id"]) for token in added}
        self._special_ids = frozenset(int(token["id"]) for token in added if token.get("special"))
        missing = [name for name in (*STRUCTURAL_TOKENS, eos_token) if name not in self._added_ids]
        if missing:
            raise ConfigurationError(f"tokenizer.json: added_tokens lacks {', '.join(map(repr, missing))}")
        self._eos_token_id = self._added_ids[eos_token]
        self._structural_ids = {name: self._added_ids[name] for name in STRUCTURAL_TOKENS}
        self._token_bytes: dict[int, bytes] = {}
        self._cache = _SegmentCache(cache_characters)

    @classmethod
    def from_directory(cls, path: str | Path, *, cache_characters: int = DEFAULT_CACHE_CHARACTERS) -> ChatTokenizer:
        """Load tokenizer.json and, for the name of the EOS token, tokenizer_config.json from a checkpoint.

        Raises ConfigurationError for a missing or unreadable file.
        """
        directory = Path(path)
        definition = _read_json(directory / "tokenizer.json")
        config_file = directory / "tokenizer_config.json"
        eos: Any = _read_json(config_file).get("eos_token") if config_file.exists() else None
        if isinstance(eos, dict):
            eos = eos.get("content")
        return cls(definition, eos_token=eos or END_OF_SENTENCE, cache_characters=cache_characters)

    @property
    def eos_token_id(self) -> int:
        """Id that ends an answer."""
        return self._eos_token_id

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._full.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the added tokens flagged special: the ones that ``skip_special_tokens`` removes."""
        return self._special_ids

    def token_id(self, name: str) -> int:
        """Id of an added token. Raises KeyError when the tokenizer has none of this name."""
        return self._added_ids[name]

    def encode_text(self, text: str) -> list[int]:
        """Ids of a raw prompt: added tokens spelled in it count, no BOS is added."""
        return self._full.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which no spelled token is a control token."""
        return self._encode_plain_batch([text])[0].tolist()

    def encode_prompt(self, prompt: Prompt) -> array[int]:
        """Int32 ids of a rendered prompt. Text segments seen before come from the cache."""
        known = [self._cache.get(text) if text else _NO_IDS for text in prompt.texts]
        fresh = [index for index, ids in enumerate(known) if ids is None]
        if fresh:
            texts = list(dict.fromkeys(prompt.texts[index] for index in fresh))
            encoded = dict(zip(texts, self._encode_plain_batch(texts), strict=True))
            for text, ids in encoded.items():
                self._cache.put(text, ids)
            for index in fresh:
                known[index] = encoded[prompt.texts[index]]
        ids = array("i", known[0] or ())
        for token, segment in zip(prompt.tokens, known[1:], strict=True):
            ids.append(self._structural_ids[token])
            ids.extend(segment or ())
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids, as the Hugging Face tokenizer decodes them; an incomplete last character is dropped."""
        data = b"".join(
            self.token_bytes(token) for token in token_ids if not (skip_special_tokens and token in self._special_ids)
        )
        return data[: _complete_length(data)].decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for; empty for an id outside the vocabulary."""
        data = self._token_bytes.get(token_id)
        if data is None:
            data = self._token_bytes[token_id] = _bytes_of_piece(self._full.id_to_token(token_id) or "")
        return data

    def _encode_plain_batch(self, texts: list[str]) -> list[array[int]]:
        # Waking the thread pool costs more than a short conversation does.
        if sum(map(len, texts)) < PARALLEL_CHARACTERS:
            return [array("i", self._plain.encode(text, add_special_tokens=False).ids) for text in texts]
        encodings = self._plain.encode_batch_fast(texts, add_special_tokens=False)
        return [array("i", encoding.ids) for encoding in encodings]


_NO_IDS = array("i")


class _SegmentCache:
    """Least recently used map from text to ids, bounded by the characters of its keys."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._size = 0
        self._entries: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str) -> array[int] | None:
        with self._lock:
            ids = self._entries.get(text)
            if ids is not None:
                self._entries.move_to_end(text)
            return ids

    def put(self, text: str, ids: array[int]) -> None:
        if len(text) > self._capacity:
            return
        with self._lock:
            if text not in self._entries:
                self._size += len(text)
            self._entries[text] = ids
            while self._size > self._capacity:
                evicted, _ = self._entries.popitem(last=False)
                self._size -= len(evicted)


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


def _bytes_of_piece(piece: str) -> bytes:
    """A piece with any character outside the byte table is text (an added token), as in the ByteLevel decoder."""
    try:
        return bytes(map(_BYTE_OF_CHARACTER.__getitem__, piece))
    except KeyError:
        return piece.encode("utf-8", "replace")


def _complete_length(data: bytes) -> int:
    """Length without the start of a UTF-8 character that the end of ``data`` cuts off."""
    for size in range(1, min(3, len(data)) + 1):
        byte = data[-size]
        if byte & 0xC0 == 0x80:
            continue
        needed = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 1
        if needed <= size:
            return len(data)
        # Only a tail that further bytes could complete is incomplete; b"\xf5" or b"\xe0\x80" never is.
        try:
            data[-size:].decode("utf-8")
        except UnicodeDecodeError as error:
            return len(data) - size if error.reason == "unexpected end of data" else len(data)
    return len(data)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"{path.name} is missing in the model directory") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path.name} must hold a JSON object")
    return value
