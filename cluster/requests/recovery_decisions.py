"""Decides about a request whose engines fail: go on or give up, where, from which position, and until when.

Pure: values in, decisions out, the clock passed in. recovery.py carries the decisions out.

A request goes on under a new id, after the tokens that its client has; its further tokens are the same as without the
failure, since a token is a function of the seed, its position and the tokens before it. A request is given up after
max_attempts. It is also given up once two engines have died with it, since the request may be what kills them; but when
an engine has decoded more of it, earlier deaths do not count any more: the request cannot have caused them. An attempt
that made new tokens and then ran out of blocks does not count: it made progress, so such attempts end by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from actors.core.outputs.engine_core_outputs import Preemption
from actors.core.requests.request import EngineCoreRequest
from cluster.errors import DeadlineExceeded, EngineFailed, NoEngineAvailable
from cluster.requests.moves.migration import PreemptedRequest
from cluster.routing.base import EngineT, Route, Router
from cluster.routing.encoders import choose_encoder
from cluster.routing.engine_connection import EngineDescriptor, EngineKey
from kv_transfer.params import PrefixSource

MAX_ENGINES_LOST: Final = 2
"""A request with which this many engines have died is not submitted to another one."""


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """The limits of a request's recovery.

    max_attempts:     how many attempts a request may have, including the first
    engine_timeout_s: how long a request whose engine failed waits for another engine to serve
    """

    max_attempts: int
    engine_timeout_s: float


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt that ended because its engines failed.

    error:             the reason, and whether another attempt can go on
    output_token_ids:  every output token so far, including those that the request came with
    lost_engines:      the engines that have probably died with the request
    has_decoded:       whether the attempt's decode engine had given tokens
    was_out_of_blocks: whether the decode engine gave the request up, after new tokens, because it had too few blocks
    """

    error: EngineFailed
    output_token_ids: Sequence[int] = ()
    lost_engines: AbstractSet[EngineKey] = frozenset()
    has_decoded: bool = False
    was_out_of_blocks: bool = False


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Submit RecoveryDecisions.request as soon as engines serve; give up if none serve by limit_s.

    limit_s: on the clock whose time after_failure() was given
    """

    limit_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the request with this error."""

    error: EngineFailed | DeadlineExceeded


Decision: TypeAlias = TryAgain | GiveUp


@dataclass(slots=True)
class RecoveryDecisions:
    """The decisions about one request, over all of its attempts.

    original:   the request as its client sent it
    policy:     the limits
    deadline_s: when the client stops waiting, on the clock whose time after_failure() is given; None: no deadline
    request:    the request as the current or next attempt submits it
    """

    original: EngineCoreRequest
    policy: RecoveryPolicy
    deadline_s: float | None = None
    request: EngineCoreRequest = field(init=False)
    _num_failures: int = field(default=0, init=False)
    _num_migrations: int = field(default=0, init=False)
    _was_rerouted: bool = field(default=False, init=False)
    _lost_engines: set[EngineKey] = field(default_factory=set, init=False)
    """The engines that have died with the request since it last made progress; an incarnation counts once."""

    def __post_init__(self) -> None:
        self.request = self.original

    def choose_route(self, router: Router, engines: Sequence[EngineT]) -> Route[EngineT]:
        """Choose the next attempt's engines, and the one that encodes the images. Raises NoEngineAvailable."""
        route = router.choose(self.request, engines)
        if self.request.encoder_inputs:
            asker = route.decode if route.prefill is None else route.prefill
            self.request = replace(self.request, encoder=choose_encoder(self.request, engines, asker.descriptor))
        return route

    def reroute(
        self, router: Router, output_token_ids: Sequence[int], engines: Sequence[EngineT]
    ) -> Route[EngineT] | None:
        """Choose other engines for the request, whose prompt waits to be computed; None: it stays where it is.

        It goes elsewhere once, so that no two engines send it to and fro. A request with images stays: their embeddings
        are on their way.
        """
        if self._was_rerouted or self.original.encoder_inputs:
            return None
        again = self._again(output_token_ids)
        route = router.reroute(self.request.request_id, again, engines)
        if route is not None:
            self.request, self._was_rerouted = again, True
        return route

    def after_failure(self, failed: FailedAttempt, now_s: float) -> Decision:
        """Decide whether the request goes on after an attempt has failed, and if so make the next attempt's request.

        now_s: the time on the clock of deadline_s
        """
        if failed.has_decoded:
            self._lost_engines.clear()
        self._lost_engines |= failed.lost_engines
        self._num_failures += not failed.was_out_of_blocks
        # The client counts from the tokens that it sent, not from where this attempt began.
        error = failed.error.with_num_new_tokens(self._num_new_tokens(failed))
        if len(self._lost_engines) >= MAX_ENGINES_LOST:
            reason = f"{error.reason}; {len(self._lost_engines)} engines died with the request"
            return GiveUp(self._failed(reason, error.num_new_tokens, can_resume=False))
        if self._num_failures == self.policy.max_attempts or not error.can_resume:
            return GiveUp(error)
        give_up_s = now_s + self.policy.engine_timeout_s
        limit_s = give_up_s if self.deadline_s is None else min(give_up_s, self.deadline_s)
        self._resubmit(failed.output_token_ids)
        return TryAgain(limit_s)

    def after_wait(self, failed: FailedAttempt, waited: TryAgain, missing: NoEngineAvailable) -> GiveUp:
        """Choose the error of a request that waited for engines until its limit, and found none."""
        if waited.limit_s == self.deadline_s:
            return GiveUp(DeadlineExceeded(self.original.request_id))
        reason = f"{failed.error.reason}; then {missing}"
        return GiveUp(self._failed(reason, self._num_new_tokens(failed), can_resume=True))

    def preempted(self, num_output_tokens: int, preemption: Preemption) -> PreemptedRequest:
        """Describe the request for the MigrationPlanner."""
        num_tokens = len(self.original.prompt_token_ids) + num_output_tokens
        return PreemptedRequest(num_tokens, preemption.num_wait_steps, self._num_migrations)

    def migrate(
        self, output_token_ids: Sequence[int], here: EngineDescriptor, preemption: Preemption
    ) -> EngineCoreRequest:
        """Make the request for the engine to migrate to, which fetches the blocks that are still cached at `here`."""
        self._num_migrations += 1
        source = PrefixSource(here.kv_address, preemption.num_computed_tokens)
        return replace(self._resubmit(output_token_ids), prefix_source=source, encoder_inputs=())

    def _resubmit(self, output_token_ids: Sequence[int]) -> EngineCoreRequest:
        self.request = self._again(output_token_ids)
        return self.request

    def _again(self, output_token_ids: Sequence[int]) -> EngineCoreRequest:
        """Return the request for another submission: with a new id, and with the tokens so far."""
        number = self.request.attempt + 1
        return replace(
            self.original,
            request_id=f"{self.original.request_id}+{number}",
            attempt=number,
            output_token_ids=list(output_token_ids),
        )

    def _num_new_tokens(self, failed: FailedAttempt) -> int:
        """Return how many output tokens the client has received in answer to its request."""
        return len(failed.output_token_ids) - len(self.original.output_token_ids)

    def _failed(self, reason: str, num_new_tokens: int, *, can_resume: bool) -> EngineFailed:
        return EngineFailed(self.original.request_id, reason, num_new_tokens=num_new_tokens, can_resume=can_resume)
