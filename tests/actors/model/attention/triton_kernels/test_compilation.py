"""Triton compiles the kernels for GPUs that are not there, and no kernel needs more than such a GPU has.

Tests of benchmarks/triton_kernels.py, actors/model/attention/triton_kernels/tile_sizes.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.triton_kernels import CAPABILITIES, HEAD_DIMS, Case, usage

MAX_SHARED_BYTES = 99 * 1024
"""One program can have this much on GPUs of compute capability 8.6 and 8.9; the others have more."""


def check(case: Case, only: str | None = None) -> None:
    """Compile the kernels of a case. only: what the one kernel is for that is compiled; None: all of them"""
    usages = usage(case, only)
    assert usages
    for one in usages:
        assert one.spilled_bytes == 0, f"{case}: {one}"
        assert one.num_registers <= 255, f"{case}: {one}"
        assert one.shared_bytes <= MAX_SHARED_BYTES, f"{case}: {one}"


@pytest.mark.more
@pytest.mark.timeout(600)
def test_the_kernels_of_the_usual_head_size_compile_without_spills() -> None:
    check(Case(90, 128))


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (Case(90, 80), "attend 16 rows"),
        (Case(100, 80), "attend 64 rows, split"),
        (Case(80, 512, group=8), "attend 32 rows, split"),
        (Case(90, 64, torch.float16, block_size=64, group=1), "attend 16 rows"),
    ],
    ids=str,
)
def test_the_kernels_that_are_nearest_to_a_spill_have_none(case: Case, kernel: str) -> None:
    check(case, kernel)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_head_size_compiles_without_spills(capability: int, head_dim: int) -> None:
    check(Case(capability, head_dim))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "case",
    [
        Case(0, 128, block_size=24, group=7, window=4096),
        Case(0, 256, block_size=128, group=2, window=4096, softcap=50.0),
        Case(0, 64, torch.float16, block_size=64, group=1),
        Case(0, 64, group=1, is_causal=False),
        Case(0, 64, group=8, window=128, has_sinks=True),
        Case(0, 192, group=16, window=128, has_sinks=True, value_size=128),
        Case(0, 128, group=5, chunk=8192),
        Case(0, 512, group=8),
        Case(0, 512, torch.float32, group=8),
        Case(0, 128, torch.float32),
        Case(0, 256, torch.float32, block_size=32),
    ],
    ids=str,
)
def test_windows_caps_directions_and_types_compile_without_spills(capability: int, case: Case) -> None:
    check(replace(case, capability=capability))
