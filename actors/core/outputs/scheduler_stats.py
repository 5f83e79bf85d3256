"""The counters of the scheduler."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta

from actors.config import SpeculativeConfig
from actors.core.outputs.step_stats import StepStats
from actors.core.requests.adapter import AdapterStats
from actors.core.requests.structured_output import GrammarStats
from actors.costs.step_cost_model import StepCostModel
from kv_transfer.connector.store_steps import StoreStats
from kv_transfer.link_load import LinkLoads
from kv_transfer.message_ranges import MAX_KINDS, Clock, Count, Total, Word
from kv_transfer.transfer_stats import TransferStats

WAIT_REASONS: Final = ("reservation", "load", "prefix", "batch", "grammar", "adapter", "adapter_slot")
"""Waiting requests wait for these, in this order: the decode engine's blocks for the KV that they will hand over, room
for a load, a prefix on its way to another request, the batch once their KV has arrived, their grammar, their adapter's
weights, and its slot in the batch. All others wait for their turn."""


@dataclass(slots=True)
class PrefixCacheStats:
    """Prefix cache look-ups; one is counted each time a request is admitted.

    reset: whether the cache was emptied since the last report
    """

    reset: bool = False
    requests: Total = 0
    queries: Total = 0
    """Tokens looked up."""
    hits: Total = 0
    """Tokens found."""
    loaded: Total = 0
    """Further tokens whose KV came from stores or from other engines."""
    fetched: Total = 0
    """Loaded tokens whose KV came from other engines; they are part of loaded."""


@dataclass(slots=True)
class SpecDecodingStats:
    """Speculative decoding: drafts made, tokens drafted and accepted, acceptance by position."""

    num_spec_tokens: Count
    num_drafts: Total = 0
    num_draft_tokens: Total = 0
    num_accepted_tokens: Total = 0
    num_accepted_tokens_per_pos: Annotated[list[Total], Meta(max_length=MAX_KINDS)] = field(default_factory=list)


@dataclass(slots=True)
class EmbeddingStats:
    """Counters of image embeddings that engines send each other. TransferStats counts their bytes, together with KV."""

    num_received: Total = 0
    """Images whose embeddings came from an encode engine."""
    num_failed: Total = 0
    """Fetches that failed; this engine encodes the image itself."""
    num_sent: Total = 0
    """Images whose embeddings this engine has sent to other engines."""
    num_not_sent: Total = 0
    """Fetches of other engines that this engine refused: it had no room in time, or had forgotten the image."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The work that an engine has at one moment, in the units that the durations of its steps depend on.

    number:                    counts the engine's reports; a later one is newer
    num_waiting_tokens:        tokens of waiting requests that will be computed here, cached ones deducted
    num_prefill_tokens:        prompt tokens of running requests that are not computed yet
    num_decodes:               running requests whose prompt is computed
    num_decode_context_tokens: their tokens with KV, summed
    num_free_blocks:           blocks that no request holds; those that only the prefix cache keeps are free
    num_blocks, block_size:    of the KV cache; block_size in tokens
    kv_bytes_per_token:        bytes of one token's KV, all layers and heads: what a transfer moves for it
    max_num_batched_tokens:    the most tokens of one step
    max_num_seqs:              the most running requests
    links:                     the engine's links to consumers, those with the most queued bytes first
    num_taken_requests:        requests of the ingress that gets the report which are in these numbers, or were and have
                               ended: the first ones that it has sent in this session
    num_taken_from_all:        requests that the engine has got from all ingresses
    num_coming_decodes:        requests that will decode here, and whose prompt is not computed or whose KV is not here
    num_coming_context_tokens: their tokens, summed
    num_state_blocks:          blocks that each request takes for its recurrent state, beside those of its tokens
    num_waiting_slots:         waiting requests that have no slot for their recurrent state yet; 0 without such states
    mixed_step_bound_s:        the most seconds of a step with decodes and prompts, by the prediction; 0: no bound
    late_after_s:              the time to the first token from which on a request is late; 0: none is
    num_decodes_in_time:       of num_decodes, those that were not late; if none is, or late prompts outweigh them,
                               a step may take ALL_LATE times the bound
    num_coming_late:           of num_coming_decodes, those without a token that are late already
    decode_gap_s:              the mean time between tokens, so far, of those that decode; 0: unknown, or none has two
    num_decode_gaps:           the times between tokens of which that is the mean
    describes_in_s:            the seconds from when the report is sent until the moment that it describes: the end of
                               the step under way; negative: that moment is over
    """

    number: Total = 0
    num_waiting_tokens: Total = 0
    num_prefill_tokens: Total = 0
    num_decodes: Total = 0
    num_decode_context_tokens: Total = 0
    num_free_blocks: Total = 0
    num_blocks: Total = 0
    block_size: Total = 0
    kv_bytes_per_token: Total = 0
    max_num_batched_tokens: Total = 0
    max_num_seqs: Total = 0
    links: LinkLoads = ()
    num_taken_requests: Total = 0
    num_taken_from_all: Total = 0
    num_coming_decodes: Total = 0
    num_coming_context_tokens: Total = 0
    num_state_blocks: Total = 0
    num_waiting_slots: Total = 0
    mixed_step_bound_s: Clock = 0.0
    late_after_s: Clock = 0.0
    num_decodes_in_time: Total = 0
    decode_gap_s: Clock = 0.0
    describes_in_s: Clock = 0.0
    num_coming_late: Total = 0
    num_decode_gaps: Total = 0


@dataclass(slots=True)
class SchedulerStats:
    """A snapshot of one engine's scheduler. Totals count from the engine's start."""

    num_running_reqs: Total = 0
    num_waiting_reqs: Total = 0
    num_waiting_by_reason: Annotated[dict[Word, Total], Meta(max_length=MAX_KINDS)] = field(default_factory=dict)
    """The numbers of waiting requests by WAIT_REASONS, which are part of num_waiting_reqs."""
    num_waiting_for_remote_kvs: Total = 0
    num_held_reqs: Total = 0
    """Finished requests whose blocks a transfer still holds."""
    num_blocks: Total = 0
    block_size: Total = 0
    """Tokens."""
    num_free_blocks: Total = 0
    """Blocks that no request holds: empty ones and those that only the prefix cache keeps."""
    kv_cache_usage: Clock = 0.0
    num_preemptions: Total = 0
    num_prompt_tokens_computed: Total = 0
    num_output_tokens: Total = 0
    num_steps: Total = 0
    num_replayed_steps: Total = 0
    """Steps that replayed a CUDA graph or were compiled; the others ran eagerly."""
    num_late_completions: Total = 0
    """Completions that came late, twice or for an unknown request, and were dropped."""
    num_refused_handoffs: Total = 0
    """Handoffs refused because the two engines' handoff ranks were in the wrong order, or not those of the ticket."""
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    spec_decoding_stats: SpecDecodingStats | None = None
    num_corrupted_reqs: Total = 0
    num_refused_connections: Total = 0
    """Connections to the engine that did not prove the cluster's secret."""
    refused_messages: Annotated[dict[Word, Total], Meta(max_length=MAX_KINDS)] = field(default_factory=dict)
    """Messages of ingresses, and of engines that want images encoded, that were refused, by kind."""
    transfer_stats: TransferStats | None = None
    store_stats: StoreStats | None = None
    adapter_stats: AdapterStats | None = None
    grammar_stats: GrammarStats | None = None
    embedding_stats: EmbeddingStats | None = None
    load_report: LoadReport | None = None
    step_stats: StepStats | None = None
    step_costs: StepCostModel | None = None
    """The durations of steps as the engine predicts them; None if it has not reported any prediction."""

    @classmethod
    def first(cls, num_blocks: int, block_size: int, speculative: SpeculativeConfig | None) -> SchedulerStats:
        """Return the counters of a new scheduler."""
        drafts = None if speculative is None else SpecDecodingStats(speculative.num_tokens)
        return cls(num_blocks=num_blocks, block_size=block_size, spec_decoding_stats=drafts)

    @property
    def all_refused_messages(self) -> dict[str, int]:
        """Messages of other processes that were refused or dropped, those about transfers included, by kind."""
        dropped = Counter({} if self.transfer_stats is None else self.transfer_stats.dropped_messages)
        return dict(dropped + Counter(self.refused_messages))

    @property
    def has_requests(self) -> bool:
        """Whether the engine has any request, including finished ones whose blocks a transfer still holds."""
        num_unfinished = self.num_running_reqs + self.num_waiting_reqs + self.num_waiting_for_remote_kvs
        return num_unfinished + self.num_held_reqs > 0
