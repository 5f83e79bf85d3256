"""Engines in processes of their own, and one client of them all, which goes on elsewhere when an engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from actors.config import EngineConfig
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from cluster.requests.attempt import Attempt
from cluster.requests.moves.migration import EngineStats
from cluster.requests.recovery import Recovery
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.routing.base import Route
from cluster.routing.engine_connection import EngineConnection, EngineRole
from cluster.routing.least_loaded import LeastLoadedPair
from cluster.sessions.request_stream import RequestStream
from cluster.sessions.session import EngineSession
from kv_transfer.config import KVTransferConfig
from kv_transfer.params import EngineAddress, KVTransferParams, TransferRole
from tests.engine_pair import engine_config
from tests.faults.engine_child import EngineSpec, Place
from tests.faults.engine_house import EngineHouse
from tests.faults.engine_process import EngineProcess
from tests.faults.fault_points import Fault
from tests.reference import greedy_tokens, random_prompt
from tests.trusted import member

NUM_TOKENS: Final = 8
NUM_PROMPT_TOKENS: Final = 96
NUM_CHUNKS: Final = 6
"""The number of chunks of such a prompt: so many steps, with the configuration below."""
TRANSFER: Final = KVTransferConfig(
    transport="tcp",
    connect_timeout_s=30.0,
    ready_timeout_s=30.0,
    handoff_timeout_s=30.0,
    chunk_timeout_s=30.0,
    link_timeout_s=30.0,
)
"""No test waits for one of these deadlines, and no machine is so busy that one passes without a fault."""
IMPATIENT: Final = TRANSFER.model_copy(
    update={"connect_timeout_s": 1.0, "ready_timeout_s": 1.0, "handoff_timeout_s": 1.0, "chunk_timeout_s": 0.5}
)
"""For tests that have to outwait it. On a busy machine its deadlines may pass without any fault."""
SMALL_POOL: Final = 32
"""Blocks."""
_ANSWER_TIMEOUT_S: Final = 60.0


def small_engine(directory: Path, **settings: Any) -> EngineConfig:
    """Blocks of 8 tokens, steps of 16. settings: of engine_config()."""
    defaults = {"block_size": 8, "num_blocks": 96, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    return engine_config(directory, **(defaults | {"transfer": TRANSFER} | settings))


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and what has to come out of it."""

    request: EngineCoreRequest
    expected: list[int]

    def of_model(self, directory: Path) -> Question:
        """The same request to another checkpoint."""
        expected = greedy_tokens(directory, tuple(self.request.prompt_token_ids), len(self.expected))
        return replace(self, expected=expected)


class LiveEngines:
    """An async context manager; an EnginePool of the engines that live.

    directory: of the checkpoint
    """

    def __init__(
        self,
        house: EngineHouse,
        directory: Path,
        *,
        is_pool_shared: bool = False,
        place_of: Mapping[EngineRole, Place] | None = None,
    ) -> None:
        """place_of: where engines of a role run; None: all of them here."""
        self.directory = directory
        self._house = house
        self._is_pool_shared = is_pool_shared
        self._place_of = place_of or dict.fromkeys(EngineRole, Place())
        self._link_kind = "SharedMemoryLink" if is_pool_shared and place_of is None else "TcpLink"
        self._processes: list[EngineProcess] = []
        self._sessions: dict[tuple[str, int], EngineSession] = {}
        self._change = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            await session.close()
        for process in self._processes:
            self._house.give_back(process)

    async def start_pair(self, *, is_fresh: bool = False, **settings: Any) -> tuple[EngineProcess, EngineProcess]:
        """A prefill and a decode engine. is_fresh: see start(). settings: of engine_config(), for both."""
        prefill = await self.start("prefill-0", EngineRole.PREFILL, is_fresh=is_fresh, **settings)
        return prefill, await self.start("decode-0", EngineRole.DECODE, is_fresh=is_fresh, **settings)

    async def start(
        self, engine_id: str, role: EngineRole, *, is_fresh: bool = False, **settings: Any
    ) -> EngineProcess:
        """An engine, and a session with it. is_fresh: not one that earlier tests have left links in."""
        config = small_engine(self.directory, **settings)
        spec = EngineSpec(engine_id, 0, config, self._place_of[role], is_pool_shared=self._is_pool_shared)
        return await self.start_as(spec, role, is_fresh=is_fresh)

    async def start_as(self, spec: EngineSpec, role: EngineRole, *, is_fresh: bool = False) -> EngineProcess:
        """Such an engine, of whatever incarnation, and a session with it."""
        take = functools.partial(self._house.take, spec, role, is_fresh=is_fresh)
        return await self._join(await asyncio.to_thread(take))

    async def restart(self, process: EngineProcess, *, same_port: bool = False) -> EngineProcess:
        """The next incarnation of an engine that is dead."""
        await process.wait_dead()
        take = functools.partial(self._house.take_next_incarnation, process, same_port=same_port)
        return await self._join(await asyncio.to_thread(take))

    async def _join(self, process: EngineProcess) -> EngineProcess:
        self._processes.append(process)
        session = EngineSession(process.descriptor, member(), timeout_s=10.0)
        await session.open()
        self._sessions[process.spec.engine_id, process.spec.incarnation] = session
        change, self._change = self._change, asyncio.Event()
        change.set()
        return process

    def session(self, process: EngineProcess) -> EngineSession:
        """The client's session with it."""
        return self._sessions[process.spec.engine_id, process.spec.incarnation]

    def snapshot(self) -> list[EngineConnection]:
        """EnginePool: those whose session stands."""
        return [session for session in self._sessions.values() if not session.is_lost]

    def stats(self) -> EngineStats:
        """The newest counters of each engine, for a MigrationPlanner."""
        return {one.descriptor.key: one.last_stats for one in self._sessions.values() if one.last_stats is not None}

    def next_change(self) -> asyncio.Event:
        """EnginePool: set when an engine has come."""
        return self._change

    def ask(
        self,
        *,
        num_prompt_tokens: int = NUM_PROMPT_TOKENS,
        num_tokens: int = NUM_TOKENS,
        seed: int | None = None,
        may_hit_cache: bool = False,
    ) -> Question:
        """A new request. seed: of the prompt. may_hit_cache: it may share cached blocks with others of its kind."""
        number = next(self._house.numbers)
        prompt = random_prompt(num_prompt_tokens, seed=number if seed is None else seed)
        request = EngineCoreRequest(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
            eos_token_ids=(0,),
            cache_salt=None if may_hit_cache else f"r{number}",
        )
        return Question(request, greedy_tokens(self.directory, tuple(prompt), num_tokens))

    async def check(self, question: Question) -> None:
        """Have it answered by whatever pair lives, as often as it takes, and compare."""
        recovery = Recovery(
            LeastLoadedPair(), self, question.request, None, RecoveryPolicy(max_attempts=4, engine_timeout_s=60.0)
        )
        token_ids: list[int] = []
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            async for output in recovery.outputs():
                # Outputs come in the order of their positions, each position once.
                assert output.first_position == len(token_ids)
                token_ids += output.new_token_ids
        assert token_ids == question.expected, question.request.request_id

    async def check_pair(
        self,
        question: Question,
        prefill: EngineProcess | None,
        decode: EngineProcess,
        has_begun: asyncio.Event | None = None,
    ) -> None:
        """Have it answered by these two, in one attempt, and compare. Raises EngineFailed.

        has_begun: set when the first token is there
        """
        route: Route[EngineConnection] = Route(None if prefill is None else self.session(prefill), self.session(decode))
        async with asyncio.timeout(_ANSWER_TIMEOUT_S), Attempt(route, question.request, None) as attempt:
            async for output in attempt:
                if has_begun is not None:
                    has_begun.set()
                if output.finish_reason is not None:
                    break
        assert list(attempt.token_ids) == question.expected, question.request.request_id

    @contextlib.asynccontextmanager
    async def others_in_all_blocks(self, engine: EngineProcess, num_requests: int = 2) -> AsyncIterator[None]:
        """While other requests run in this engine alone, which compute into every block of a pool of SMALL_POOL."""
        begun = [asyncio.Event() for _ in range(num_requests)]
        async with asyncio.TaskGroup() as tasks:
            for has_begun in begun:
                question = self.ask(num_tokens=SMALL_POOL * 8 // num_requests - NUM_PROMPT_TOKENS)
                tasks.create_task(self.check_pair(question, None, engine, has_begun))
            for has_begun in begun:
                await has_begun.wait()
            yield

    def submit_pair(
        self, question: Question, prefill: EngineProcess, decode: EngineProcess
    ) -> tuple[RequestStream, RequestStream]:
        """Submit it to these two, the consumer first, and give what the producer and the consumer say."""
        consumer = self.submit(question, TransferRole.CONSUMER, decode, prefill.descriptor.kv_address)
        return self.submit(question, TransferRole.PRODUCER, prefill, decode.descriptor.kv_address), consumer

    def submit(
        self, question: Question, role: TransferRole, process: EngineProcess, peer: EngineAddress
    ) -> RequestStream:
        """Submit one end of a handoff."""
        request = question.request
        ticket = KVTransferParams(f"transfer-{request.request_id}", request.attempt, role, peer)
        return self.session(process).submit(replace(request, kv_transfer_params=ticket))

    async def check_handed_over(self, prefill: EngineProcess, decode: EngineProcess) -> None:
        """One more request goes from the one to the other, with all of its KV; of impatient engines, one of some."""
        is_patient = all(one.spec.config.kv_transfer.chunk_timeout_s >= 2.0 for one in (prefill, decode))
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            while not await self._hand_over(prefill, decode):
                assert not is_patient, "it has computed the prompt itself"
        assert decode.call("link_kinds")[-1] == self._link_kind

    async def _hand_over(self, prefill: EngineProcess, decode: EngineProcess) -> bool:
        """Let one more request go from the one to the other; whether all of its KV has."""
        before = decode.count("num_prompt_tokens_computed")
        await self.check_pair(self.ask(), prefill, decode)
        await self.check_whole(prefill, decode)
        return decode.count("num_prompt_tokens_computed") == before

    async def ask_until_fired(
        self, fault: Fault, process: EngineProcess, prefill: EngineProcess, decode: EngineProcess
    ) -> asyncio.Task[None]:
        """Ask until a fault has stopped one of the two; return the answer that is still to come, as of check_pair().

        For engines whose deadlines are short: on a busy machine some requests do without the handoff.
        """
        fired = asyncio.create_task(process.wait_fired())
        while not fired.done():
            process.arm(fault)
            answer = asyncio.create_task(self._answer_and_rest(process, prefill, decode))
            await asyncio.wait({fired, answer}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                await answer
        await fired
        return answer

    async def _answer_and_rest(self, process: EngineProcess, prefill: EngineProcess, decode: EngineProcess) -> None:
        """Have a request answered by these two; until the process is whole its end of the handoff may still move."""
        await self.check_pair(self.ask(), prefill, decode)
        await self.check_whole(process)

    async def check_stream(self, question: Question, stream: RequestStream) -> None:
        """Read an engine's word to its end; what it says of the tokens has to be right, position by position."""
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            async for output in stream:
                stop = output.first_position + len(output.new_token_ids)
                assert output.new_token_ids == question.expected[output.first_position : stop]

    async def check_whole(self, *processes: EngineProcess) -> None:
        """Nothing is left of any request in these engines."""
        for process in processes:
            await process.wait_until_whole()
