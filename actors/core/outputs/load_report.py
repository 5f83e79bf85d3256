"""The work that an engine has, as it reports it to ingresses twice a second; routing reads it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from actors.config import SchedulerConfig
from actors.core.outputs.scheduler_stats import LoadReport, PrefixCacheStats
from actors.core.requests.request import Request
from actors.core.requests.running_rows import RunningRows
from kv_transfer.link_load import merge_link_loads
from kv_transfer.params import TransferRole
from kv_transfer.transfer_stats import TransferStats

_RATE: Final = 0.05
"""How much one look-up counts in the moving average of the part of prompts that is found in the cache."""


class Blocks(Protocol):
    """The blocks of the KV cache, of which the load has the numbers."""

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

    Waiting prompts are not looked up in the prefix cache; the part of their tokens that is cached is taken to be what
    was found lately.

    kv_bytes_per_token: see LoadReport
    """

    config: SchedulerConfig
    block_pool: Blocks
    block_size: int
    kv_bytes_per_token: int
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
    ) -> LoadReport:
        """Return the load.

        requests:  all unfinished requests, by id
        transfers: requests whose KV comes from elsewhere, which only count as decodes to come, and the links
        rows:      the running requests
        """
        self._note_lookups(prefix_cache)
        self._number += 1
        loading, stats = transfers.loading, transfers.transfer_stats
        num_waiting_tokens, coming = 0, []
        for request_id, request in requests.items():
            if request_id in rows:
                continue
            if request_id not in loading:
                num_waiting_tokens += request.num_tokens - request.num_computed_tokens
            if request.transfer_role is not TransferRole.PRODUCER and request.pooling_params is None:
                coming.append(request.num_tokens)
        is_running = rows.epochs > 0
        num_missing = np.where(is_running, np.maximum(rows.num_prompt - rows.num_computed, 0), 0)
        decodes = is_running & (num_missing == 0)
        computing = rows.requests[is_running & (num_missing > 0) & ~rows.is_producer].tolist()
        coming += [request.num_tokens for request in computing if request.pooling_params is None]
        return LoadReport(
            number=self._number,
            num_waiting_tokens=round(num_waiting_tokens * (1 - self._found)),
            num_prefill_tokens=int(num_missing.sum()),
            num_decodes=int(decodes.sum()),
            num_decode_context_tokens=int(rows.num_computed[decodes].sum()),
            num_free_blocks=self.block_pool.num_free_blocks,
            num_blocks=self.block_pool.num_blocks,
            block_size=self.block_size,
            kv_bytes_per_token=self.kv_bytes_per_token,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            links=() if stats is None else merge_link_loads(stats.link_loads),
            num_coming_decodes=len(coming),
            num_coming_context_tokens=sum(coming),
        )

    def _note_lookups(self, stats: PrefixCacheStats) -> None:
        num_new = stats.requests - self._num_lookups
        num_queried = stats.queries - self._num_queried
        if num_new > 0 and num_queried > 0:
            found = (stats.hits + stats.loaded - self._num_found) / num_queried
            kept = (1 - _RATE) ** num_new
            self._found = kept * self._found + (1 - kept) * min(max(found, 0.0), 1.0)
        self._num_lookups, self._num_queried = stats.requests, stats.queries
        self._num_found = stats.hits + stats.loaded
