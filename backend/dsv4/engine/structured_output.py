"""Outputs that must match a JSON schema, a regular expression, a grammar or a list of choices, by xgrammar."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
import xgrammar

from dsv4.chat import ChatTokenizer
from dsv4.chat.grammar import anchor_control_tokens, read_structured_outputs
from dsv4.chat.protocol import DSML
from dsv4.errors import invalid_argument

FIELD = "structured_outputs"
CACHE_BYTES = 256 << 20

MAX_WHITESPACE = 2
"""Between the parts of a JSON answer; without a bound a model may go on with spaces for ever."""

_LOG_PREFIX = re.compile(r"^\[\d+:\d+:\d+\] \S+:\d+: ")


class OutputConstraint:
    """The state of one output in its grammar.

    Tokens are accepted by index: `mask` for an earlier index takes back what was accepted from there on, be it drafts
    or a choice that is made again.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._num_accepted = 0

    def mask(self, logits: torch.Tensor, index: int) -> None:
        """Set to minus infinity what may not be output token `index`. logits: [vocab] FP32 on the CPU, changed."""
        self._go_back_to(index)
        self._matcher.fill_next_token_bitmask(self._bitmask)
        xgrammar.apply_token_bitmask_inplace(logits[None], self._bitmask)

    @property
    def finished(self) -> bool:
        """The end has been accepted; nothing may follow."""
        return self._matcher.is_terminated()

    def accept(self, token_id: int) -> None:
        """Output token `index` of the last `mask` is this one."""
        if self._matcher.is_terminated() or not self._matcher.accept_token(token_id):
            raise ValueError(f"token {token_id} does not follow in the grammar")
        self._num_accepted += 1

    def _go_back_to(self, index: int) -> None:
        if index < self._num_accepted:
            self._matcher.rollback(self._num_accepted - index)
            self._num_accepted = index


class GrammarCompiler:
    """Compiles constraints for one vocabulary; equal ones are compiled once. Safe to use from several threads."""

    def __init__(self, tokenizer: ChatTokenizer, *, vocab_size: int, stop_token_ids: frozenset[int]) -> None:
        """`vocab_size` is the network's, which may be larger than the tokenizer's."""
        # Control tokens stand for no text: a grammar lets them through only where it names them. The DSML token is
        # also found by its text, which is how a grammar notices that a tool call begins.
        vocabulary = [
            b"" if token in tokenizer.special_ids or token in stop_token_ids else tokenizer.token_bytes(token)
            for token in range(min(vocab_size, tokenizer.vocab_size))
        ]
        information = xgrammar.TokenizerInfo(
            vocabulary,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=sorted(stop_token_ids),
        )
        self._vocab_size = vocab_size
        self._dsml_token_id = tokenizer.token_id(DSML)
        threads = max(1, min(8, os.cpu_count() or 1))
        self._compiler = xgrammar.GrammarCompiler(information, max_threads=threads, cache_limit_bytes=CACHE_BYTES)

    def compile(self, structured_outputs: Mapping[str, Any]) -> OutputConstraint | None:
        """The constraint of a request, None when it asks for nothing.

        Raises RequestError INVALID_ARGUMENT naming the kind of constraint.
        """
        entry = read_structured_outputs(dict(structured_outputs), FIELD)
        if not entry:
            return None
        kind, value = next(iter(entry.items()))
        try:
            compiled = self._compile(kind, value)
        except (RuntimeError, ValueError, TypeError) as error:
            raise invalid_argument(f"{FIELD}.{kind}", f"cannot be compiled: {_reason(error)}") from None
        return OutputConstraint(compiled, self._vocab_size)

    def _compile(self, kind: str, value: Any) -> xgrammar.CompiledGrammar:
        if kind == "json":
            return self._compiler.compile_json_schema(json.dumps(value), max_whitespace_cnt=MAX_WHITESPACE)
        if kind == "json_object":
            return self._compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=MAX_WHITESPACE)
        if kind == "regex":
            return self._compiler.compile_regex(value)
        if kind == "choice":
            return self._compiler.compile_grammar("root ::= " + " | ".join(map(_ebnf_literal, value)))
        if kind == "grammar":
            return self._compiler.compile_grammar(value)
        ebnf = str(xgrammar.Grammar.from_structural_tag(value))
        return self._compiler.compile_grammar(anchor_control_tokens(ebnf, self._dsml_token_id))


def _reason(error: Exception) -> str:
    """The last line of the library's message, without the time and the place in its source."""
    lines = str(error).strip().splitlines()
    return _LOG_PREFIX.sub("", lines[-1]) if lines else type(error).__name__


def _ebnf_literal(text: str) -> str:
    """A text as an EBNF string literal, every character beyond plain ASCII escaped by its code point."""
    escaped = (
        character
        if character.isascii() and character.isprintable() and character not in '"\\'
        else f"\\U{ord(character):08x}"
        for character in text
    )
    return '"' + "".join(escaped) + '"'
