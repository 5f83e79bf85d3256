from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.core.outputs.scheduler_output import NOTHING_GROWN, SchedulerOutput, StepBatch
from actors.core.requests.sampling_params import SamplingParams
from actors.model.grammar.mask import GrammarMask
from actors.model.sampling.sampler import sample
from actors.model.sampling.sampling_batch import SamplingBatch
from actors.model.sampling.sampling_row import SamplingRow

VOCAB_SIZE = 70
"""No multiple of 32: the last word of a mask has bits that mean no token."""
GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=1.5, seed=3, top_k=4)


def bits_of(*allowed: list[int]) -> np.ndarray:
    bits = np.zeros((len(allowed), 3), dtype=np.int32)
    for row, token_ids in enumerate(allowed):
        for token_id in token_ids:
            bits[row].view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))
    return bits


def batch_of(*params: SamplingParams) -> SamplingBatch:
    none = np.zeros(0, dtype=np.int64)
    return SamplingBatch.of_rows([SamplingRow(one, none, none, eos_token_ids=(0,)) for one in params])


def step_of(indices: dict[str, int], bits: np.ndarray | None, num_requests: int) -> SchedulerOutput:
    none = np.zeros(num_requests, dtype=np.int64)
    batch = StepBatch([f"r{i}" for i in range(num_requests)], none, none, 0, none, none, none, NOTHING_GROWN)
    return SchedulerOutput(batch, [], set(), structured_output_request_ids=indices, grammar_bitmask=bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", [GREEDY, RANDOM])
def test_only_what_a_grammar_allows_is_sampled_and_other_rows_are_as_without_it(
    params: SamplingParams, dtype: torch.dtype
) -> None:
    logits = torch.randn(5, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
    batch = batch_of(GREEDY, params, RANDOM, params, GREEDY)
    free = sample(logits, batch).token_ids
    mask = GrammarMask(np.array([1, 3]), bits_of([31, 32, 69], [64]))
    masked = sample(logits, batch, mask).token_ids

    assert masked[1] in {31, 32, 69}
    assert masked[3] == 64
    assert [masked[row] for row in (0, 2, 4)] == [free[row] for row in (0, 2, 4)]


def test_a_greedy_row_takes_the_most_likely_token_that_is_allowed() -> None:
    logits = torch.arange(VOCAB_SIZE, dtype=torch.float32)[None]
    assert sample(logits, batch_of(GREEDY), GrammarMask(np.array([0]), bits_of([3, 33, 12]))).token_ids == [33]


def test_logits_and_their_log_probabilities_stay_as_they_are() -> None:
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    params = SamplingParams(temperature=0.0, logprobs=2)
    output = sample(logits, batch_of(params), GrammarMask(np.array([0]), bits_of([5])))

    assert torch.equal(logits, before)
    assert output.logprobs[0] is not None
    assert output.logprobs[0].logprobs[0] == pytest.approx(float(torch.log_softmax(before[0], 0)[5]))
    assert output.logprobs[0].token_ids[1] == int(before.argmax())


def test_a_mask_holds_against_a_bias() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    params = SamplingParams(temperature=0.0, logit_bias={7: 100.0}, repetition_penalty=2.0)
    assert sample(logits, batch_of(params), GrammarMask(np.array([0]), bits_of([9]))).token_ids == [9]


def test_masks_find_their_rows_whatever_the_order_and_prompts_under_way_need_none() -> None:
    bits = bits_of([1], [2], [3])
    step = step_of({"r4": 4, "r1": 1, "r2": 2}, bits, 5)
    mask = GrammarMask.of_step(step, sampled=np.array([0, 1, 3, 4]))
    assert mask is not None
    assert (mask.rows.tolist(), mask.bits.tolist()) == ([1, 3], bits[[1, 0]].tolist())


def test_a_step_without_grammars_has_no_mask() -> None:
    assert GrammarMask.of_step(step_of({}, None, 2), np.array([0, 1])) is None
    assert GrammarMask.of_step(step_of({"r0": 0}, bits_of([1]), 2), np.array([1])) is None
