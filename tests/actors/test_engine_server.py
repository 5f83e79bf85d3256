"""An operator's calls to a running engine, beside requests.

Tests of actors/engine_profile.py, actors/errors.py, actors/process/profiling.py.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.config import ParallelConfig
from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from actors.engine_server import EngineServer
from actors.errors import EngineNotStarted, ProfileUnderWay
from actors.model import loaded_runner
from actors.model.step_threads import StepThreads
from actors.process.cpu_binding import CpuShare
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.session import EngineSession
from kv_transfer.config import KVTransferConfig
from tests.engine_pair import engine_config
from tests.trusted import TRUST, member

PROMPT = list(range(1, 41))


async def generate(session: EngineSession, request_id: str) -> tuple[list[int], int]:
    """A request's tokens, and how many of its prompt's were cached."""
    sampling_params = SamplingParams(max_tokens=4, ignore_eos=True)
    request = EngineCoreRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling_params=sampling_params)
    outputs = [output async for output in session.submit(request)]
    assert outputs[-1].timings is not None
    return [token for output in outputs for token in output.new_token_ids], outputs[-1].timings.num_cached_tokens


async def keep_asking(session: EngineSession, request_id: str, is_over: asyncio.Event) -> list[tuple[list[int], int]]:
    """One request after the other, so that the engine has steps to be profiled whenever that begins."""
    answers = []
    while not is_over.is_set():
        answers.append(await generate(session, request_id))
    return answers


async def test_the_rest_of_the_memory_is_taken_once_and_only_after_the_start(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[torch.Size] = []
    monkeypatch.setattr("actors.worker.take_other_pages", lambda kv_cache: taken.append(kv_cache.shape))
    config = engine_config(checkpoint("llama"), transfer=KVTransferConfig(transport="tcp"))
    engine = EngineServer(config, "decode-0", 1, TRUST)
    engine.take_other_pages()
    await engine.start("127.0.0.1")
    try:
        assert taken == []
        for _ in range(2):
            engine.take_other_pages()
        assert taken == [torch.Size(engine.facts.layout.shape)]
    finally:
        await engine.stop()


async def test_a_running_engine_is_profiled_and_forgets_its_prefixes(checkpoint: Callable[[str], Path]) -> None:
    config = engine_config(checkpoint("llama"), transfer=KVTransferConfig(transport="tcp", link_timeout_s=60.0))
    engine = EngineServer(config, "decode-0", 1, TRUST)
    address = await engine.start("127.0.0.1")
    session = EngineSession(EngineDescriptor("decode-0", 1, EngineRole.BOTH, address), member(), timeout_s=60.0)
    await session.open()
    try:
        first, _ = await generate(session, "a")
        is_over = asyncio.Event()
        asking = [asyncio.create_task(keep_asking(session, name, is_over)) for name in "bc"]
        assert await generate(session, "d") == (first, 32)
        profiling = asyncio.create_task(engine.profile(0.2, with_trace=True))
        await asyncio.sleep(0)
        with pytest.raises(ProfileUnderWay):
            await engine.profile(0.2, with_trace=False)
        profile = await profiling
        is_over.set()
        for answers in await asyncio.gather(*asking):
            assert all(answer == (first, 32) for answer in answers), "an engine that is profiled answers the same"

        assert "aten::" in profile.summary
        assert json.loads(gzip.decompress(profile.trace))["traceEvents"]

        assert await engine.reset_prefix_cache(preempt=False)
        assert await generate(session, "e") == (first, 0)
        assert (await engine.profile(0.01, with_trace=False)).trace == b""
    finally:
        await session.close()
        await engine.stop()


@pytest.mark.parametrize(
    ("num_threads", "num_cores", "expected"),
    [
        (0, 4, "2 threads on any core: parallel.cpu_binding is none"),
        (0, 2, "2 threads on any core: parallel.cpu_binding is none; 1 for a step of one token"),
        (1, 2, "1 thread on any core: parallel.cpu_binding is none"),
    ],
)
async def test_an_engine_has_as_many_threads_as_ray_has_reserved_cpus_unless_a_setting_says_otherwise(
    num_threads: int,
    num_cores: int,
    expected: str,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loaded_runner, "num_usable_cores", lambda: num_cores)
    # Whether the results are the same bits depends on the processor.
    monkeypatch.setattr(StepThreads, "tried", lambda threads, compute: threads)
    config = engine_config(checkpoint("llama"), transfer=KVTransferConfig(transport="tcp", link_timeout_s=60.0))
    parallel = ParallelConfig(num_threads=num_threads, cpu_binding="none")
    config = config.model_copy(update={"parallel": parallel})
    engine = EngineServer(config, "decode-0", 1, TRUST, cpu_share=CpuShare(2.5, 4))
    try:
        await engine.start("127.0.0.1")
        assert engine.facts.cpu_threads == expected
    finally:
        await engine.stop()
        torch.set_num_threads(1)


async def test_an_engine_that_has_not_started_says_so_and_can_be_stopped(checkpoint: Callable[[str], Path]) -> None:
    engine = EngineServer(engine_config(checkpoint("llama")), "decode-0", 1, TRUST)
    with pytest.raises(EngineNotStarted, match="engine decode-0 has not started yet"):
        engine.facts.request_limits  # noqa: B018
    with pytest.raises(EngineNotStarted):
        await engine.reset_prefix_cache(preempt=False)
    with pytest.raises(EngineNotStarted):
        await engine.profile(0.1, with_trace=False)
    assert engine.is_idle
    await engine.stop()
