"""The messages from an engine to its clients: new tokens of their requests, and which requests have ended."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.outputs.scheduler_stats import SchedulerStats
from actors.core.requests.request import StatusChange
from actors.core.requests.request_status import FinishReason
from kv_transfer.message_ranges import (
    MAX_ITEMS,
    AnyFloat,
    Clock,
    Count,
    LongText,
    TokenId,
    TokenIds,
    Total,
    WireName,
    Word,
)
from kv_transfer.transfer_stats import TransferTimings


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """The times and counts of one request in one engine, sent with the request's last output.

    queued_s:  seconds from the request's arrival at the engine until it was first scheduled or its blocks were reserved
    prefill_s: seconds from then until this engine sampled the request's first token; 0 if it sampled none
    num_prompt_tokens_computed: prompt tokens whose KV this engine computed itself
    num_cached_tokens: prompt tokens whose KV came from this engine's prefix cache
    num_fetched_images: the request's images whose embeddings came from an encode engine
    """

    queued_s: Clock
    prefill_s: Clock
    num_prompt_tokens_computed: Total
    num_cached_tokens: Total
    num_preemptions: Total
    status_changes: Annotated[list[StatusChange], Meta(max_length=MAX_ITEMS)]
    transfer: TransferTimings | None = None
    num_fetched_images: Count = 0


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request has lost its blocks to other requests, and waits. It resumes here later, unless its client moves it.

    num_computed_tokens: how many tokens, from the first one on, had their KV in this engine; the KV stays cached until
        the blocks are used again. For a model with recurrent states: after how many tokens the state stays cached, too
    num_wait_steps: how many steps until enough blocks are free for the request, if all running requests go on to their
        full length
    """

    num_computed_tokens: Count
    num_wait_steps: Total


class EndCause(enum.StrEnum):
    """Why an engine has ended a request, for the ends after which the ingress may go on with the request."""

    HANDED_OVER = "handed_over"
    """This engine has handed the request over, and the consumer goes on. There is no finish reason."""
    REQUEST_AT_FAULT = "request_at_fault"
    """The fault is the request's, so any engine would end it."""
    ADAPTER_AT_FAULT = "adapter_at_fault"
    """The fault is the adapter's, so any engine would end a request for this adapter."""
    INPUTS_MISSING = "inputs_missing"
    """This engine lacks image inputs that it needs to compute the prompt again; the ingress may submit it anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreOutput:
    """The output of one step for one request.

    attempt:        EngineCoreRequest.attempt, of the submission that this output answers
    first_position: output position of new_token_ids[0]; tokens of earlier attempts count
    stop_token_id:  the EOS or stop token that ended the request
    stop_reason:    why the request stopped, if neither EOS nor a stop token ended it ("repetition")
    error:          the reason, if finish_reason is ERROR, or if it is ABORT by the engine's own decision
    end_cause:      set if it decides what the ingress does next
    logprobs:       one entry for each of new_token_ids, if the request asked for log-probabilities
    pooling_output: the vector or the scores of a pooling request
    prompt_logprobs: sent with the first token, if the request asked for them
    preemption:     set when the request was preempted; then there are no new tokens
    """

    request_id: WireName
    attempt: Count
    new_token_ids: TokenIds
    first_position: Count
    finish_reason: FinishReason | None = None
    stop_token_id: TokenId | None = None
    stop_reason: Word | None = None
    error: LongText | None = None
    end_cause: EndCause | None = None
    logprobs: Annotated[list[TokenLogprobs], Meta(max_length=MAX_ITEMS)] | None = None
    pooling_output: Annotated[list[AnyFloat], Meta(max_length=MAX_ITEMS)] | None = None
    prompt_logprobs: Annotated[list[TokenLogprobs], Meta(max_length=MAX_ITEMS)] | None = None
    preemption: Preemption | None = None
    timings: RequestTimings | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the engine's last output for the request."""
        return self.finish_reason is not None or self.end_cause is EndCause.HANDED_OVER


@dataclass(frozen=True, slots=True)
class DecodedTokens:
    """Requests that got one token each and go on. Entry i of every list belongs to request i."""

    req_ids: Annotated[list[WireName], Meta(max_length=MAX_ITEMS)]
    attempts: Annotated[list[Count], Meta(max_length=MAX_ITEMS)]
    first_positions: Annotated[list[Count], Meta(max_length=MAX_ITEMS)]
    token_ids: TokenIds

    def __post_init__(self) -> None:
        """Raise ValueError for lists of different lengths, which another process may have sent."""
        if not len(self.req_ids) == len(self.attempts) == len(self.first_positions) == len(self.token_ids):
            raise ValueError("the lists of decoded tokens have different lengths")

    def __iter__(self) -> Iterator[EngineCoreOutput]:
        """Yield an EngineCoreOutput for each request."""
        for req_id, attempt, position, token_id in zip(
            self.req_ids, self.attempts, self.first_positions, self.token_ids, strict=True
        ):
            yield EngineCoreOutput(
                request_id=req_id, attempt=attempt, new_token_ids=[token_id], first_position=position
            )


@dataclass(slots=True)
class EngineCoreOutputs:
    """The message with everything that one step has for one client.

    decoded: the outputs of requests that got one token and go on, which is what most outputs are
    others:  all other outputs
    """

    others: Annotated[list[EngineCoreOutput], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    finished_req_ids: Annotated[set[WireName], Meta(max_length=MAX_ITEMS)] = field(default_factory=set)
    scheduler_stats: SchedulerStats | None = None
    decoded: DecodedTokens | None = None

    @property
    def outputs(self) -> list[EngineCoreOutput]:
        """All outputs, one for each request."""
        return [*(self.decoded or ()), *self.others]
