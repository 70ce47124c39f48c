"""Turns the tokens of a request into what its client sees: text, deltas, log probabilities, finish reason, usage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsv4.chat import ChatParser, ChatTokenizer, OutputStream
from dsv4.engine.chat_delta import merge_deltas
from dsv4.engine.protocol import FinishReason, GenerateRequest, RequestOutput, TokenLogprob, Usage
from dsv4.errors import ErrorCode, RequestError

if TYPE_CHECKING:
    # The engine's client uses this module too, in a process that must not load PyTorch.
    from dsv4.engine.sampler import SampledToken


class OutputProcessor:
    """Output side of one request; driven once per step, in order.

    Ends are looked for token by token, so that an end inside a speculative step cuts exactly there: EOS, stop token
    ids, stop strings, length.
    """

    def __init__(
        self,
        request: GenerateRequest,
        tokenizer: ChatTokenizer | None,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Without a tokenizer only token ids come out. Raises RequestError for what then cannot work."""
        parameters = request.sampling_parameters
        self._request_id = request.request_id
        self._tokenizer = tokenizer
        self._num_prompt_tokens = num_prompt_tokens
        self._max_tokens = max_tokens
        self._eos: frozenset[int] = (
            frozenset() if parameters.ignore_eos and parameters.structured_outputs is None else eos_token_ids
        )
        self._stop_token_ids = frozenset(parameters.stop_token_ids)
        self._include_stop = parameters.include_stop_str_in_output
        self._wants_logprobs = parameters.logprobs is not None
        self._num_tokens = 0
        self._cumulative_logprob = 0.0
        self.cached_tokens = 0
        self.draft_tokens = 0
        self.accepted_draft_tokens = 0
        self._parser: ChatParser | None = None
        self._stream: OutputStream | None = None
        if tokenizer is None:
            if parameters.stop or request.output_format is not None:
                raise RequestError(
                    ErrorCode.UNSUPPORTED, "stop: the model has no tokenizer.json, so text cannot be matched"
                )
        elif request.output_format is not None:
            self._parser = ChatParser.from_output_format(
                request.output_format,
                tokenizer,
                stop_strings=parameters.stop,
                include_stop=parameters.include_stop_str_in_output,
            )
        else:
            self._stream = OutputStream(tokenizer, parameters.stop, include_stop=parameters.include_stop_str_in_output)

    def push(self, tokens: Sequence[SampledToken]) -> RequestOutput:
        """Add the tokens of one step. The output is the last one when it is `finished`."""
        kept, reason, stop_reason = self._cut(tokens)
        ids = [token.token_id for token in kept]
        # EOS is never part of the text, a stop token that the client named only if it asked for that.
        silent = reason is FinishReason.STOP and (stop_reason is None or not self._include_stop)
        spoken = ids[:-1] if silent else ids
        text, deltas, count, stop, error = self._read(spoken)
        if stop is not None:
            kept, ids = kept[:count], ids[:count]
            reason, stop_reason = FinishReason.STOP, stop
        self._num_tokens += len(ids)
        finish: FinishReason | None = reason
        if error is None and reason is not None:
            more_text, more_deltas, finish, error = self._end(reason)
            text, deltas = text + more_text, deltas + more_deltas
        logprobs = self._logprobs(kept)
        return RequestOutput(
            request_id=self._request_id,
            token_ids=ids,
            text=text,
            chat_delta=merge_deltas(deltas) if self._parser is not None and deltas else None,
            logprobs=logprobs,
            cumulative_logprob=self._cumulative_logprob if self._wants_logprobs else None,
            num_prompt_tokens=self._num_prompt_tokens,
            finish_reason=None if error else finish,
            stop_reason=stop_reason,
            usage=self._usage() if finish is not None or error else None,
            error=None if error is None else str(RequestError(ErrorCode.INTERNAL, f"invalid model output: {error}")),
        )

    def _cut(self, tokens: Sequence[SampledToken]) -> tuple[list[SampledToken], FinishReason | None, int | str | None]:
        for index, token in enumerate(tokens):
            if token.token_id in self._eos:
                return list(tokens[: index + 1]), FinishReason.STOP, None
            if token.token_id in self._stop_token_ids:
                return list(tokens[: index + 1]), FinishReason.STOP, token.token_id
            if self._num_tokens + index + 1 >= self._max_tokens:
                return list(tokens[: index + 1]), FinishReason.LENGTH, None
        return list(tokens), None, None

    def _read(self, ids: list[int]) -> tuple[str, list[dict[str, Any]], int, str | None, str | None]:
        """Text, deltas, tokens that belong to the output, stop string, error."""
        if self._parser is not None:
            chat = self._parser.push(ids)
            return _content(chat.deltas), chat.deltas, chat.token_count, chat.stop, chat.error
        if self._stream is not None:
            step = self._stream.push(ids)
            return step.text, [], step.token_count, step.stop, None
        return "", [], len(ids), None, None

    def _end(self, reason: FinishReason) -> tuple[str, list[dict[str, Any]], FinishReason, str | None]:
        if self._parser is not None:
            end = self._parser.finish(reason.value)
            finish = reason if end.error else FinishReason(end.finish_reason)
            return _content(end.deltas), end.deltas, finish, end.error if reason is FinishReason.STOP else None
        if self._stream is not None:
            return "".join(self._stream.finish()), [], reason, None
        return "", [], reason, None

    def _logprobs(self, tokens: list[SampledToken]) -> list[TokenLogprob] | None:
        if not self._wants_logprobs:
            return None
        described = []
        for token in tokens:
            logprob = token.logprob or 0.0
            self._cumulative_logprob += logprob
            described.append(
                TokenLogprob(
                    token_id=token.token_id,
                    token=self._spell(token.token_id),
                    logprob=logprob,
                    top=[(other, self._spell(other), value) for other, value in token.top],
                )
            )
        return described

    def _spell(self, token_id: int) -> str:
        if self._tokenizer is None:
            return ""
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_tokens,
            cached_tokens=self.cached_tokens,
            reasoning_tokens=0 if self._parser is None else self._parser.reasoning_tokens,
            draft_tokens=self.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens,
        )


def _content(deltas: Sequence[dict[str, Any]]) -> str:
    return "".join(delta.get("content") or "" for delta in deltas)
