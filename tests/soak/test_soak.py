"""What is served for long leaves nothing behind, and what finds that out does."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.soak import NUM_ROUNDS, NUM_WARM_ROUNDS, Footprint, SoakResult, soak

_DURATION_S = float(os.environ.get("RAYPD_SOAK_S", "3600"))


@pytest.mark.slow
@pytest.mark.timeout(_DURATION_S + 600)
async def test_what_is_served_for_an_hour_leaves_nothing_behind(checkpoint: Callable[[str], Path]) -> None:
    result = await soak(checkpoint("llama"), _DURATION_S)
    assert result.mistakes() == []
    kinds = {"read", "read slowly", "left"}
    expected = {*kinds, *(f"http {kind}" for kind in kinds), "http read whole", "http cut", "restart"}
    assert result.counts.keys() == expected, result.counts


@pytest.mark.parametrize(
    ("grown", "mistake"),
    [
        ({}, None),
        ({"rss_mib": 101.9}, None),
        ({"rss_mib": 102.1}, "memory grew by more than 2 %: 100.0 -> 102.1 MiB"),
        ({"num_fds": 11}, "num_fds grew: 10 -> 11"),
        ({"num_tasks": 4}, "num_tasks grew: 3 -> 4"),
    ],
)
def test_what_grows_after_the_warm_up_is_found(grown: dict[str, float], mistake: str | None) -> None:
    flat = Footprint(rss_mib=100.0, num_fds=10, num_threads=5, num_tasks=3)
    cold = [replace(flat, rss_mib=50.0)] * (NUM_WARM_ROUNDS - 1)
    later = [flat] * (NUM_ROUNDS - NUM_WARM_ROUNDS - 1)
    result = SoakResult([*cold, flat, *later, replace(flat, **grown)])  # type: ignore[arg-type]  # fields by name
    assert result.mistakes() == ([] if mistake is None else [mistake])
