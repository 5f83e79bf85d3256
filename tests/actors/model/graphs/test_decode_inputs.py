"""Tests of actors/model/graphs/decode_inputs.py."""

from __future__ import annotations

import numpy as np
import torch

from actors.model.graphs.decode_inputs import DecodeInputs, DecodeStep
from actors.model.lora.lora_step import NO_SLOT

STEP = DecodeStep(
    token_ids=np.array([7, 8]),
    positions=np.array([16, 3]),
    slots=np.array([32, 5]),
    seq_lens=np.array([17, 4]),
    block_tables=np.array([[4, 2], [1, 0]]),
    begun_blocks=np.array([2]),
)


def test_a_row_without_a_request_writes_no_key_and_attends_to_none() -> None:
    inputs = DecodeInputs(max_size=4, max_blocks=3, device=torch.device("cpu"))
    inputs.write(STEP, 4, torch.zeros(5, 1))
    batch = inputs.attention(4)
    assert inputs.token_ids(4).tolist() == [7, 8, 0, 0]
    assert inputs.positions(4).tolist() == [16, 3, 0, 0]
    assert batch.slots.tolist() == [32, 5, -1, -1]
    assert batch.seq_lens.tolist() == [17, 4, 0, 0]
    assert inputs.adapter_slots(4).tolist() == [NO_SLOT] * 4
    assert batch.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert batch.block_tables[:2, :2].tolist() == [[4, 2], [1, 0]]


def test_rows_of_an_earlier_step_are_gone() -> None:
    inputs = DecodeInputs(max_size=4, max_blocks=3, device=torch.device("cpu"))
    inputs.write(STEP, 4, torch.zeros(5, 1))
    nine, zero, slot, length = (np.array([number]) for number in (9, 0, 48, 1))
    one = DecodeStep(nine, zero, slot, length, block_tables=np.array([[3]]), begun_blocks=np.zeros(0, np.int64))
    inputs.write(one, 2, torch.zeros(5, 1))
    assert inputs.attention(2).slots.tolist() == [48, -1]
    assert inputs.attention(2).seq_lens.tolist() == [1, 0]


def test_the_blocks_that_a_step_begins_become_zeros_and_no_others() -> None:
    kv_cache = torch.full((5, 2, 3), torch.nan)
    DecodeInputs(max_size=2, max_blocks=3, device=torch.device("cpu")).write(STEP, 2, kv_cache)
    assert not kv_cache[2].any()
    assert kv_cache.isnan().all(dim=(1, 2)).tolist() == [True, True, False, True, True]
