"""Which pages of a partition hold which beginning of a sequence.

A page is 128 tokens. Its digest covers all tokens up to its end, so equal digests mean equal caches. The digest is
keyed with a secret of the process: nobody can construct two prompts whose pages are taken for each other.

To continue after page i a request needs the blocks of pages 0..i in the full-history groups, and of the ring groups
those that hold the positions right before the end of page i. The former are found by the page's digest, the latter by
its boundary key. With speculation the prediction layer's row of the last position of a page has consumed the first
token *after* the page, so the boundary key covers that token too.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dsv4.cache.groups import BLOCK_SIZE

PAGE_TOKENS = BLOCK_SIZE
DIGEST_BYTES = 16


class PageHasher:
    """Digests of pages under one secret."""

    def __init__(self, *, covers_next_token: bool) -> None:
        """`covers_next_token`: boundary keys cover the token after the page."""
        self._secret = secrets.token_bytes(32)
        self._covers_next_token = covers_next_token

    def extend(self, keys: PageKeys, token_ids: Sequence[int]) -> None:
        """Bring `keys` up to date with a sequence that has grown since the last call."""
        for page in range(len(keys.digests), len(token_ids) // PAGE_TOKENS):
            previous = keys.digests[page - 1] if page else b""
            tokens = np.array(token_ids[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS], dtype=np.int64)
            keys.digests.append(self._digest(previous + tokens.tobytes()))
        for page in range(len(keys.boundaries), len(keys.digests)):
            if not self._covers_next_token:
                keys.boundaries.append(keys.digests[page])
                continue
            following = (page + 1) * PAGE_TOKENS
            if following >= len(token_ids):
                return
            keys.boundaries.append(self._digest(keys.digests[page] + token_ids[following].to_bytes(8, "little")))

    def _digest(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self._secret).digest()


@dataclass
class PageKeys:
    """Of each complete page of a sequence: the digest, and the boundary key as far as it is known."""

    digests: list[bytes] = field(default_factory=list)
    boundaries: list[bytes] = field(default_factory=list)


Owner = tuple[str, bytes]
"""`full` or `boundary`, and the key of the entry that a block belongs to."""


class PrefixIndex:
    """The published pages of one partition: key -> one block per group of its kind.

    An entry goes as a whole when the first of its blocks is taken for something else.
    """

    def __init__(self, full_groups: Sequence[int], ring_groups: Sequence[int]) -> None:
        """`full_groups` and `ring_groups` are the indices of the groups whose blocks the entries name, in order."""
        self._groups = {"full": tuple(full_groups), "boundary": tuple(ring_groups)}
        self._entries: dict[str, dict[bytes, tuple[int, ...]]] = {"full": {}, "boundary": {}}
        self._owners: dict[tuple[int, int], Owner] = {}

    def blocks(self, kind: str, key: bytes) -> tuple[int, ...] | None:
        """The blocks of an entry, in the order of its groups."""
        return self._entries[kind].get(key)

    def is_published(self, group: int, block: int) -> bool:
        """Whether a block belongs to an entry."""
        return (group, block) in self._owners

    def publish(self, kind: str, key: bytes, blocks: Sequence[int]) -> None:
        """Add an entry. The first publisher of a key wins; blocks that belong to an entry keep it."""
        if key in self._entries[kind]:
            return
        slots = list(zip(self._groups[kind], blocks, strict=True))
        if any(slot in self._owners for slot in slots):
            return
        self._entries[kind][key] = tuple(blocks)
        for slot in slots:
            self._owners[slot] = (kind, key)

    def forget(self, group: int, block: int) -> None:
        """Remove the entry that a block belongs to, if any."""
        owner = self._owners.get((group, block))
        if owner is None:
            return
        kind, key = owner
        for slot in zip(self._groups[kind], self._entries[kind].pop(key), strict=True):
            del self._owners[slot]

    def longest(self, keys: PageKeys, max_tokens: int) -> int:
        """Most tokens, at most `max_tokens`, from which a sequence could continue; a multiple of 128."""
        pages = 0
        while (pages + 1) * PAGE_TOKENS <= max_tokens and pages < len(keys.digests):
            if keys.digests[pages] not in self._entries["full"]:
                break
            pages += 1
        while pages and (len(keys.boundaries) < pages or keys.boundaries[pages - 1] not in self._entries["boundary"]):
            pages -= 1
        return pages * PAGE_TOKENS
