"""Measure what the scheduler costs.

The scheduler alone, fed with one token per request and step: no model, no torch. Prompts have 512 to 527 tokens, so
that block boundaries are spread over the steps as they are in a running engine; blocks have 16; prefix caching and
statistics are on.

    python -m benchmarks.scheduler
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from struct import Struct, pack
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from xxhash import xxh3_128_digest

from actors.config import CacheConfig, SchedulerConfig
from actors.core.outputs.model_runner_output import NO_TOKEN, ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.block_hash import PUBLIC_KEY, BlockHasher, ExtraKeys
from actors.core.requests.request import EngineCoreRequest, Request, RequestStatus
from actors.core.requests.sampling_params import SamplingParams
from actors.core.scheduler import Scheduler

_BLOCK_SIZE = 16
_HASHER = BlockHasher(_BLOCK_SIZE, PUBLIC_KEY)
_PROMPT = 512
_EOS = 1
_VLLM_US = {64: 10.7, 256: 13.2, 1024: 14.4}
"""vLLM 0.32's own Scheduler on this kind of machine, schedule + update per running request and step."""


def run(
    steps: Annotated[int, typer.Option(help="Steps that are timed.")] = 320,
    repeats: Annotated[int, typer.Option(help="Repeats of everything that is not a step.")] = 200,
) -> None:
    """Measure and print everything."""
    console = Console()
    console.print(_measure_steps((64, 256, 1024, 4096), steps))
    table = Table("what", "median us", "p99 us", title="one at a time")
    for name, measure in (
        ("build a request of 512 tokens with its block hashes (vLLM: 205 to 257)", _build_request),
        ("of that, the block hashes: BLAKE2b, keyed", _hash_blocks),
        ("the same by xxh3_128, which has no key", _hash_blocks_by_xxh3),
        ("look up a cached prefix of 32768 tokens", _look_up_prefix),
        ("abort one of 4096 running requests of 512 tokens", _abort_one),
        ("schedule with 64 running and 10 waiting", lambda n: _schedule_with_waiting(10, n)),
        ("schedule with 64 running and 10000 waiting", lambda n: _schedule_with_waiting(10_000, n)),
    ):
        times = measure(repeats)
        table.add_row(name, f"{statistics.median(times) * 1e6:.1f}", f"{np.quantile(times, 0.99) * 1e6:.1f}")
    console.print(table)


def _measure_steps(sizes: tuple[int, ...], steps: int) -> Table:
    table = Table(
        "running", "schedule", "update", "sum", "step p50 us", "p99 us", "vLLM 0.32", title="us per request and step"
    )
    for num_running in sizes:
        scheduler = _with_running(num_running)
        tokens = np.full((num_running, 1), 7)
        schedule_s, update_s = [], []
        for _ in range(steps):
            start_s = time.perf_counter()
            output = scheduler.schedule()
            middle_s = time.perf_counter()
            scheduler.update_from_output(output, ModelRunnerOutput(output.batch.req_ids, tokens))
            schedule_s.append(middle_s - start_s)
            update_s.append(time.perf_counter() - middle_s)
        both_s = np.add(schedule_s, update_s)
        per_request = [statistics.fmean(times) / num_running * 1e6 for times in (schedule_s, update_s, both_s)]
        table.add_row(
            str(num_running),
            *(f"{value:.2f}" for value in per_request),
            f"{np.median(both_s) * 1e6:.0f}",
            f"{np.quantile(both_s, 0.99) * 1e6:.0f}",
            str(_VLLM_US.get(num_running, "-")),
        )
    return table


def _build_request(repeats: int) -> list[float]:
    core_request = _core_request("r", _PROMPT)
    return [_timed(lambda: Request.from_engine_core_request(core_request, 0, _HASHER)) for _ in range(repeats)]


def _hash_blocks(repeats: int) -> list[float]:
    token_ids = list(range(_PROMPT))
    return [_timed(lambda: _HASHER.extend([], token_ids, ExtraKeys())) for _ in range(repeats)]


def _hash_blocks_by_xxh3(repeats: int) -> list[float]:
    token_ids, cut = list(range(_PROMPT)), Struct(f"{4 * _BLOCK_SIZE}s").iter_unpack

    def hash_all() -> None:
        parent, hashes = bytes(16), []
        for (tokens,) in cut(pack(f"{_PROMPT}i", *token_ids)):
            parent = xxh3_128_digest(parent + tokens)
            hashes.append(parent)

    return [_timed(hash_all) for _ in range(repeats)]


def _look_up_prefix(repeats: int) -> list[float]:
    scheduler = _make_scheduler(1, num_blocks=3000, max_model_len=40_000)
    core_request = _core_request("first", 32_769)
    scheduler.add_request(Request.from_engine_core_request(core_request, 0, _HASHER))
    while scheduler.get_request_counts() != (1, 0):
        _step(scheduler)
    while scheduler.requests["first"].num_output_tokens == 0:
        _step(scheduler)
    request = Request.from_engine_core_request(core_request, 0, _HASHER)
    assert len(scheduler.kv_cache_manager.get_computed_blocks(request)) == 2048
    return [_timed(lambda: scheduler.kv_cache_manager.get_computed_blocks(request)) for _ in range(repeats)]


def _abort_one(repeats: int) -> list[float]:
    scheduler = _with_running(4096)
    victims = [f"r{index}" for index in range(0, 4096, 4096 // repeats)][:repeats]
    return [_timed(partial(scheduler.finish_requests, name, RequestStatus.FINISHED_ABORTED)) for name in victims]


def _schedule_with_waiting(num_waiting: int, repeats: int) -> list[float]:
    scheduler = _with_running(64, num_waiting=num_waiting)
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        output = scheduler.schedule()
        times.append(time.perf_counter() - start_s)
        _take_in(scheduler, output)
    assert scheduler.get_request_counts() == (64, num_waiting)
    return times


def _with_running(num_running: int, *, num_waiting: int = 0) -> Scheduler:
    """A scheduler whose running requests all decode."""
    scheduler = _make_scheduler(num_running, num_blocks=num_running * (_PROMPT // _BLOCK_SIZE + 40), max_model_len=4096)
    for index in range(num_running + num_waiting):
        core_request = _core_request(f"r{index}", _PROMPT + index % _BLOCK_SIZE, seed=index)
        scheduler.add_request(Request.from_engine_core_request(core_request, 0, _HASHER))
    while scheduler.get_request_counts()[0] < num_running:
        _step(scheduler)
    for _ in range(2):
        _step(scheduler)
    gc.collect()
    return scheduler


def _make_scheduler(max_num_seqs: int, *, num_blocks: int, max_model_len: int) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max(8192, 2 * max_num_seqs))
    return Scheduler(config, CacheConfig(block_size=_BLOCK_SIZE), num_blocks, max_model_len, clock=time.time)


def _core_request(request_id: str, num_tokens: int, *, seed: int = 0) -> EngineCoreRequest:
    prompt = np.random.default_rng(seed).integers(10, 150_000, num_tokens).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=3000)
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=params, eos_token_ids=(_EOS,)
    )


def _step(scheduler: Scheduler) -> None:
    _take_in(scheduler, scheduler.schedule())


def _take_in(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Sample token 7 for every request whose last token is in the step."""
    batch = output.batch
    num_tokens = np.array([scheduler.requests[req_id].num_tokens for req_id in batch.req_ids], dtype=np.int64)
    is_sampled = batch.num_computed_tokens + batch.num_new_tokens >= num_tokens
    tokens = np.where(is_sampled, 7, NO_TOKEN)[:, None]
    scheduler.update_from_output(output, ModelRunnerOutput(batch.req_ids, tokens))


def _timed(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    typer.run(run)
