"""A request over as many attempts as it takes: what one engine lost, another goes on with.

An attempt that failed by its engines' fault is followed by one elsewhere, which is given the tokens that the client has
and goes on at the next position. Tokens are a function of (seed, position) and what is before them, so the client sees
nothing of it but a pause. Each attempt has an id of its own at the engines: what is left of an earlier one cannot be
taken for it.

A request that its decode engine has preempted may go on elsewhere too (migration.py). That is no failure, and
no attempt.

A request is given up after max_attempts, and after two engines have died with it: it may be what kills them. An engine
that has decoded more of it clears it of the deaths before: what killed those was not in what that engine computed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Final

from actors.core.outputs import EngineCoreOutput, Preemption, RequestTimings
from actors.core.requests.request import EngineCoreRequest
from cluster.errors import DeadlineExceeded, EngineFailed, ModelVersionLeft, NoEngineAvailable
from cluster.requests.attempt import Attempt
from cluster.requests.migration import MigrationPlanner, PreemptedRequest
from cluster.requests.turns import Turns
from cluster.requests.waiting import choose_in_time
from cluster.routing.base import Route, Router
from cluster.routing.encoders import choose_encoder
from cluster.routing.engine_connection import EngineConnection, EngineKey, EnginePool
from kv_transfer.params import PrefixSource

logger = logging.getLogger(__name__)

MAX_ENGINES_LOST: Final = 2
"""A request that has cost so many is not tried on another."""


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """How long a request is kept alive.

    max_attempts:     the first one included
    engine_timeout_s: how long a request whose engine failed waits for one that can go on with it
    """

    max_attempts: int = 4
    engine_timeout_s: float = 60.0


class Recovery:
    """attempt is the newest one, for its reports; None before the first."""

    def __init__(
        self,
        router: Router,
        engines: EnginePool,
        request: EngineCoreRequest,
        deadline_s: float | None,
        policy: RecoveryPolicy,
        migration_planner: MigrationPlanner | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Begin nothing yet.

        deadline_s: on the event loop's clock
        migration_planner: without it a preempted request stays where it is
        turns:      of the call that the request belongs to, if it has others
        """
        self._router = router
        self._engines = engines
        self._original = request
        self._request = request
        self._deadline_s = deadline_s
        self._policy = policy
        self._migration_planner = migration_planner
        self._turns = turns
        self._num_migrations_begun = 0
        self._num_migrations_before = 0
        self._lost_engines: set[EngineKey] = set()
        """Since it has last gone on. A life of an engine that is lost twice was cut off, and counts once."""
        self._prefill_timings: RequestTimings | None = None
        self.attempt: Attempt | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Of the request."""
        return len(self._original.prompt_token_ids)

    @property
    def num_attempts(self) -> int:
        """Attempts that were begun."""
        num_resubmissions = self._request.attempt - self._original.attempt - self._num_migrations_begun
        return num_resubmissions + (self.attempt is not None)

    @property
    def num_moves(self) -> int:
        """How often another decode engine has taken it over after a preemption."""
        return self._num_migrations_before + (self.attempt.num_moves if self.attempt is not None else 0)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from a prefix cache when the prompt was computed for the first time.

        What a further attempt finds is mostly what an earlier one has left there.
        """
        timings = self._prefill_timings
        if timings is None and self.attempt is not None:
            timings = self.attempt.prefill_timings
        return 0 if timings is None else min(timings.num_cached_tokens, self.num_prompt_tokens)

    async def outputs(self) -> AsyncGenerator[EngineCoreOutput, None]:
        """Every output in order, each position once. Closing it aborts the attempt that runs.

        Raises NoEngineAvailable before the first attempt; EngineFailed, DeadlineExceeded.
        """
        await self._next_turn()
        route = self._choose()
        num_failures = 0
        while True:
            try:
                async with Attempt(route, self._request, self._deadline_s) as attempt:
                    self.attempt = attempt
                    self._router.on_start(self._request, route)
                    async for output in attempt:
                        if output.preemption is not None:
                            self._migrate_or_stay(attempt, output.preemption)
                            continue
                        if output.finish_reason is not None:
                            # Before it is told: the client's next turn may follow at once.
                            await self._next_turn()
                            self._router.on_end(self._original, attempt.token_ids, attempt.route)
                        yield output
                        if output.finish_reason is not None:
                            return
            except EngineFailed as failure:
                if attempt.has_decoded:
                    self._lost_engines.clear()
                self._lost_engines |= attempt.lost_engines
                self._prefill_timings = self._prefill_timings or attempt.prefill_timings
                # Each time it has gone on before: that ends by itself, however often blocks are short.
                num_failures += not attempt.is_stranded_on_the_way
                self._give_up_or_go_on(failure, attempt, is_last=num_failures == self._policy.max_attempts)
                route = await self._choose_again(failure)
                self._num_migrations_before += attempt.num_moves

    async def _next_turn(self) -> None:
        if self._turns is not None:
            await self._turns.next()

    def _migrate_or_stay(self, attempt: Attempt, preemption: Preemption) -> None:
        """Let another engine go on with a preempted request, if one has room for it and that is quicker."""
        if self._migration_planner is None:
            return
        try:
            engines = self._engines.snapshot()
        except ModelVersionLeft:
            return  # Where it is, it can end.
        num_tokens = self.num_prompt_tokens + len(attempt.token_ids)
        preempted = PreemptedRequest(num_tokens, preemption.num_wait_steps, self._num_migrations_begun)
        here = attempt.route.decode.descriptor
        target = self._migration_planner.find_target(preempted, here, engines)
        if target is None:
            return
        self._num_migrations_begun += 1
        request = self._resubmit(attempt)
        attempt.migrate(
            target,
            replace(
                request,
                prefix_source=PrefixSource(here.kv_address, preemption.num_computed_tokens),
                encoder_inputs=(),
            ),
        )
        logger.info(
            "a preempted request moves",
            extra={
                "request_id": self._original.request_id,
                "engine_id": here.engine_id,
                "target_engine_id": target.descriptor.engine_id,
                "num_tokens": num_tokens,
                "num_wait_steps": preemption.num_wait_steps,
            },
        )

    def _give_up_or_go_on(self, failure: EngineFailed, attempt: Attempt, *, is_last: bool) -> None:
        token_ids = list(attempt.token_ids)
        request_id = self._original.request_id
        # The client counts from what it came with, not from where this attempt began.
        failure.num_new_tokens = len(token_ids) - len(self._original.output_token_ids)
        if len(self._lost_engines) >= MAX_ENGINES_LOST:
            reason = f"{failure.reason}; {len(self._lost_engines)} engines died with the request"
            raise EngineFailed(request_id, reason, num_new_tokens=failure.num_new_tokens, can_resume=False) from failure
        if is_last or not failure.can_resume:
            raise failure
        logger.warning(
            "a request goes on elsewhere",
            extra={"request_id": request_id, "num_output_tokens": len(token_ids), "reason": str(failure)},
        )
        self._resubmit(attempt)

    def _resubmit(self, attempt: Attempt) -> EngineCoreRequest:
        """The request as another engine gets it: under a new id, and with the tokens so far."""
        number = self._request.attempt + 1
        self._request = replace(
            self._original,
            request_id=f"{self._original.request_id}+{number}",
            attempt=number,
            output_token_ids=list(attempt.token_ids),
        )
        return self._request

    def _choose(self) -> Route[EngineConnection]:
        engines = self._engines.snapshot()
        route = self._router.choose(self._request, engines)
        if self._request.encoder_inputs:
            asker = route.decode if route.prefill is None else route.prefill
            encoder = choose_encoder(self._request, engines, asker.descriptor)
            self._request = replace(self._request, encoder=encoder)
        return route

    async def _choose_again(self, failure: EngineFailed) -> Route[EngineConnection]:
        """Choose engines to go on with; wait for them if there are none."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._policy.engine_timeout_s
        limit_s = give_up_s if self._deadline_s is None else min(give_up_s, self._deadline_s)
        try:
            return await choose_in_time(self._choose, self._engines, limit_s)
        except NoEngineAvailable as missing:
            if limit_s != give_up_s:
                raise DeadlineExceeded(self._original.request_id) from None
            raise self._unserved(failure, missing) from missing

    def _unserved(self, failure: EngineFailed, missing: NoEngineAvailable) -> EngineFailed:
        num_new_tokens = len(self._request.output_token_ids) - len(self._original.output_token_ids)
        reason = f"{failure.reason}; then {missing}"
        return EngineFailed(self._original.request_id, reason, num_new_tokens=num_new_tokens, can_resume=True)
