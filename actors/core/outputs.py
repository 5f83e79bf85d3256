"""What the scheduler, the model runner and the engine's clients tell each other in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.core.request import StatusChange as StatusChange
from actors.core.sampling_params import SamplingParams
from actors.core.stats import SchedulerStats
from actors.core.status import FinishReason
from kv_transfer.connector import KVConnectorMetadata, KVConnectorOutput
from kv_transfer.stats import TransferTimings


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequestData:
    """A request that the worker has not seen, or has forgotten: everything that it needs.

    output_token_ids: tokens sampled elsewhere (a resumed or handed-over request)
    block_ids: one list per KV cache group; there is one group today
    """

    req_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(slots=True)
class CachedRequestData:
    """Requests that the worker knows: only what changed. The lists are parallel.

    resumed_from_preemption: new_block_ids replace the request's blocks instead of being appended
    new_token_ids: output tokens that the worker did not sample itself (empty lists today: it sampled them all)
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_from_preemption: list[bool] = field(default_factory=list)
    new_token_ids: list[list[int]] = field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """One step: which requests compute how many tokens, in which blocks.

    num_scheduled_tokens: tokens to compute, by request id; the requests of this step in batch order
    finished_req_ids: requests that ended since the last step, known to the worker or not: it forgets them before it
        looks at anything else, since an id may come back at once
    preempted_req_ids: requests that lost their blocks in this step
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    preempted_req_ids: set[str] = field(default_factory=set)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    num_common_prefix_blocks: list[int] = field(default_factory=lambda: [0])
    free_encoder_input_ids: list[tuple[str, int]] = field(default_factory=list)
    structured_output_request_ids: dict[str, int] = field(default_factory=dict)
    kv_connector_metadata: KVConnectorMetadata | None = None

    def is_empty(self) -> bool:
        """Whether the worker has nothing to do, not even to forget or to transfer."""
        no_transfer = self.kv_connector_metadata is None or self.kv_connector_metadata.is_empty()
        return self.total_num_scheduled_tokens == 0 and not self.finished_req_ids and no_transfer


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position, from the distribution before temperature and filters.

    token_ids[0], logprobs[0]: the sampled token; the top ones follow, best first
    rank: the sampled token's rank, 1 is the most likely
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step computed. sampled_token_ids is parallel to req_ids; empty where the prompt is not through yet.

    logprobs: for each request that asked, one entry per sampled token
    num_nans_in_logits: by request id, only those that have any
    """

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    num_nans_in_logits: dict[str, int] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None

    @property
    def finished_sending(self) -> set[str]:
        """Requests whose blocks have left this engine."""
        return self.kv_connector_output.finished_sending if self.kv_connector_output else set()

    @property
    def finished_recving(self) -> set[str]:
        """Requests whose blocks have arrived in this engine, or never will."""
        return set(self.kv_connector_output.finished_recving) if self.kv_connector_output else set()


@dataclass(frozen=True, slots=True)
class DraftTokenIds:
    """Tokens that a drafter proposes to go on with; the lists are parallel."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """One request's life in one engine, sent with its last output.

    queued_s:  from its arrival at the engine until it was first scheduled or its blocks were reserved
    prefill_s: from then until its first token was sampled here; 0 if none was
    num_prompt_tokens_computed: prompt tokens whose KV this engine computed itself
    num_cached_tokens: prompt tokens that came from this engine's prefix cache
    """

    queued_s: float
    prefill_s: float
    num_prompt_tokens_computed: int
    num_cached_tokens: int
    num_preemptions: int
    status_changes: list[StatusChange]
    transfer: TransferTimings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreOutput:
    """What one step gave one request.

    attempt:        of the request as it was submitted
    first_position: output position of new_token_ids[0], counted over the request's whole life
    handed_over:    this engine is done with the request, whose consumer goes on; finish_reason is None then
    stop_token_id:  the EOS or stop token that ended it
    error:          why, if finish_reason is ERROR (or ABORT by the engine's own decision)
    """

    request_id: str
    attempt: int
    new_token_ids: list[int]
    first_position: int
    finish_reason: FinishReason | None = None
    handed_over: bool = False
    stop_token_id: int | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    timings: RequestTimings | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the last that this engine says about the request."""
        return self.finish_reason is not None or self.handed_over


@dataclass(slots=True)
class EngineCoreOutputs:
    """Everything that one step has for one client: one message."""

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    finished_req_ids: set[str] = field(default_factory=set)
    scheduler_stats: SchedulerStats | None = None
