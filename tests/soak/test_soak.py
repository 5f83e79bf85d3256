"""Serving for long leaves nothing behind, and the soak finds it out if it does."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.soak import NUM_ROUNDS, NUM_WARM_ROUNDS, PACED, Footprint, SoakResult, settled_footprint, soak

# The visitors' HTTP library nests generators, and may close one that runs when a stream is left: seen once in an hour,
# each time another of them.
_NESTED = "(AsyncResponseStream|BoundAsyncStream|PoolByteStream|HTTP11ConnectionByteStream).__aiter__|Response.aiter_"
pytestmark = pytest.mark.filterwarnings(
    f"ignore:Exception ignored in. <async_generator object ({_NESTED}):pytest.PytestUnraisableExceptionWarning"
)

_DURATION_S = float(os.environ.get("RAYPD_SOAK_S", "3600"))
_SHORT_S = 120.0


@pytest.mark.long
@pytest.mark.timeout(_DURATION_S + 600)
async def test_what_is_served_for_an_hour_leaves_nothing_behind(checkpoint: Callable[[str], Path]) -> None:
    result = await soak(checkpoint("llama"), _DURATION_S)
    print(result.counts, *result.footprints, sep="\n")  # noqa: T201  # for -s: the figures are worth an hour
    assert result.mistakes() == []
    _assert_all_came(result, at_least=10)


@pytest.mark.more
@pytest.mark.timeout(_SHORT_S + 240)
async def test_what_is_served_for_two_minutes_leaves_nothing_behind(checkpoint: Callable[[str], Path]) -> None:
    result = await soak(checkpoint("llama"), _SHORT_S, PACED)
    assert result.mistakes() == [], result.footprints
    _assert_all_came(result, at_least=3)


def _assert_all_came(result: SoakResult, *, at_least: int) -> None:
    kinds = {"read", "read slowly", "left"}
    expected = {*kinds, *(f"http {kind}" for kind in kinds), "http read whole", "http cut", "tokenized", "restart"}
    assert result.counts.keys() == expected, result.counts
    assert min(result.counts.values()) >= at_least, result.counts


async def test_a_descriptor_a_task_and_a_thread_that_are_left_are_counted() -> None:
    async with asyncio.timeout(60.0):
        before, after, last = await counted_around_what_is_left()
        # What earlier tests of this process have left may go meanwhile.
        while last.counts != before.counts:
            before, after, last = await counted_around_what_is_left()
    assert after.counts == tuple(count + 1 for count in before.counts)


async def counted_around_what_is_left() -> tuple[Footprint, Footprint, Footprint]:
    """Count before, while a descriptor, a task and a thread are left, and when they are gone."""
    before = await settled_footprint()
    is_over, is_over_for_thread = asyncio.Event(), threading.Event()
    with ExitStack() as left:
        left.enter_context(socket.socket())
        task = asyncio.create_task(is_over.wait())
        thread = threading.Thread(target=is_over_for_thread.wait)
        thread.start()
        after = await settled_footprint()
        is_over_for_thread.set()
        thread.join()
        is_over.set()
        await task
    return before, after, await settled_footprint(before)


@pytest.mark.parametrize(
    ("grown", "mistake"),
    [
        ({}, None),
        ({"rss_mib": 101.9}, None),
        ({"rss_mib": 102.1}, "memory grew by more than 2 %: 100.0 -> 102.1 MiB"),
        ({"num_fds": 11}, "num_fds grew: 10 -> 11"),
        ({"num_threads": 6}, "num_threads grew: 5 -> 6"),
        ({"num_tasks": 4}, "num_tasks grew: 3 -> 4"),
    ],
)
def test_what_grows_after_the_warm_up_is_found(grown: dict[str, float], mistake: str | None) -> None:
    flat = Footprint(rss_mib=100.0, num_fds=10, num_threads=5, num_tasks=3)
    cold = [replace(flat, rss_mib=50.0, num_fds=12)] * (NUM_WARM_ROUNDS - 1)
    later = [flat] * (NUM_ROUNDS - NUM_WARM_ROUNDS - 1)
    result = SoakResult([*cold, flat, *later, replace(flat, **grown)])  # type: ignore[arg-type]  # fields by name
    assert result.mistakes() == ([] if mistake is None else [mistake])
