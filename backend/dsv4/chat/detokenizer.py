"""From token ids to text, step by step: UTF-8 characters, control tokens and stop strings across step borders."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from dsv4.chat.stop_strings import StopMatcher
from dsv4.chat.tokenizer import ChatTokenizer


class IncrementalDetokenizer:
    """Text of a growing list of ids; what ``push`` and ``finish`` return, joined, is ``tokenizer.decode(all ids)``.

    A character is published when its last byte has arrived. The start of a character that never completes is dropped
    at the end of the stream. Constant work per token.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that these ids complete."""
        skipped, token_bytes = self._skipped, self._token_bytes
        return self._decoder.decode(b"".join([token_bytes(token) for token in token_ids if token not in skipped]))

    def push_one(self, token_id: int) -> str:
        """``push`` of a single id."""
        return "" if token_id in self._skipped else self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """Before a control token: an unfinished character can no longer complete and becomes U+FFFD."""
        return self._decoder.decode(b"", True)

    def finish(self) -> str:
        """End of the stream. An unfinished character is dropped, so this is always empty."""
        self._decoder.reset()
        return ""


class OutputStep(NamedTuple):
    """What one engine step adds to an output.

    ``pieces`` are text and control tokens (their sentinel) that are final. ``token_count`` of the step's tokens belong
    to the output: all of them, or up to and including the one that completed ``stop``.
    """

    pieces: Sequence[str]
    token_count: int
    stop: str | None = None

    @property
    def text(self) -> str:
        """The pieces joined; without sentinels this is the text of the step."""
        return "".join(self.pieces)


class OutputStream:
    """Detokenises and looks for stop strings token by token, so that a stop inside a multi-token step cuts there.

    ``sentinels`` maps control token ids to the piece that stands for them, and ``spelling`` gives the text that such a
    piece has for the stop strings. Without sentinels the pieces are the plain text of a completion.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stop_strings: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        sentinels: Mapping[int, str] | None = None,
        spelling: Mapping[str, str] | None = None,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop_strings) if stop_strings else None
        self._include_stop = include_stop
        self._sentinels = sentinels or {}
        self._spelling = spelling or {}
        self._held: list[str] = []
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> OutputStep:
        """Add the ids of a step. After a stop string was found nothing more is accepted."""
        if self._stopped:
            return OutputStep((), 0)
        released: list[str] = []
        for position, token in enumerate(token_ids):
            for piece in self._pieces_of(token):
                if self._matcher is None:
                    released.append(piece)
                    continue
                stop = self._scan(piece, released)
                if stop is not None:
                    self._stopped = True
                    return OutputStep(released, position + 1, stop)
        return OutputStep(released, len(token_ids))

    def finish(self) -> Sequence[str]:
        """End of the stream: what was held as the possible start of a stop string."""
        self._detokenizer.finish()
        held, self._held = self._held, []
        return held

    def _pieces_of(self, token: int) -> Sequence[str]:
        sentinel = self._sentinels.get(token)
        if sentinel is None:
            text = self._detokenizer.push_one(token)
            return (text,) if text else ()
        text = self._detokenizer.flush()
        return (text, sentinel) if text else (sentinel,)

    def _scan(self, piece: str, released: list[str]) -> str | None:
        """Move what is safe from the held pieces to ``released``; return the stop string once one is complete."""
        assert self._matcher is not None
        spelled = self._spelling.get(piece, piece)
        found = self._matcher.advance(spelled)
        if found is None:
            self._held.append(piece)
            self._release(self._matcher.held, released)
            return None
        end, stop = found
        if spelled is piece:
            piece = piece[:end]
            self._held.append(piece)
        elif end == len(spelled):
            self._held.append(piece)
        else:
            # The stop string ends inside a control token; its characters up to there are cut off or plain text.
            self._held.append(spelled[:end])
        self._release(0 if self._include_stop else len(stop), released)
        self._held = []
        return stop

    def _release(self, keep: int, released: list[str]) -> None:
        """Release all but the last ``keep`` characters. A control token is released whole or not at all."""
        held = self._held
        split = len(held)
        while split and keep > 0:
            split -= 1
            keep -= len(self._spelling.get(held[split], held[split]))
        if keep < 0 and held[split] not in self._spelling:
            cut = -keep
            released += held[:split]
            released.append(held[split][:cut])
            held[: split + 1] = [held[split][cut:]]
            return
        released += held[:split]
        del held[:split]
