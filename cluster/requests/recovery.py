"""Takes a request through as many attempts as it needs: when an engine fails, another one goes on with the request.

recovery_decisions.py decides whether, where and how a request goes on; this file carries the decisions out. The loop
in Recovery.outputs() is the only loop over attempts; prompts of vector requests go through it, too. A client notices a
further attempt only as a pause. Each attempt has an id of its own at the engines, so that late outputs of an earlier
attempt cannot be mistaken for its outputs.

A request that its decode engine has preempted may migrate to another engine (migration.py). A migration is neither a
failure nor an attempt. A request whose prompt waits may go on at an engine that has run out of prompts (rerouting.py):
that is no failure, and it is submitted once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from actors.core.outputs.engine_core_outputs import EngineCoreOutput, Preemption, RequestTimings
from actors.core.requests.request import EngineCoreRequest
from cluster.errors import EngineFailed, ModelVersionLeft, NoEngineAvailable
from cluster.observability.record_writer import RecordWriter
from cluster.requests.attempt import Attempt
from cluster.requests.moves.migration import MigrationPlanner
from cluster.requests.moves.rerouting import Rerouting
from cluster.requests.recovery_decisions import FailedAttempt, GiveUp, RecoveryDecisions, RecoveryPolicy, TryAgain
from cluster.requests.turns import Turns
from cluster.routing.base import Route, Router
from cluster.routing.engine_connection import EngineConnection, EnginePool

logger = logging.getLogger(__name__)


class Recovery:
    """Submits one request until it is finished.

    num_attempts: how often the request was submitted
    attempt:      the newest attempt; None before the first
    """

    def __init__(
        self,
        router: Router,
        engines: EnginePool,
        request: EngineCoreRequest,
        deadline_s: float | None,
        policy: RecoveryPolicy,
        migration_planner: MigrationPlanner | None = None,
        turns: Turns | None = None,
        rerouting: Rerouting | None = None,
        *,
        record: RecordWriter | None = None,
    ) -> None:
        """Submit nothing yet: outputs() does.

        deadline_s:        when the client stops waiting, on the event loop's clock; None if it has no deadline
        migration_planner: chooses where a preempted request migrates to; None: it stays where it is
        turns:             shared by all requests of one call; None if the call has a single request
        rerouting:         looks at the request while its prompt waits; None: it stays where it is
        record:            is told of every attempt; None if the request leaves no record
        """
        self._router = router
        self._engines = engines
        self._original = request
        self._decisions = RecoveryDecisions(request, policy, deadline_s)
        self._deadline_s = deadline_s
        self._migration_planner = migration_planner
        self._turns = turns
        self._rerouting = rerouting
        self._waits_as: str | None = None
        """The id under which `rerouting` knows the request."""
        self._record = record
        self._num_migrations_before = 0
        self._prefill_timings: RequestTimings | None = None
        self._submitted_ids: list[str] = []
        """The ids under which engines have the request now, as the router was told of them."""
        self.num_attempts = 0
        self.attempt: Attempt | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the request's prompt."""
        return len(self._original.prompt_token_ids)

    @property
    def num_migrations(self) -> int:
        """How often another decode engine has taken the request over after a preemption."""
        return self._num_migrations_before + (self.attempt.num_migrations if self.attempt is not None else 0)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from a prefix cache when the prompt was computed for the first time.

        Later attempts do not count: the blocks that they find are mostly those of an earlier attempt.
        """
        timings = self._prefill_timings
        if timings is None and self.attempt is not None:
            timings = self.attempt.prefill_timings
        return 0 if timings is None else min(timings.num_cached_tokens, self.num_prompt_tokens)

    async def outputs(self) -> AsyncGenerator[EngineCoreOutput, None]:
        """Yield every output in order, each position once. Closing the generator aborts the running attempt.

        Raises NoEngineAvailable (only before the first attempt), ModelVersionLeft, EngineFailed, DeadlineExceeded, or
        InvalidRequest if an engine finds a mistake that the ingress could not see.
        """
        try:
            async with aclosing(self._outputs_of_attempts()) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._leave()

    async def _outputs_of_attempts(self) -> AsyncGenerator[EngineCoreOutput, None]:
        await self._next_turn()
        route = self._choose_route()
        while True:
            try:
                async with Attempt(route, self._decisions.request, self._deadline_s) as attempt:
                    self._begin(attempt)
                    async for output in attempt:
                        self._wait_no_more()
                        if output.preemption is not None:
                            self._migrate_or_stay(attempt, output.preemption)
                            continue
                        if output.finish_reason is not None:
                            # The router learns of the end before the client does, because the client's next request may
                            # follow at once.
                            await self._next_turn()
                            self._router.on_end(self._original, attempt.token_ids, attempt.route)
                            self._leave()
                        yield output
                        if output.finish_reason is not None:
                            return
            except EngineFailed as error:
                self._leave()
                if self._record is not None:
                    self._record.fail(error.reason, asyncio.get_running_loop().time())
                route = await self._route_after(attempt.failed_by(error))

    def _begin(self, attempt: Attempt) -> None:
        """Keep the migrations and times of the attempt before this one, and tell record and router about this one."""
        if self.attempt is not None:
            self._num_migrations_before += self.attempt.num_migrations
            self._prefill_timings = self._prefill_timings or self.attempt.prefill_timings
        self.attempt = attempt
        self._note_submission(attempt)

    def _note_submission(self, attempt: Attempt) -> None:
        request, route = self._decisions.request, attempt.route
        self.num_attempts += 1
        if self._record is not None:
            self._record.begin(attempt.record, attempt.began_at)
        self._start(request, route)
        if self._rerouting is not None and attempt.is_waiting:
            self._waits_as = request.request_id
            self._rerouting.wait(self._waits_as, route.computing.descriptor.key, partial(self._reroute, attempt))

    def _wait_no_more(self) -> None:
        if self._waits_as is not None and self._rerouting is not None:
            self._rerouting.forget(self._waits_as)
            self._waits_as = None

    def _reroute(self, attempt: Attempt) -> bool:
        """Submit the request, whose prompt waits, to another engine if the router says so. Returns whether it did."""
        if not attempt.is_waiting:
            return False
        try:
            engines = self._engines.snapshot()
        except ModelVersionLeft:
            return False  # The engines that have the request can still finish it.
        here = attempt.route.computing.descriptor
        route = self._decisions.reroute(self._router, attempt.token_ids, engines)
        if route is None:
            return False
        self._leave()
        if self._record is not None:
            self._record.fail("", asyncio.get_running_loop().time())
        attempt.reroute(route, self._decisions.request)
        self._note_submission(attempt)
        logger.info(
            "a request that waited goes to an engine without prompts",
            extra={
                "request_id": self._original.request_id,
                "engine_id": here.engine_id,
                "target_engine_id": route.computing.descriptor.engine_id,
            },
        )
        return True

    def _start(self, request: EngineCoreRequest, route: Route[EngineConnection]) -> None:
        self._router.on_start(request, route)
        self._submitted_ids.append(request.request_id)

    def _leave(self) -> None:
        """Tell the router that no engine has the request any more, under any of its ids."""
        self._wait_no_more()
        for request_id in self._submitted_ids:
            self._router.on_leave(request_id)
        self._submitted_ids.clear()

    async def _route_after(self, failed: FailedAttempt) -> Route[EngineConnection]:
        """Find engines for the next attempt; wait for them if none serve. Raises the error that ends the request."""
        decision = self._decisions.after_failure(failed, asyncio.get_running_loop().time())
        if isinstance(decision, GiveUp):
            raise decision.error from failed.error
        logger.warning(
            "a request continues in another attempt",
            extra={
                "request_id": self._original.request_id,
                "num_output_tokens": len(failed.output_token_ids),
                "reason": str(failed.error),
            },
        )
        try:
            return await self._wait_for_route(decision)
        except NoEngineAvailable as missing:
            raise self._decisions.after_wait(failed, decision, missing).error from missing

    async def _wait_for_route(self, decision: TryAgain) -> Route[EngineConnection]:
        """Choose engines as soon as any serve. Raises NoEngineAvailable if none came in time."""
        while True:
            change = self._engines.next_change()
            try:
                return self._choose_route()
            except NoEngineAvailable:
                if not await _is_set_in_time(change, decision.limit_s):
                    raise

    def _choose_route(self) -> Route[EngineConnection]:
        return self._decisions.choose_route(self._router, self._engines.snapshot())

    async def _next_turn(self) -> None:
        if self._turns is not None:
            await self._turns.next()

    def _migrate_or_stay(self, attempt: Attempt, preemption: Preemption) -> None:
        """Submit a preempted request to another engine, if one has room and will be quicker than waiting."""
        if self._migration_planner is None:
            return
        try:
            engines = self._engines.snapshot()
        except ModelVersionLeft:
            return  # The engine that has the request can still finish it.
        preempted = self._decisions.preempted(len(attempt.token_ids), preemption)
        here = attempt.route.decode.descriptor
        target = self._migration_planner.find_target(preempted, here, engines)
        if target is None:
            return
        request = self._decisions.migrate(attempt.token_ids, here, preemption)
        attempt.migrate(target, request)
        self._start(request, Route(None, target))
        logger.info(
            "a preempted request migrates",
            extra={
                "request_id": self._original.request_id,
                "engine_id": here.engine_id,
                "target_engine_id": target.descriptor.engine_id,
                "num_tokens": preempted.num_tokens,
                "num_wait_steps": preempted.num_wait_steps,
            },
        )


async def _is_set_in_time(event: asyncio.Event, limit_s: float) -> bool:
    try:
        async with asyncio.timeout_at(limit_s):
            return await event.wait()
    except TimeoutError:
        return False
