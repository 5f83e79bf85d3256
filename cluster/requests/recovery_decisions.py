"""The decisions about a request whose engines fail: go on or give up, where, from which position, and until when.

Pure: values in, decisions out, the clock passed in. recovery.py carries them out.

A request goes on under a new id and with the tokens that its client has, at the next position; the tokens are a
function of (seed, position) and of what is before them. A request is given up after max_attempts, and after two
engines have died with it: it may be what kills them. An engine that has decoded more of it clears it of the deaths
before: what killed those engines was not in what this engine computed. A request that lost its blocks to others after
new tokens has used up no attempt: it has gone on each time, so that this ends by itself, however short blocks are.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from actors.core.outputs.engine_core_outputs import Preemption
from actors.core.requests.request import EngineCoreRequest
from cluster.errors import DeadlineExceeded, EngineFailed, NoEngineAvailable
from cluster.requests.migration import PreemptedRequest
from cluster.routing.base import EngineT, Route, Router
from cluster.routing.encoders import choose_encoder
from cluster.routing.engine_connection import EngineDescriptor, EngineKey
from kv_transfer.params import PrefixSource

MAX_ENGINES_LOST: Final = 2
"""A request that has cost so many engines is not tried on another one."""


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """The limits to how long a request is kept alive.

    max_attempts:     the first one included
    engine_timeout_s: how long a request whose engine failed waits for one that can go on with it
    """

    max_attempts: int
    engine_timeout_s: float


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt that its engines have failed.

    error:             the reason, and whether the request can go on elsewhere
    output_token_ids:  every output token so far, those included that the request came with
    lost_engines:      the engines that are thought to have died with the request
    has_decoded:       whether its decode engine had given tokens
    was_out_of_blocks: whether its decode engine gave it up for want of blocks, after new tokens
    """

    error: EngineFailed
    output_token_ids: Sequence[int] = ()
    lost_engines: AbstractSet[EngineKey] = frozenset()
    has_decoded: bool = False
    was_out_of_blocks: bool = False


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Submit the request again as soon as engines serve, until limit_s at the latest."""

    request: EngineCoreRequest
    limit_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the request with this error."""

    error: EngineFailed | DeadlineExceeded


Decision: TypeAlias = TryAgain | GiveUp


@dataclass(slots=True)
class RecoveryDecisions:
    """One request over all of its attempts.

    original:   the request as its client sent it
    policy:     the limits
    deadline_s: the client's, on the clock whose time the methods are given
    request:    the request as the next attempt submits it
    """

    original: EngineCoreRequest
    policy: RecoveryPolicy
    deadline_s: float | None = None
    request: EngineCoreRequest = field(init=False)
    _num_failures: int = field(default=0, init=False)
    _num_migrations: int = field(default=0, init=False)
    _lost_engines: set[EngineKey] = field(default_factory=set, init=False)
    """Since the request has last gone on. An incarnation that is lost twice was cut off, and counts once."""

    def __post_init__(self) -> None:
        self.request = self.original

    def choose_route(self, router: Router, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Choose where the next attempt goes, and the engine that encodes its images. Raises NoEngineAvailable."""
        route = router.choose(self.request, engines)
        if self.request.encoder_inputs:
            asker = route.decode if route.prefill is None else route.prefill
            self.request = replace(self.request, encoder=choose_encoder(self.request, engines, asker.descriptor))
        return route

    def after_failure(self, failed: FailedAttempt, now_s: float) -> Decision:
        """Decide whether the request goes on after an attempt has failed."""
        if failed.has_decoded:
            self._lost_engines.clear()
        self._lost_engines |= failed.lost_engines
        self._num_failures += not failed.was_out_of_blocks
        error = failed.error
        # The client counts from what it came with, not from where this attempt began.
        error.num_new_tokens = len(failed.output_token_ids) - len(self.original.output_token_ids)
        if len(self._lost_engines) >= MAX_ENGINES_LOST:
            reason = f"{error.reason}; {len(self._lost_engines)} engines died with the request"
            return GiveUp(self._failed(reason, error.num_new_tokens, can_resume=False))
        if self._num_failures == self.policy.max_attempts or not error.can_resume:
            return GiveUp(error)
        give_up_s = now_s + self.policy.engine_timeout_s
        limit_s = give_up_s if self.deadline_s is None else min(give_up_s, self.deadline_s)
        return TryAgain(self._resubmit(failed.output_token_ids), limit_s)

    def after_wait(self, failed: FailedAttempt, waited: TryAgain, missing: NoEngineAvailable) -> GiveUp:
        """Decide what a request ends with for which no engine has come in time."""
        if waited.limit_s == self.deadline_s:
            return GiveUp(DeadlineExceeded(self.original.request_id))
        reason = f"{failed.error.reason}; then {missing}"
        return GiveUp(self._failed(reason, failed.error.num_new_tokens, can_resume=True))

    def preempted(self, num_output_tokens: int, preemption: Preemption) -> PreemptedRequest:
        """Describe the request for the migration's planner."""
        num_tokens = len(self.original.prompt_token_ids) + num_output_tokens
        return PreemptedRequest(num_tokens, preemption.num_wait_steps, self._num_migrations)

    def migrate(
        self, output_token_ids: Sequence[int], here: EngineDescriptor, preemption: Preemption
    ) -> EngineCoreRequest:
        """Make the request that another engine goes on with, which fetches what is cached where it was preempted."""
        self._num_migrations += 1
        source = PrefixSource(here.kv_address, preemption.num_computed_tokens)
        return replace(self._resubmit(output_token_ids), prefix_source=source, encoder_inputs=())

    def _resubmit(self, output_token_ids: Sequence[int]) -> EngineCoreRequest:
        """Make the request as another engine gets it: under a new id, and with the tokens so far."""
        number = self.request.attempt + 1
        self.request = replace(
            self.original,
            request_id=f"{self.original.request_id}+{number}",
            attempt=number,
            output_token_ids=list(output_token_ids),
        )
        return self.request

    def _failed(self, reason: str, num_new_tokens: int, *, can_resume: bool) -> EngineFailed:
        return EngineFailed(self.original.request_id, reason, num_new_tokens=num_new_tokens, can_resume=can_resume)
