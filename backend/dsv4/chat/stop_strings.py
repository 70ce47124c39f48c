"""Finding stop strings in a stream of text, holding back no more than could still become one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Aho-Corasick automaton over the stop strings; constant amortised work per character.

    Matching does not depend on how the text is cut into pieces: the stop string that ends first wins, of several that
    end together the longest.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which would match before anything is generated."""
        if any(not stop for stop in stop_strings):
            raise ValueError("a stop string must not be empty")
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stop_strings:
            self._insert(stop)
        self._link()
        self._first_characters = frozenset(self._next[0])
        self._state = 0

    @property
    def held(self) -> int:
        """Length of the longest end of the text so far that a stop string starts with."""
        return self._depth[self._state]

    def advance(self, text: str) -> tuple[int, str] | None:
        """Read on. Returns (length of ``text`` up to the end of the match, stop string), None without a match."""
        state = self._state
        if state == 0 and self._first_characters.isdisjoint(text):
            return None
        transitions, fail, match = self._next, self._fail, self._match
        for position, character in enumerate(text):
            while state and character not in transitions[state]:
                state = fail[state]
            state = transitions[state].get(character, 0)
            found = match[state]
            if found is not None:
                self._state = 0
                return position + 1, found
        self._state = state
        return None

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = following
        self._match[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if self._match[state] is None:
                self._match[state] = self._match[self._fail[state]]
            for character, following in self._next[state].items():
                queue.append(following)
                fail = self._fail[state]
                while fail and character not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[following] = self._next[fail].get(character, 0)
