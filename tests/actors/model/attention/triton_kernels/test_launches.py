"""How far the keys of a tile are split, in numbers only. Tests of actors/model/attention/triton_kernels/launches.py."""

from __future__ import annotations

import pytest

from actors.model.attention.triton_kernels.launches import choose_num_parts


@pytest.mark.parametrize(
    ("num_programs", "max_keys", "num_processors", "expected"),
    [(8, 100_000, 132, 32), (64, 100_000, 132, 5), (8, 700, 132, 3), (8, 40, 132, 1), (512, 100_000, 132, 1)],
)
def test_contexts_are_split_until_the_gpu_is_busy(
    num_programs: int, max_keys: int, num_processors: int, expected: int
) -> None:
    assert choose_num_parts(num_programs, max_keys, num_processors) == expected
