"""Tests of actors/model/sampling/filters.py, actors/model/sampling/logprobs.py, actors/model/sampling/logit_changes.py,
actors/model/sampling/sampling_batch.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from actors.core.requests.sampling_params import SamplingParams
from actors.model.sampling.filters import Filters, filter_logits
from actors.model.sampling.logit_changes import RowChanges, StepChanges
from actors.model.sampling.sampler import SamplerOutput, sample
from actors.model.sampling.sampling_batch import SamplingBatch
from actors.model.sampling.sampling_row import SamplingRow

VOCAB_SIZE = 50
GREEDY = SamplingParams(temperature=0.0)


def row(params: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None) -> SamplingRow:
    return SamplingRow(
        params=params,
        prompt_token_ids=np.array(prompt or [], dtype=np.int64),
        output_token_ids=np.array(output or [], dtype=np.int64),
        eos_token_ids=(0,),
    )


def logits_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def draws(logits: Tensor, params: SamplingParams, count: int) -> list[int]:
    """One token from each of count positions."""
    rows = [row(params, output=[1] * position) for position in range(count)]
    return sample(logits.expand(count, -1), SamplingBatch.of_rows(rows)).token_ids


def filtered(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Return a row of logits after the filters, with -inf for those that they remove."""
    with np.errstate(divide="ignore"):
        filters = Filters(np.array([top_k]), np.array([top_p]), np.log(np.array([min_p])).astype(np.float32))
    largest = logits.max()
    kept = filter_logits((logits - largest)[None], filters)[0]
    return torch.where(torch.isfinite(kept), logits, -torch.inf)


def changed(logits: Tensor, of: SamplingRow) -> Tensor:
    logits = logits.clone()
    StepChanges([(0, RowChanges(of, len(logits)), of)], len(logits)).apply(logits[None])
    return logits


def test_greedy_takes_the_most_likely_token_and_leaves_the_logits_alone() -> None:
    logits = logits_of(3, VOCAB_SIZE)
    before = logits.clone()

    output = sample(logits, SamplingBatch.of_rows([row(GREEDY)] * 3))

    assert output.token_ids == logits.argmax(dim=-1).tolist()
    assert output.logprobs == [None, None, None]
    assert torch.equal(logits, before)


def test_tokens_are_drawn_with_their_probabilities() -> None:
    logits = logits_of(8)
    params = SamplingParams(temperature=1.7, seed=5)
    count = 4000

    drawn = np.bincount(draws(logits, params, count), minlength=8)

    expected = torch.softmax(logits / 1.7, dim=0).numpy() * count
    chi_squared = float(((drawn - expected) ** 2 / expected).sum())
    assert chi_squared < 24.3  # 7 degrees of freedom, one in a thousand


def test_the_uniform_number_is_inverted_through_the_cumulative_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([0.0, 0.1, 0.0, 0.4, 0.5, 0.0]).log()
    expected = {0.0: 1, 0.0999: 1, 0.1001: 3, 0.4999: 3, 0.5001: 4, 1.0 - 2.0**-53: 4}
    for number, token_id in expected.items():
        monkeypatch.setattr("actors.model.sampling.sampler.uniforms", lambda *_, number=number: np.array([number]))
        assert draws(logits, SamplingParams(), 1) == [token_id]


def test_a_row_is_sampled_alike_whatever_the_batch() -> None:
    logits = logits_of(6, 5000)
    parameters = [
        SamplingParams(temperature=0.7, seed=1, top_p=0.9),
        GREEDY,
        SamplingParams(temperature=1.2, seed=2, top_k=40, min_p=0.01),
        SamplingParams(temperature=0.0, repetition_penalty=1.4),
        SamplingParams(temperature=1.0, seed=3, presence_penalty=0.5, logprobs=3),
        SamplingParams(temperature=2.0, seed=4, logit_bias={7: 3.0}, min_tokens=4),
    ]
    rows = [row(params, prompt=[1, 2], output=[3, 3]) for params in parameters]

    together = sample(logits, SamplingBatch.of_rows(rows))
    backwards = sample(logits.flip(0), SamplingBatch.of_rows(rows[::-1]))

    alone = [sample(logits[i : i + 1], SamplingBatch.of_rows(rows[i : i + 1])) for i in range(len(rows))]
    assert together.token_ids == backwards.token_ids[::-1] == [output.token_ids[0] for output in alone]
    assert together.logprobs == backwards.logprobs[::-1] == [output.logprobs[0] for output in alone]


@pytest.mark.parametrize("temperature", [1e-40, 1e-300])
def test_the_smallest_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = logits_of(VOCAB_SIZE) * 10

    assert set(draws(logits, SamplingParams(temperature=temperature), 5)) == {int(logits.argmax())}


@pytest.mark.parametrize("stop_token_id", [VOCAB_SIZE, VOCAB_SIZE + 5, -1])
def test_a_stop_token_outside_the_vocabulary_disturbs_nobody(stop_token_id: int) -> None:
    logits = logits_of(1, VOCAB_SIZE)
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(stop_token_id,), ignore_eos=True)

    assert sample(logits, SamplingBatch.of_rows([row(params)])).token_ids == [int(logits[0, 1:].argmax()) + 1]


def test_the_seed_decides() -> None:
    logits = logits_of(VOCAB_SIZE)
    first = draws(logits, SamplingParams(seed=1), 30)

    assert draws(logits, SamplingParams(seed=1), 30) == first
    assert draws(logits, SamplingParams(seed=2), 30) != first
    assert draws(logits, SamplingParams(seed=-1), 30) == draws(logits, SamplingParams(seed=(1 << 64) - 1), 30)


@pytest.mark.parametrize("top_k", [1, 2, 10, VOCAB_SIZE, 10 * VOCAB_SIZE])
def test_top_k_keeps_what_transformers_keeps(top_k: int) -> None:
    logits = logits_of(VOCAB_SIZE)
    expected = TopKLogitsWarper(top_k)(torch.LongTensor([[0]]), logits[None].clone())[0]

    logits = filtered(logits, top_k=top_k)

    assert torch.equal(logits, expected)


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 5000])
def test_top_p_keeps_what_transformers_keeps(top_p: float, vocab_size: int) -> None:
    logits = logits_of(vocab_size) * 0.5
    expected = TopPLogitsWarper(top_p)(torch.LongTensor([[0]]), logits[None].clone())[0]

    logits = filtered(logits, top_p=top_p)

    assert torch.equal(logits, expected)


@pytest.mark.parametrize("min_p", [0.001, 0.1, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float) -> None:
    logits = logits_of(VOCAB_SIZE)
    expected = MinPLogitsWarper(min_p)(torch.LongTensor([[0]]), logits[None].clone())[0]

    logits = filtered(logits, min_p=min_p)

    assert torch.equal(logits, expected)


def test_filters_work_on_what_the_earlier_ones_left() -> None:
    logits = logits_of(VOCAB_SIZE)
    nothing = torch.LongTensor([[0]])
    expected = logits[None].clone()
    for warper in (TemperatureLogitsWarper(1.5), MinPLogitsWarper(0.05), TopKLogitsWarper(12), TopPLogitsWarper(0.8)):
        expected = warper(nothing, expected)
    allowed = set(torch.isfinite(expected[0]).nonzero()[:, 0].tolist())

    drawn = set(draws(logits, SamplingParams(temperature=1.5, min_p=0.05, top_k=12, top_p=0.8, seed=9), 2000))

    assert 2 < len(allowed) < 12
    assert drawn == allowed


def test_ties_at_the_edge_stay_together() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])

    logits = filtered(logits, top_k=2)

    assert torch.isfinite(logits).tolist() == [False, True, True, True, True, False]


def test_repetition_penalty_looks_at_prompt_and_output_as_in_transformers() -> None:
    logits = logits_of(VOCAB_SIZE)
    prompt, output = [3, 4, 4], [4, 9]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), logits[None].clone())[0]

    logits = changed(logits, row(SamplingParams(repetition_penalty=1.3), prompt, output))

    assert torch.allclose(logits, expected)


def test_presence_and_frequency_look_at_the_output_only() -> None:
    logits = logits_of(VOCAB_SIZE)
    expected = logits.clone()
    expected[4] -= 0.5 + 2 * 0.2
    expected[9] -= 0.5 + 1 * 0.2

    logits = changed(logits, row(SamplingParams(presence_penalty=0.5, frequency_penalty=0.2), [3, 4, 4], [4, 9, 4]))

    assert torch.allclose(logits, expected)


def test_bias_comes_before_penalties() -> None:
    logits = torch.zeros(VOCAB_SIZE)

    logits = changed(logits, row(SamplingParams(logit_bias={5: 2.0, 6: -1.0}, repetition_penalty=2.0), [5, 6]))

    assert logits[5] == 1.0
    assert logits[6] == -2.0


def test_neither_eos_nor_stop_tokens_come_before_min_tokens() -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[0], logits[8], logits[5] = 9.0, 8.0, 7.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(8,))

    tokens = [
        sample(logits[None], SamplingBatch.of_rows([row(params, output=[1] * num_output)])).token_ids[0]
        for num_output in range(4)
    ]

    assert tokens == [5, 5, 0, 0]


def test_logprobs_come_from_the_raw_logits() -> None:
    logits = logits_of(2, VOCAB_SIZE)
    expected = torch.log_softmax(logits, dim=-1)
    params = SamplingParams(temperature=0.0, logit_bias={17: 100.0}, logprobs=3)

    output = sample(logits, SamplingBatch.of_rows([row(params), row(SamplingParams(temperature=0.0, logprobs=0))]))

    biased, plain = output.logprobs
    assert biased is not None
    assert plain is not None
    top = torch.topk(expected[0], 3)
    assert biased.token_ids == [17, *top.indices.tolist()]
    assert biased.logprobs == pytest.approx([float(expected[0, 17]), *top.values.tolist()])
    assert biased.rank == int((expected[0] > expected[0, 17]).sum()) + 1
    assert (plain.token_ids, plain.rank) == ([int(logits[1].argmax())], 1)


def test_nans_are_counted_by_row() -> None:
    logits = logits_of(3, VOCAB_SIZE)
    logits[1, 4:6] = float("nan")

    assert sample(logits, SamplingBatch.of_rows([row(GREEDY), row(SamplingParams()), row(GREEDY)])).num_nans == [
        0,
        2,
        0,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_are_all_greedy_get_their_largest_logit_and_their_nans_counted(dtype: torch.dtype) -> None:
    logits = logits_of(4, VOCAB_SIZE).to(dtype)
    logits[1, 4:6] = float("nan")
    logits[2, 7] = logits[2, 3] = 1e3

    output = sample(logits, SamplingBatch.of_rows([row(GREEDY)] * 4))

    assert output.token_ids == [int(logits[0].argmax()), 4, 3, int(logits[3].argmax())]
    assert output.num_nans == [0, 2, 0, 0]
    assert output.logprobs == [None] * 4


def test_the_output_of_some_rows_has_all_that_is_theirs() -> None:
    logits = logits_of(4, VOCAB_SIZE)
    logits[2, 5] = float("nan")
    rows = [row(SamplingParams(temperature=0.0, logprobs=number)) for number in (None, 0, 1, 2)]

    output = sample(logits, SamplingBatch.of_rows(rows))

    assert output.at(np.array([2, 0])) == SamplerOutput(
        [output.token_ids[2], output.token_ids[0]], [output.logprobs[2], None], [1, 0]
    )
