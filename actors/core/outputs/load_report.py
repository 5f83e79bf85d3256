"""The work that an engine has, as it reports it to ingresses twice a second; routing reads it."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from actors.config import SchedulerConfig
from actors.core.outputs.scheduler_stats import LoadReport, PrefixCacheStats
from actors.core.outputs.waiting_tokens import CachedBlocks, WaitingTokens
from actors.core.requests.request import Request
from actors.core.requests.running_rows import RunningRows
from kv_transfer.link_load import merge_link_loads
from kv_transfer.params import TransferRole
from kv_transfer.transfer_stats import TransferStats

_RATE: Final = 0.05
"""How much one look-up counts in the moving average of the part of prompts that is found."""


class Blocks(CachedBlocks, Protocol):
    """The blocks of the KV cache, of which the load has the numbers, and by whose hashes prompts are looked up."""

    @property
    def num_blocks(self) -> int:
        """The number of all blocks."""

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no request holds."""


class Transfers(Protocol):
    """The engine's transfers, as far as they are part of its load."""

    @property
    def loading(self) -> Container[str]:
        """The ids of requests whose KV comes from elsewhere."""

    @property
    def transfer_stats(self) -> TransferStats | None:
        """The counters of the connector; None while there are none."""


@dataclass(slots=True)
class LoadMeter:
    """Makes load reports. Their numbers grow, so that a receiver can order them.

    Waiting prompts are looked up in the prefix cache. The part of the rest that will be found elsewhere, in stores and
    at other engines, is taken to be what was found there lately; so is, for a model with a recurrent state, what will
    be found in the cache, where a hit ends at a snapshot.

    kv_bytes_per_token, num_state_blocks: see LoadReport
    """

    config: SchedulerConfig
    block_pool: Blocks
    block_size: int
    kv_bytes_per_token: int
    num_state_blocks: int = 0
    _number: int = 0
    _found: float = 0.0
    _num_lookups: int = 0
    _num_queried: int = 0
    _num_found: int = 0

    def report(
        self,
        requests: Mapping[str, Request],
        transfers: Transfers,
        rows: RunningRows,
        prefix_cache: PrefixCacheStats,
        num_taken: int = 0,
        mixed_step_bound_s: float | None = None,
        late_after_s: float | None = None,
        now_s: float = 0.0,
    ) -> LoadReport:
        """Return the load.

        requests:  all unfinished requests, by id
        transfers: requests whose KV comes from elsewhere, which only count as decodes to come, and the links
        rows:      the running requests
        num_taken: how many requests the engine has got from its only ingress, if the caller knows the number
        mixed_step_bound_s: the most seconds of a step with decodes and prompts, by the prediction; None: no bound
        late_after_s: the time to the first token from which on a request is late; None: none is
        now_s:     the time, by the clock of the rows
        """
        self._note_lookups(prefix_cache)
        self._number += 1
        loading, stats = transfers.loading, transfers.transfer_stats
        late_before_s = now_s - late_after_s if late_after_s else -math.inf
        running = _running_work(rows, late_before_s)
        waiting = self._waiting_work(requests, loading, rows, late_before_s)
        coming = running.coming + waiting.coming
        num_decode_gaps, decode_gap_s = rows.decode_gaps(now_s)
        return LoadReport(
            number=self._number,
            num_waiting_tokens=waiting.num_tokens,
            num_prefill_tokens=running.num_prefill_tokens,
            num_decodes=running.num_decodes,
            num_decode_context_tokens=running.num_context_tokens,
            num_free_blocks=self.block_pool.num_free_blocks,
            num_blocks=self.block_pool.num_blocks,
            block_size=self.block_size,
            kv_bytes_per_token=self.kv_bytes_per_token,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            links=() if stats is None else merge_link_loads(stats.link_loads),
            num_taken_requests=num_taken,
            num_taken_from_all=num_taken,
            num_coming_decodes=len(coming),
            num_coming_context_tokens=sum(coming),
            num_state_blocks=self.num_state_blocks,
            num_waiting_slots=waiting.num_slots if self.num_state_blocks else 0,
            mixed_step_bound_s=mixed_step_bound_s or 0.0,
            late_after_s=late_after_s or 0.0,
            num_decodes_in_time=rows.num_in_time(late_after_s) if late_after_s else running.num_decodes,
            decode_gap_s=decode_gap_s,
            num_decode_gaps=num_decode_gaps,
            num_coming_late=running.num_late + waiting.num_late,
        )

    def _waiting_work(
        self, requests: Mapping[str, Request], loading: Container[str], rows: RunningRows, late_before_s: float
    ) -> _WaitingWork:
        """late_before_s: requests that arrived before this are late"""
        # Most engines have no other requests than those that run, most of the time.
        if len(requests) <= len(rows):
            return _WaitingWork()
        num_slots, coming, num_late = 0, list[int](), 0
        tokens = WaitingTokens(None if self.num_state_blocks else self.block_pool, self.block_size)
        for request_id, request in requests.items():
            if request_id in rows:
                if request.num_computed_tokens < request.num_prompt_tokens:
                    tokens.note_coming(request)
                continue
            if request_id in loading:
                tokens.note_coming(request)
            else:
                tokens.add(request)
                # Who has waited for KV, and has got it, has a slot.
                num_slots += not request.num_computed_tokens
            if request.transfer_role is not TransferRole.PRODUCER and request.pooling_params is None:
                coming.append(request.num_tokens)
                num_late += _is_late(request, late_before_s)
        return _WaitingWork(round(tokens.num_tokens * (1 - self._found)), num_slots, coming, num_late)

    def _note_lookups(self, stats: PrefixCacheStats) -> None:
        num_new = stats.requests - self._num_lookups
        num_hits = 0 if self.num_state_blocks else stats.hits
        num_queried, num_found = stats.queries - num_hits, stats.hits - num_hits + stats.loaded
        if num_new > 0 and num_queried > self._num_queried:
            found = (num_found - self._num_found) / (num_queried - self._num_queried)
            kept = (1 - _RATE) ** num_new
            self._found = kept * self._found + (1 - kept) * min(max(found, 0.0), 1.0)
        self._num_lookups, self._num_queried, self._num_found = stats.requests, num_queried, num_found


@dataclass(frozen=True, slots=True)
class _WaitingWork:
    """The work of the waiting requests, as LoadReport counts it.

    num_slots: those without a slot for their recurrent state; coming: the tokens of each decode to come
    num_late:  of the decodes to come, those that are late already
    """

    num_tokens: int = 0
    num_slots: int = 0
    coming: list[int] = field(default_factory=list)
    num_late: int = 0


@dataclass(frozen=True, slots=True)
class _RunningWork:
    """The work of the running requests, as LoadReport counts it.

    coming, num_late: as in _WaitingWork
    """

    num_prefill_tokens: int = 0
    num_decodes: int = 0
    num_context_tokens: int = 0
    coming: list[int] = field(default_factory=list)
    num_late: int = 0


def _is_late(request: Request, late_before_s: float) -> bool:
    # Who has output, as a preempted request has, had its first token: whether in time, is not known any more.
    return request.arrival_time < late_before_s and not request.num_output_tokens


def _running_work(rows: RunningRows, late_before_s: float) -> _RunningWork:
    if not len(rows):
        return _RunningWork()
    live = rows.epochs.nonzero()[0]
    num_computed = rows.num_computed[live]
    num_missing = rows.num_prompt[live] - num_computed
    is_computing = num_missing > 0
    if not is_computing.any():
        return _RunningWork(0, len(live), int(num_computed.sum()))
    decodes = ~is_computing
    computing = rows.requests[live[is_computing & ~rows.is_producer[live]]].tolist()
    coming = [request for request in computing if request.pooling_params is None]
    return _RunningWork(
        int(num_missing[is_computing].sum()),
        int(decodes.sum()),
        int(num_computed[decodes].sum()),
        [request.num_tokens for request in coming],
        sum(_is_late(request, late_before_s) for request in coming),
    )
