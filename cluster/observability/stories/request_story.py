"""The story of one request: the phases that its time was spent in, the events between them, and the cause in words.

A story is made from the request's record (make_story.py) when somebody asks for it, so that no other request pays for
one. Like records, stories have no prompts, tokens or texts. Times are in seconds from the request's arrival at the
ingress, on the ingress's clock: the times that an engine reports are durations since it got the request, and begin
where the ingress has submitted the request. So clocks of different hosts need not agree.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Phase(StrEnum):
    """Something that a request's time was spent on."""

    ADMISSION = "admission"
    """At the ingress, before the first submission to engines: admission, tokenization, the choice of the route."""
    QUEUE = "queue"
    """Waiting at an engine: for its turn, and at a producer for its consumer's reservation."""
    RESERVATION = "reservation"
    """Waiting at the consumer of a handoff until it has room for the request's blocks."""
    PREFILL = "prefill"
    """An engine computes the prompt, up to the first token."""
    TRANSFER_HIDDEN = "transfer_hidden"
    """The KV moves while the prompt is still computed: nobody waits for it."""
    TRANSFER_EXPOSED = "transfer_exposed"
    """The KV still moves after the prefill has ended: the second token waits for it."""
    BATCH = "batch"
    """The KV has arrived, and the request waits until the decode engine's batch takes it."""
    DECODE = "decode"
    """An engine generates tokens."""
    PREEMPTED = "preempted"
    """The request has lost its blocks to other requests at its engine, and waits."""
    RECOVERY = "recovery"
    """An attempt has failed, and the next one has not begun: no engine can take the request yet."""
    UNREPORTED = "unreported"
    """An engine has the request and has not reported on it: the request is in flight, or the engine was lost."""


WAITS: frozenset[Phase] = frozenset(
    {
        Phase.QUEUE,
        Phase.RESERVATION,
        Phase.TRANSFER_EXPOSED,
        Phase.BATCH,
        Phase.PREEMPTED,
        Phase.RECOVERY,
    }
)
"""The phases in which nothing is computed for the request."""


class PhaseSpan(msgspec.Struct, frozen=True):
    """A time that a request spent in one phase. Spans of different engines overlap, as hidden transfers do.

    engine_id: the engine; "" for phases at the ingress
    attempt:   1 for the first attempt; 0 before it
    ended_s:   None if the phase goes on
    """

    phase: Phase
    engine_id: str
    attempt: int
    began_s: float
    ended_s: float | None

    def seconds(self, now_s: float) -> float:
        """Return how long the phase took, up to now_s if it goes on."""
        return (now_s if self.ended_s is None else self.ended_s) - self.began_s


class EventKind(StrEnum):
    """Something that happened to a request at one moment."""

    FIRST_TOKEN = "first_token"
    PREEMPTED = "preempted"
    REROUTED = "rerouted"
    MOVED = "moved"
    FAILED = "failed"


class StoryEvent(msgspec.Struct, frozen=True):
    """An event of a request. text: what happened, in words"""

    kind: EventKind
    at_s: float
    engine_id: str
    attempt: int
    text: str


class RequestStory(msgspec.Struct, frozen=True):
    """The story of one request, in flight or ended.

    tenant:         "" if the cluster has no tenants
    model:          the model's name, or that of the request's adapter
    arrived_at_ns:  Unix time in nanoseconds
    duration_s:     from the arrival to the end; up to now while the request is in flight
    outcome:        the finish reason, or how the request failed; None while it is in flight
    error:          why the last attempt failed; "" if it did not
    ttft_s:         None before the first token
    way:            the way of the last attempt (routing.decision.Way); "" if no rule named one
    num_attempts:   submissions to engines; num_moves: migrations to another decode engine, of all attempts
    num_transferred_bytes, transfer_s, exposed_transfer_s: of the last attempt that had a handoff
    num_cached_tokens: prompt tokens from the prefix cache when the prompt was computed first
    spans:          in the order of their beginnings
    events:         in the order of their times
    cause:          what made the request slow, in words; never empty
    """

    request_id: str
    tenant: str
    model: str
    model_version: int
    ingress: str
    arrived_at_ns: int
    duration_s: float
    outcome: str | None
    error: str
    ttft_s: float | None
    itl_p50_s: float | None
    itl_max_s: float | None
    way: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_attempts: int
    num_moves: int
    num_preemptions: int
    num_transferred_bytes: int
    transfer_s: float
    exposed_transfer_s: float
    spans: tuple[PhaseSpan, ...]
    events: tuple[StoryEvent, ...]
    cause: str

    @property
    def engine_ids(self) -> list[str]:
        """The engines that worked on the request, in the order in which they came to it."""
        return list(dict.fromkeys(span.engine_id for span in self.spans if span.engine_id))

    def to_json(self) -> bytes:
        """Return the story as a JSON object."""
        return msgspec.json.encode(self)
