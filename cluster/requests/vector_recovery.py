"""One prompt's vector, over as many attempts as it takes: what one engine lost, another computes from the start.

There is nothing to go on from, and a vector comes in one piece: so an attempt is a submission to one engine, and the
next one the same under another id. A prompt is given up after max_attempts, and after two engines have died with it: it
may be what kills them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass, field, replace

from actors.core.outputs import EngineCoreOutput
from actors.core.requests.request import EngineCoreRequest
from cluster.errors import DeadlineExceeded, EngineFailed, NoEngineAvailable
from cluster.requests.attempt import EngineStream
from cluster.requests.recovery import MAX_ENGINES_LOST, RecoveryPolicy
from cluster.requests.turns import Turns
from cluster.requests.waiting import choose_in_time
from cluster.routing.base import Route, Router
from cluster.routing.engine_connection import EngineConnection, EngineKey, EnginePool
from cluster.vectors.vector_engines import choose_engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptVector:
    """num_cached_tokens: of the prompt, those that came from a prefix cache"""

    values: list[float]
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class VectorRecovery:
    """The parts that the prompts of one call share. deadline_s: on the event loop's clock"""

    router: Router
    engines: EnginePool
    policy: RecoveryPolicy
    deadline_s: float | None
    turns: Turns = field(default_factory=Turns)

    async def vector(self, request: EngineCoreRequest) -> PromptVector:
        """Compute a prompt's vector; cancelling it frees what the prompt holds.

        Raises NoEngineAvailable before the first attempt; ModelVersionLeft, EngineFailed, DeadlineExceeded.
        """
        await self.turns.next()
        route = choose_engine(self.router, request, self.engines)
        lost_engines: set[EngineKey] = set()
        for number in range(1, self.policy.max_attempts + 1):
            attempt = request
            if number > 1:
                attempt = replace(request, request_id=f"{request.request_id}+{number - 1}", attempt=number - 1)
            stream = EngineStream(route.decode, replace(attempt, prefix_source=route.prefix_source))
            try:
                self.router.on_start(attempt, route)
                return await self._vector_of(stream, attempt)
            except EngineFailed as failure:
                if stream.has_died:
                    lost_engines.add(route.decode.descriptor.key)
                if len(lost_engines) >= MAX_ENGINES_LOST:
                    reason = f"{failure.reason}; {len(lost_engines)} engines died with the request"
                    raise EngineFailed(request.request_id, reason, num_new_tokens=0, can_resume=False) from failure
                if number == self.policy.max_attempts or not failure.can_resume:
                    raise
                logger.warning(
                    "a prompt is computed elsewhere",
                    extra={"request_id": request.request_id, "reason": str(failure)},
                )
                route = await self._choose_again(request, failure)
            finally:
                stream.abort()
        raise AssertionError("the last attempt has ended it")

    async def _vector_of(self, stream: EngineStream, request: EngineCoreRequest) -> PromptVector:
        try:
            async with asyncio.timeout_at(self.deadline_s):
                output = await _last_output(stream)
        except TimeoutError:
            raise DeadlineExceeded(request.request_id) from None
        if output is not None and output.pooling_output is not None:
            return self._take(output, output.pooling_output, request)
        if self.deadline_s is not None and asyncio.get_running_loop().time() >= self.deadline_s:
            # An engine that has dropped the request for its deadline is not to blame.
            raise DeadlineExceeded(request.request_id)
        reason = stream.failure or f"engine {stream.engine_id} let go of it without a vector"
        raise EngineFailed(request.request_id, reason, num_new_tokens=0, can_resume=stream.can_resume)

    @staticmethod
    def _take(output: EngineCoreOutput, values: list[float], request: EngineCoreRequest) -> PromptVector:
        num_prompt_tokens = len(request.prompt_token_ids)
        if not math.isfinite(sum(values)):
            reason = "the model's numbers for this prompt are not finite"
            raise EngineFailed(request.request_id, reason, num_new_tokens=0, can_resume=False)
        num_cached_tokens = 0 if output.timings is None else output.timings.num_cached_tokens
        return PromptVector(values, num_prompt_tokens, min(num_cached_tokens, num_prompt_tokens))

    async def _choose_again(self, request: EngineCoreRequest, failure: EngineFailed) -> Route[EngineConnection]:
        give_up_s = asyncio.get_running_loop().time() + self.policy.engine_timeout_s
        limit_s = give_up_s if self.deadline_s is None else min(give_up_s, self.deadline_s)
        try:
            return await choose_in_time(
                lambda: choose_engine(self.router, request, self.engines), self.engines, limit_s
            )
        except NoEngineAvailable as missing:
            if limit_s != give_up_s:
                raise DeadlineExceeded(request.request_id) from None
            reason = f"{failure.reason}; then {missing}"
            raise EngineFailed(request.request_id, reason, num_new_tokens=0, can_resume=True) from missing


async def _last_output(stream: EngineStream) -> EngineCoreOutput | None:
    """None if the engine has failed, or has let go of it."""
    while True:
        output = await stream.next_output()
        if output is None or output.finished:
            return output
