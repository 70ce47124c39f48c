"""Runs the rows of a step through the network: all ranks in one process, in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from dsv4.cache.block_allocator import NO_BLOCK
from dsv4.cache.groups import MAX_ROWS_PER_SEQUENCE, CacheGroup
from dsv4.engine.sampler import SampledToken, Sampler
from dsv4.errors import ErrorCode, RequestError
from dsv4.model import DeepseekV4Model
from dsv4.model.batch import ForwardBatch
from dsv4.model.cache_pools import CachePools
from dsv4.scheduler.request import Request
from dsv4.scheduler.scheduler import ScheduledRows, StepPlan


@dataclass
class RowsResult:
    """What a step computed for one request.

    Attributes:
        tokens: accepted drafts and the target token after them; empty while a prompt is not finished.
        draft_token_ids: drafts of the next step.
        error: the request cannot go on.
    """

    rows: ScheduledRows
    tokens: list[SampledToken] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)
    error: RequestError | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True)
class _Segment:
    """Consecutive rows of one request in one call of the network."""

    result: RowsResult
    start: int
    token_ids: list[int]
    last: bool

    @property
    def request(self) -> Request:
        return self.result.rows.request

    @property
    def samples(self) -> bool:
        return self.last and self.result.rows.samples


class LocalExecutor:
    """Executes step plans on one model and one set of pools.

    Prefill extents are walked in tiles of at most 128 rows a sequence, which is what the cache rings are made for. The
    first call of a step holds every decode row and the first tile of every prompt.
    """

    def __init__(
        self, model: DeepseekV4Model, pools: CachePools, groups: Sequence[CacheGroup], *, max_num_seqs: int
    ) -> None:
        self._model = model
        self._pools = pools
        self._groups = tuple(groups)
        self._tables: list[npt.NDArray[np.int64]] = [
            np.full((max_num_seqs, group.blocks_per_request), NO_BLOCK, dtype=np.int64) for group in groups
        ]
        self._tensors = [torch.from_numpy(table) for table in self._tables]
        self._copied: list[tuple[str, int, int] | None] = [None] * max_num_seqs

    @torch.inference_mode()
    def execute(self, plan: StepPlan, samplers: dict[str, Sampler]) -> list[RowsResult]:
        """Compute a plan.

        Args:
            samplers: request id -> sampler, for all requests of the plan.

        Returns:
            one result a request, in the order of the plan.
        """
        results = [RowsResult(rows) for rows in plan.rows]
        drafting: list[tuple[RowsResult, torch.Tensor]] = []
        for tile in _tiles(results):
            self._run_tile(tile, samplers, drafting)
        self._draft(drafting, samplers)
        return results

    def _run_tile(
        self, tile: list[_Segment], samplers: dict[str, Sampler], drafting: list[tuple[RowsResult, torch.Tensor]]
    ) -> None:
        for segment in tile:
            self._copy_table(segment.request, segment.start + len(segment.token_ids))
        bundle = self._model.forward(self._batch(tile), self._pools)
        self._sample(tile, bundle, samplers)
        self._advance_prediction_layer(tile, bundle, drafting)

    def _sample(self, tile: list[_Segment], bundle: torch.Tensor, samplers: dict[str, Sampler]) -> None:
        wanted: list[int] = []
        spans: list[tuple[_Segment, int, int]] = []
        offset = 0
        for segment in tile:
            end = offset + len(segment.token_ids)
            if segment.samples:
                count = 1 + len(segment.result.rows.draft_token_ids)
                spans.append((segment, len(wanted), count))
                wanted.extend(range(end - count, end))
            offset = end
        if not wanted:
            return
        logits = self._model.logits(bundle[torch.tensor(wanted, device=bundle.device)])
        highest, choices = logits.max(dim=-1)
        greedy = choices.tolist()
        # The maximum of a row with NaN is NaN, and such a row has no meaningful token.
        sound = torch.isfinite(highest).tolist()
        for segment, first, count in spans:
            sampler = samplers[segment.request.request_id]
            drafts = segment.result.rows.draft_token_ids
            if not all(sound[first : first + count]):
                segment.result.error = RequestError(ErrorCode.INTERNAL, "the network produced no finite logits")
                continue
            if sampler.plain_greedy:
                accepted = 0
                while accepted < len(drafts) and greedy[first + accepted] == drafts[accepted]:
                    accepted += 1
                chosen = [SampledToken(token) for token in greedy[first : first + accepted + 1]]
            else:
                chosen = _verify(sampler, segment.request, logits[first : first + count], drafts)
            segment.result.tokens = chosen

    def _advance_prediction_layer(
        self, tile: list[_Segment], bundle: torch.Tensor, drafting: list[tuple[RowsResult, torch.Tensor]]
    ) -> None:
        """Run the prediction layer on every row whose next token is known and final, with the true streams.

        Row p needs the streams of position p and the token at p + 1 (DeepSeek V3 report, section 2.2). Rows after the
        accepted drafts are left out; the next step overwrites their positions before anything reads them.
        """
        segments: list[_Segment] = []
        kept: list[int] = []
        offset = 0
        for segment in tile:
            count = len(segment.token_ids)
            request = segment.request
            if request.num_speculative_tokens:
                following = [*request.token_ids[segment.start + 1 : segment.start + count + 1]]
                if segment.samples and segment.result.error is None:
                    known = request.num_tokens - 1 - segment.start
                    following = [*following[:known], *segment.result.token_ids]
                if following:
                    segments.append(_Segment(segment.result, segment.start, following, segment.last))
                    kept.extend(range(offset, offset + len(following)))
            offset += count
        if not segments:
            return
        streams = self._model.forward_mtp(
            bundle[torch.tensor(kept, device=bundle.device)], self._batch(segments), self._pools
        )
        offset = 0
        for segment in segments:
            offset += len(segment.token_ids)
            if segment.samples and segment.result.error is None:
                drafting.append((segment.result, streams[offset - 1]))

    def _draft(self, drafting: list[tuple[RowsResult, torch.Tensor]], samplers: dict[str, Sampler]) -> None:
        """Draft the tokens of the next step, each from the prediction layer's streams for the one before."""
        active = [(result, streams, _draft_limit(result)) for result, streams in drafting if _draft_limit(result) > 0]
        while active:
            streams = torch.stack([row for _, row, _ in active])
            logits = self._model.mtp_logits(streams)
            tokens = logits.argmax(dim=-1).tolist()
            going = []
            for index, (result, _, limit) in enumerate(active):
                request = result.rows.request
                sampler = samplers[request.request_id]
                token: int | None = tokens[index]
                if sampler.constrained:
                    position = request.num_tokens + len(result.tokens) + len(result.draft_token_ids)
                    token = sampler.draft(logits[index], position - request.num_prompt_tokens)
                if token is None:
                    continue
                result.draft_token_ids.append(token)
                if len(result.draft_token_ids) < limit:
                    going.append(index)
            if not going:
                return
            for index in going:
                result = active[index][0]
                self._copy_table(result.rows.request, _next_prediction_position(result) + 1)
            batch = [
                _Segment(result, _next_prediction_position(result), [result.draft_token_ids[-1]], last=True)
                for result in (active[index][0] for index in going)
            ]
            advanced = self._model.forward_mtp(
                streams[torch.tensor(going, device=streams.device)], self._batch(batch), self._pools
            )
            active = [(active[index][0], advanced[row], active[index][2]) for row, index in enumerate(going)]

    def _batch(self, segments: list[_Segment]) -> ForwardBatch:
        counts = [len(segment.token_ids) for segment in segments]
        token_ids = np.fromiter((token for segment in segments for token in segment.token_ids), np.int64, sum(counts))
        positions = np.concatenate(
            [np.arange(segment.start, segment.start + count) for segment, count in zip(segments, counts, strict=True)]
        )
        device = self._model.device
        slots = torch.tensor([segment.request.slot for segment in segments])
        return ForwardBatch(
            token_ids=torch.from_numpy(token_ids).to(device),
            positions=torch.from_numpy(positions).to(device),
            sequence_index=torch.from_numpy(np.repeat(np.arange(len(segments)), counts)).to(device),
            block_tables={
                group.name: tensor.index_select(0, slots).to(device)
                for group, tensor in zip(self._groups, self._tensors, strict=True)
            },
        )

    def _copy_table(self, request: Request, end: int) -> None:
        """Bring the request's row of the block tables up to date for rows up to position `end` - 1."""
        table, slot = request.table, request.slot
        assert table is not None
        assert slot is not None
        table.advance(end)
        state = (request.request_id, request.num_preemptions, table.version)
        if self._copied[slot] == state:
            return
        for target, blocks in zip(self._tables, table.blocks, strict=True):
            target[slot] = blocks
        self._copied[slot] = state


def _tiles(results: list[RowsResult]) -> list[list[_Segment]]:
    """Cut the rows of a step into calls of at most 128 rows a sequence."""
    tiles: list[list[_Segment]] = []
    for result in results:
        rows = result.rows
        tokens = rows.request.token_ids[rows.start : rows.start + rows.num_tokens] + list(rows.draft_token_ids)
        for index, offset in enumerate(range(0, len(tokens), MAX_ROWS_PER_SEQUENCE)):
            piece = tokens[offset : offset + MAX_ROWS_PER_SEQUENCE]
            if index == len(tiles):
                tiles.append([])
            tiles[index].append(_Segment(result, rows.start + offset, piece, offset + len(piece) == len(tokens)))
    return tiles


def _verify(sampler: Sampler, request: Request, logits: torch.Tensor, drafts: Sequence[int]) -> list[SampledToken]:
    """Accept drafts while the sampler chooses them itself; then its own choice. logits: [1 + drafts, vocab]."""
    output = request.token_ids[request.num_prompt_tokens :]
    chosen: list[SampledToken] = []
    for row in range(len(drafts) + 1):
        token = sampler.sample(logits[row], output)
        chosen.append(token)
        output.append(token.token_id)
        if sampler.finished or (row < len(drafts) and token.token_id != drafts[row]):
            break
    return chosen


def _draft_limit(result: RowsResult) -> int:
    """Drafts that can be of use: the token after them must still fit the request."""
    request = result.rows.request
    length = request.num_tokens + len(result.tokens)
    return min(request.num_speculative_tokens, request.max_total_tokens - length - 1)


def _next_prediction_position(result: RowsResult) -> int:
    """Position of the prediction row that consumes the newest draft."""
    request = result.rows.request
    return request.num_tokens + len(result.tokens) - 2 + len(result.draft_token_ids)
