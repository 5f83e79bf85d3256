"""The work of one engine as an ingress knows it: what the engine has reported, and what was sent there since."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Protocol

from actors.core.outputs.scheduler_stats import LoadReport
from actors.core.outputs.sent_work import SentWork
from actors.core.steps.chunk_budget import ALL_LATE
from actors.costs.step_cost_model import StepCostModel
from cluster.routing.costs.step_prediction import StepPrediction
from cluster.routing.engine_connection import EngineDescriptor, EngineKey
from kv_transfer.link_load import LinkLoad

DEFAULT_BATCHED_TOKENS: Final = 2048
DEFAULT_BLOCK_SIZE: Final = 16
DEFAULT_BYTES_PER_S: Final = 1e9
"""The bandwidth of a link that has not been measured yet: that of 10 Gbit/s Ethernet, nearly."""
DEFAULT_ROUND_TRIP_S: Final = 1e-3
MAX_PROMPT_SHARE: Final = 0.8


class ReportingEngine(Protocol):
    """An engine's session, as far as it tells of the engine's work; an EngineSession is one."""

    @property
    def descriptor(self) -> EngineDescriptor:
        """The engine at the other end."""

    @property
    def load_report(self) -> LoadReport | None:
        """The engine's newest report; None until one has come."""

    @property
    def step_costs(self) -> StepCostModel | None:
        """The engine's own predictions; None until they have come."""

    @property
    def num_prompt_tokens_computed(self) -> int:
        """How many tokens of prompts the engine has computed since its start, by its newest report."""

    @property
    def num_submitted_requests(self) -> int:
        """How many requests were submitted on this session."""

    def announce(self, work: SentWork) -> None:
        """Tell the engine what the request brings that was submitted last, so that it tells the other ingresses."""

    def announce_left(self, work: SentWork) -> None:
        """Tell the engine what a request has brought that it has no more, so that it tells the other ingresses."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link to one consumer, as far as it is known. Units: bytes, bytes per second, seconds."""

    num_queued_bytes: float = 0.0
    bytes_per_s: float = DEFAULT_BYTES_PER_S
    round_trip_s: float = DEFAULT_ROUND_TRIP_S


_UNKNOWN_LINK: Final = LinkLoad("")


@dataclass(frozen=True, slots=True)
class CountedWork:
    """The work of a request under way. ordinal: its number among those that the engine's reports count, from 1 on"""

    ordinal: int
    work: SentWork


@dataclass(slots=True)
class EngineWork:
    """The work of one engine, as one value.

    num_decodes:        requests that decode here, or will once their prompts are computed or their KV has come
    num_context_tokens: their tokens, summed
    num_coming_decodes: the part of num_decodes whose prompts were not computed yet when the engine reported, and those
                        sent since
    queue_end_s:        the time, by the book's clock, at which the prompts sent so far will be computed
    num_free_blocks:    without those for waiting requests, and for those sent since the report; it may be negative
    num_state_blocks:   blocks that each request takes for its recurrent state, beside those of its tokens
    mixed_step_bound_s: how long a step with decodes and prompts may take by the prediction; 0: no bound
    late_after_s:       the time to the first token from which on a request is late; 0: none is
    in_time_part:       the part of the requests that decode there which were not late; 1 if none decodes
    num_late:           the part of num_decodes that had their first tokens too late, or have none and are late already
    num_sent_late:      how many of this ingress's requests that decode here, or will, were expected to be late when
                        they were sent
    decode_gap_s:       the mean time between tokens, so far, of those that decode there; 0: unknown
    num_gaps_of_each:   how many of these times each of them has had, on average
    prompt_share:       the part of its time by which prompts, of those to come, lengthen the steps of requests that
                        decode, up to MAX_PROMPT_SHARE
    own_prompt_share:   the same by what it does now; an engine of role `prefill` is taken to do all prompts otherwise
    num_queued_bytes:   bytes that it has to send, on all of its links, with those of the requests sent since
    most_bytes_per_s:   the bandwidth of its fastest link, as measured: what its network interface can do; 0: unknown
    reported_at_s:      when the newest report came; -inf if none has
    """

    key: EngineKey
    prediction: StepPrediction | None = None
    num_decodes: float = 0.0
    num_context_tokens: float = 0.0
    num_coming_decodes: float = 0.0
    queue_end_s: float = 0.0
    num_free_blocks: float = 0.0
    num_blocks: int = 0
    block_size: int = DEFAULT_BLOCK_SIZE
    num_state_blocks: int = 0
    kv_bytes_per_token: float = 0.0
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS
    max_num_seqs: int = 0
    mixed_step_bound_s: float = 0.0
    late_after_s: float = 0.0
    in_time_part: float = 1.0
    num_late: float = 0.0
    num_sent_late: float = 0.0
    decode_gap_s: float = 0.0
    num_gaps_of_each: float = 0.0
    prompt_share: float = 0.0
    own_prompt_share: float = 0.0
    num_queued_bytes: float = 0.0
    most_bytes_per_s: float = 0.0
    links: dict[str, Link] = field(default_factory=dict)
    """The links that this ingress has looked at since the report, with what it has sent on them since."""
    reported_links: dict[str, LinkLoad] = field(default_factory=dict)
    reported_at_s: float = float("-inf")
    report: LoadReport = field(default_factory=LoadReport)
    session: ReportingEngine | None = None
    step_costs: StepCostModel | None = None
    num_prompt_tokens_computed: int = 0
    sent: dict[str, CountedWork] = field(default_factory=dict)
    """The requests of this ingress that the engine has, by id."""
    announced: list[CountedWork] = field(default_factory=list)
    """The requests of other ingresses that the newest report does not count."""

    def share(self, *, ignores_roles: bool) -> float:
        """Return the part of its time that the engine is taken to spend on prompts."""
        return self.own_prompt_share if ignores_roles else self.prompt_share

    def wait_s(self, now_s: float) -> float:
        """Return the time until the queue of prompts is empty."""
        wait_s = self.queue_end_s - now_s
        return wait_s if wait_s > 0 else 0.0

    def step_limits(self, wait_s: float = 0.0) -> tuple[int, float]:
        """Return the most tokens and seconds (0: any) of a step with decodes and a prompt that begins in wait_s."""
        factor = ALL_LATE if not self.in_time_part or 0 < self.late_after_s < wait_s else 1.0
        return self.max_num_batched_tokens, self.mixed_step_bound_s * factor

    def link_to(self, consumer: str) -> Link:
        """Return what is known of the link to a consumer. One that was not measured is as fast as the fastest one."""
        if (link := self.links.get(consumer)) is None:
            load = self.reported_links.get(consumer, _UNKNOWN_LINK)
            bytes_per_s = load.bytes_per_s or self.most_bytes_per_s or DEFAULT_BYTES_PER_S
            link = Link(load.num_queued_bytes, bytes_per_s, load.round_trip_s or DEFAULT_ROUND_TRIP_S)
            self.links[consumer] = link
        return link

    def sent_in_s(self, consumer: str, num_bytes: float) -> float:
        """Return the time in which bytes get to a consumer, after all that is queued.

        A link waits for what is queued on it. Links of one engine share its network interface, so it also waits for
        what is queued on the others, at the speed of the fastest one.
        """
        link = self.link_to(consumer)
        fastest = max(self.most_bytes_per_s, link.bytes_per_s)
        return max(
            (link.num_queued_bytes + num_bytes) / link.bytes_per_s, (self.num_queued_bytes + num_bytes) / fastest
        )

    def blocks_of(self, sent: SentWork) -> int:
        """Return the number of blocks that a request takes here at once."""
        return sent.num_blocks(self.block_size, self.num_state_blocks)

    def sent_since(self) -> list[SentWork]:
        """Return the work of the requests, of all ingresses, that the newest report does not count."""
        num_taken = self.report.num_taken_requests
        own = [one.work for one in self.sent.values() if one.ordinal > num_taken]
        return [*own, *(one.work for one in self.announced)]


def queue_seconds(work: EngineWork, num_tokens: float) -> float:
    """Return the time in which an engine computes the prompts of its queue. num_tokens: of all of them"""
    if work.prediction is None or num_tokens <= 0:
        return 0.0
    # Prompts of a queue share steps, so they are predicted as steps that are full, of a prompt that fills one step.
    size = min(work.max_num_batched_tokens, num_tokens)
    decodes = work.num_decodes, work.num_context_tokens
    most = work.max_num_batched_tokens + work.num_decodes
    steps, bounds_s = work.prediction.prefill_steps, [work.step_limits(wait_s)[1] for wait_s in (0.0, math.inf)]
    in_time_s, late_s = (steps(size, 0, *decodes, most, one_s).seconds * num_tokens / size for one_s in bounds_s)
    after_s = work.late_after_s
    return after_s + (1 - after_s / in_time_s) * late_s if 0 < after_s < in_time_s else in_time_s
