"""Each token of a step is in one tile of queries, and a tile is of one request.

Tests of actors/model/attention/triton_kernels/step_plan.py, actors/model/attention/triton_kernels/tile_sizes.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.model.attention.batch_attention import BatchShape
from actors.model.attention.triton_kernels.step_plan import plan_step
from actors.model.attention.triton_kernels.tile_sizes import MostRows, most_rows, pad_head_dim, short_rows

TABLES = np.arange(40).reshape(4, 10)


def test_a_mixed_step_has_a_tile_for_each_short_request_and_several_for_a_long_one() -> None:
    # A decode, a chunk of 40 tokens, three drafts, and a prompt of one token; four query heads share a KV head.
    shape = BatchShape(np.array([0, 1, 41, 44, 45]), np.array([17, 3, 30, 0]), TABLES)
    plan = plan_step(shape, block_size=16, group=4, most_rows=MostRows(64, 128))
    assert plan.short is not None
    assert plan.long is not None
    assert (plan.short.requests.tolist(), plan.short.tokens.tolist()) == ([0, 2, 3], [0, 41, 44])
    assert (plan.short.rows, plan.short.max_tokens, plan.short.max_keys) == (16, 3, 33)
    assert (plan.long.requests.tolist(), plan.long.tokens.tolist(), plan.long.rows) == ([1, 1], [1, 33], 128)
    assert plan.slots[[0, 1, 13, 14, 40]].tolist() == [1 * 16 + 1, 10 * 16 + 3, 10 * 16 + 15, 11 * 16, 12 * 16 + 10]
    # The third request begins its third block, the second one its third, the fourth one its first.
    assert plan.begun_blocks.tolist() == [12, 22, 30]
    assert plan.seq_lens.tolist() == [18, 43, 33, 1]
    assert all(part.dtype == np.int32 for part in (plan.slots, plan.begun_blocks, plan.seq_lens, plan.block_tables))


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 16, 17, 100, 1000])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 64])
@pytest.mark.parametrize("rows", [MostRows(32, 64), MostRows(64, 128)])
def test_the_tiles_of_a_request_hold_each_of_its_tokens_once(rows: MostRows, group: int, num_tokens: int) -> None:
    shape = BatchShape(np.array([0, 2, 2 + num_tokens]), np.array([0, 9]), np.zeros((2, 64), dtype=np.int64))
    plan = plan_step(shape, block_size=16, group=group, most_rows=rows)
    held: list[int] = []
    for tiles in filter(None, (plan.short, plan.long)):
        assert tiles.rows >= group
        for request, first in zip(tiles.requests, tiles.tokens, strict=True):
            held += range(first, min(first + tiles.rows // group, shape.query_starts[request + 1]))
    assert sorted(held) == list(range(2 + num_tokens))


def test_tiles_have_sizes_that_triton_can_compile() -> None:
    assert [pad_head_dim(size) for size in (4, 16, 64, 80, 96, 112, 128, 192, 256)] == [
        16, 16, 64, 128, 128, 128, 128, 256, 256
    ]  # fmt: skip
    assert [short_rows(4, count) for count in (1, 4, 5, 8, 16)] == [16, 16, 32, 32, 64]
    assert most_rows(128, torch.bfloat16) == MostRows(64, 128)
    assert most_rows(192, torch.bfloat16) == MostRows(32, 64)
    assert most_rows(64, torch.float32) == MostRows(32, 32)
