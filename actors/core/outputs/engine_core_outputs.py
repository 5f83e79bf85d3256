"""The messages from an engine to its clients: the tokens and the ends that a step has brought their requests."""

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

    queued_s:  from its arrival at the engine until it was first scheduled or its blocks were reserved
    prefill_s: from then until its first token was sampled here; 0 if none was
    num_prompt_tokens_computed: prompt tokens whose KV this engine computed itself
    num_cached_tokens: prompt tokens that came from this engine's prefix cache
    num_fetched_images: those of the request whose embeddings came from an encode engine
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
    """A request has lost its blocks to others and waits; it resumes here later, unless its client moves it elsewhere.

    num_computed_tokens: so many tokens from the start had their KV here; it stays cached until its blocks are reused
    num_wait_steps: how many steps until there is room for it again, if those that run go on to their full length
    """

    num_computed_tokens: Count
    num_wait_steps: Total


class EndCause(enum.StrEnum):
    """Why an engine has ended a request, where that decides what its ingress does next."""

    HANDED_OVER = "handed_over"
    """This engine is done with the request, whose consumer goes on; there is no finish reason then."""
    REQUEST_AT_FAULT = "request_at_fault"
    """Any engine would end this request."""
    ADAPTER_AT_FAULT = "adapter_at_fault"
    """Any engine would end a request for this adapter."""
    INPUTS_MISSING = "inputs_missing"
    """This engine was not given what it needs to start the request over: submitted anew, the request goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreOutput:
    """The output of one step for one request.

    attempt:        of the request as it was submitted
    first_position: output position of new_token_ids[0], counted over the request's whole life
    stop_token_id:  the EOS or stop token that ended it
    stop_reason:    why it stopped, if neither EOS nor a stop token did ("repetition")
    error:          why, if finish_reason is ERROR (or ABORT by the engine's own decision)
    end_cause:      where the ingress goes on by it
    pooling_output: a pooling request's vector
    prompt_logprobs: with the first token, if they were asked for
    preemption:     instead of tokens
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
        """Whether this is the last that this engine says about the request."""
        return self.finish_reason is not None or self.end_cause is EndCause.HANDED_OVER


@dataclass(frozen=True, slots=True)
class DecodedTokens:
    """Requests that got one token each and go on: the lists are parallel."""

    req_ids: Annotated[list[WireName], Meta(max_length=MAX_ITEMS)]
    attempts: Annotated[list[Count], Meta(max_length=MAX_ITEMS)]
    first_positions: Annotated[list[Count], Meta(max_length=MAX_ITEMS)]
    token_ids: TokenIds

    def __post_init__(self) -> None:
        """Raise ValueError for lists that are not parallel: they may come from another process."""
        if not len(self.req_ids) == len(self.attempts) == len(self.first_positions) == len(self.token_ids):
            raise ValueError("the columns of decoded tokens are not equally long")

    def __iter__(self) -> Iterator[EngineCoreOutput]:
        """Iterate over them one by one."""
        for req_id, attempt, position, token_id in zip(
            self.req_ids, self.attempts, self.first_positions, self.token_ids, strict=True
        ):
            yield EngineCoreOutput(
                request_id=req_id, attempt=attempt, new_token_ids=[token_id], first_position=position
            )


@dataclass(slots=True)
class EngineCoreOutputs:
    """Everything that one step has for one client: one message.

    decoded: what most requests get in most steps, in columns
    others:  the outputs of all other requests
    """

    others: Annotated[list[EngineCoreOutput], Meta(max_length=MAX_ITEMS)] = field(default_factory=list)
    finished_req_ids: Annotated[set[WireName], Meta(max_length=MAX_ITEMS)] = field(default_factory=set)
    scheduler_stats: SchedulerStats | None = None
    decoded: DecodedTokens | None = None

    @property
    def outputs(self) -> list[EngineCoreOutput]:
        """All outputs, one per request."""
        return [*(self.decoded or ()), *self.others]
