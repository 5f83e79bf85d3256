"""The sampler chooses the tokens that a plain sampler chooses, row by row, for every mix of parameters.

Tests of actors/model/sampling/sampler.py, actors/model/sampling/filters.py, actors/model/sampling/token_masks.py,
actors/model/sampling/transfers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.core.requests.sampling_params import SamplingParams
from actors.core.requests.token_rules import TokenRules
from actors.model.grammar.mask import GrammarMask
from actors.model.sampling import filters, sampler, token_masks
from actors.model.sampling.sampler import sample
from actors.model.sampling.sampling_batch import SamplingBatch
from actors.model.sampling.sampling_row import SamplingRow
from tests.actors.model.sampling.plain_sampler import sample_plainly

EOS = (0, 3)
NO_TOKENS = np.zeros(0, dtype=np.int64)
VOCAB_SIZES = (1, 2, 7, 33, 64, 100, 600, 1500)


def params_of(vocab_size: int) -> st.SearchStrategy[SamplingParams]:
    token_ids = st.integers(0, vocab_size - 1)
    words = st.lists(token_ids, min_size=1, max_size=3).map(tuple)
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.0, 1e-40, 0.1, 0.7, 1.0, 1.0, 3.0, 1e30]),
        top_k=st.one_of(st.just(0), st.integers(1, 20), st.integers(1, 2 * vocab_size)),
        top_p=st.one_of(st.just(1.0), st.sampled_from([1e-12, 0.5, 0.9, 0.95, 1.0 - 1e-12]), st.floats(1e-6, 1.0)),
        min_p=st.one_of(st.just(0.0), st.sampled_from([1e-12, 0.01, 0.3, 1.0])),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.1, 1.5]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.6]),
        seed=st.integers(0, 2**64 - 1),
        min_tokens=st.sampled_from([0, 0, 3]),
        stop_token_ids=st.sampled_from([(), (1,), (vocab_size - 1, vocab_size + 5)]),
        logprobs=st.sampled_from([None, None, 0, 2]),
        logit_bias=st.one_of(
            st.just({}), st.dictionaries(token_ids, st.sampled_from([-1e6, -3.0, 0.1, 9.0]), max_size=4)
        ),
        allowed_token_ids=st.one_of(st.just(()), st.lists(token_ids, max_size=5).map(tuple)),
        bad_words=st.one_of(st.just(()), st.lists(words, max_size=3).map(tuple)),
    )


def rows_of(vocab_size: int) -> st.SearchStrategy[SamplingRow]:
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=8).map(lambda ids: np.array(ids, dtype=np.int32))
    return st.builds(
        lambda params, prompt, output: SamplingRow(params, prompt, output, EOS, TokenRules.of(params)),
        params_of(vocab_size),
        tokens,
        tokens,
    )


def logits_of(kind: str, num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """Logits that are different, tied, hardly different, or partly or wholly impossible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((num_rows, vocab_size), generator=generator)
    if kind == "peaked":
        return logits * 8
    if kind == "tied":
        return (logits * 2).round()
    if kind == "flat":
        return logits * 1e-4
    if kind == "equal":
        return torch.zeros_like(logits)
    if kind == "impossible":
        logits[torch.rand(logits.shape, generator=generator) < 0.7] = -torch.inf
    return logits


Step = tuple[Tensor, list[SamplingRow], dict[int, np.ndarray]]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    vocab_size = draw(st.sampled_from(VOCAB_SIZES))
    rows = draw(st.lists(rows_of(vocab_size), min_size=1, max_size=6))
    kind = draw(st.sampled_from(["plain", "peaked", "tied", "flat", "equal", "impossible"]))
    logits = logits_of(kind, len(rows), vocab_size, draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    token_ids = st.sets(st.integers(0, vocab_size - 1), min_size=1, max_size=6)
    allowed = draw(st.dictionaries(st.integers(0, len(rows) - 1), token_ids, max_size=3))
    return logits.to(dtype), rows, {row: allowing(chosen, vocab_size) for row, chosen in allowed.items()}


def allowing(token_ids: set[int], vocab_size: int) -> np.ndarray:
    is_allowed = np.zeros(vocab_size, dtype=bool)
    is_allowed[list(token_ids)] = True
    return is_allowed


def mask_of(allowed: dict[int, np.ndarray]) -> GrammarMask | None:
    if not allowed:
        return None
    rows = sorted(allowed)
    is_allowed = np.stack([allowed[row] for row in rows])
    is_allowed = np.pad(is_allowed, ((0, 0), (0, -is_allowed.shape[1] % 32)))
    return GrammarMask(np.array(rows), np.packbits(is_allowed, axis=1, bitorder="little").view(np.int32))


@contextmanager
def computing(*, max_chunk: int = 1 << 19, is_on_host: bool = True) -> Iterator[None]:
    """Sample in chunks of at most so many logits, in the way of a CPU or of a device that the host must wait for."""
    with pytest.MonkeyPatch.context() as patch:
        for size in ("_MAX_CHUNK_ON_HOST", "_MAX_CHUNK_ON_DEVICE"):
            patch.setattr(sampler, size, max_chunk)
        for module in (sampler, filters, token_masks):
            patch.setattr(module, "is_on_host", lambda _: is_on_host)
        yield


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps(), st.sampled_from([1, 700, 1 << 19]), st.booleans())
def test_every_mix_gives_the_tokens_of_a_plain_sampler(step: Step, max_chunk: int, is_on_host: bool) -> None:
    logits, rows, allowed = step
    with computing(max_chunk=max_chunk, is_on_host=is_on_host):
        output = sample(logits, SamplingBatch.of_rows(rows), mask_of(allowed))

    assert output.token_ids == sample_plainly(logits, rows, allowed)


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_large_vocabularies_give_the_tokens_of_a_plain_sampler(
    spread: float, dtype: torch.dtype, is_on_host: bool
) -> None:
    vocab_size = 8011 if is_on_host else 3001
    sets = [
        {"top_p": 0.9},
        {"top_p": 0.999, "temperature": 0.3},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 900, "top_p": 0.99},
        {"top_k": 2500, "top_p": 0.7},
        {"top_k": 50, "min_p": 0.01},
        {"min_p": 0.001, "top_p": 0.95},
        {"temperature": 2.0},
    ]
    rows = [
        SamplingRow(SamplingParams(**values, seed=seed), NO_TOKENS, np.arange(seed), EOS)  # type: ignore[arg-type]  # floats and integers
        for seed, values in enumerate(sets * 3)
    ]
    logits = (logits_of("plain", len(rows), vocab_size, seed=7) * spread).to(dtype)

    with computing(max_chunk=5 * vocab_size, is_on_host=is_on_host):
        token_ids = sample(logits, SamplingBatch.of_rows(rows)).token_ids

    assert token_ids == sample_plainly(logits, rows)


@pytest.mark.parametrize("is_on_host", [True, False])
def test_logits_that_are_equal_to_the_last_one_selected_count_for_top_p(is_on_host: bool) -> None:
    """Top_k 2 keeps the largest logit and 198 equal ones: it has 2 % of some of these, but not of all."""
    logits = torch.zeros(1, 1000)
    logits[0, 7:1000:5] = 5.0
    logits[0, 500] = 6.0
    params = [SamplingParams(top_k=2, top_p=0.02, seed=seed) for seed in range(300)]
    rows = [SamplingRow(one, NO_TOKENS, NO_TOKENS, EOS) for one in params]

    with computing(is_on_host=is_on_host):
        token_ids = sample(logits.expand(300, -1), SamplingBatch.of_rows(rows)).token_ids

    assert token_ids == sample_plainly(logits.expand(300, -1), rows)
    assert len(set(token_ids)) > 100


@pytest.mark.parametrize("is_on_host", [True, False])
def test_chunks_bring_each_row_its_own_log_probabilities_and_nans(is_on_host: bool) -> None:
    numbers = [2, None, 0, 2, 1, None, 0]
    params = [SamplingParams(temperature=index % 2, seed=index, logprobs=num) for index, num in enumerate(numbers)]
    rows = [SamplingRow(one, NO_TOKENS, NO_TOKENS, EOS) for one in params]
    logits = logits_of("plain", len(rows), 40, seed=5)
    logits[1, 3:6] = torch.nan

    outputs = []
    for max_chunk in (1, 3 * 40, 1 << 19):
        with computing(max_chunk=max_chunk, is_on_host=is_on_host):
            outputs.append(sample(logits, SamplingBatch.of_rows(rows)))

    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0].num_nans == [0, 3, 0, 0, 0, 0, 0]
    expected = torch.log_softmax(logits, dim=-1)
    for row, (token_id, entry, num_top) in enumerate(
        zip(outputs[0].token_ids, outputs[0].logprobs, numbers, strict=True)
    ):
        if num_top is None:
            assert entry is None
        else:
            assert entry is not None
            assert entry.token_ids == [token_id, *torch.topk(expected[row], num_top).indices.tolist()]
            assert entry.logprobs[0] == pytest.approx(float(expected[row, token_id]))


@pytest.mark.parametrize("is_on_host", [True, False])
def test_broken_logits_give_the_same_token_and_break_no_other_row(is_on_host: bool) -> None:
    nan, infinity = torch.nan, torch.inf
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.5),
        SamplingParams(seed=3, top_k=2, top_p=0.5, min_p=0.1),
    ]
    rows = [SamplingRow(one, NO_TOKENS, NO_TOKENS, EOS) for one in params for _ in range(5)]
    logits = logits_of("plain", len(rows), 100, seed=3)
    logits[0::5, 40] = nan
    logits[1::5, 50] = infinity
    logits[2::5] = -infinity
    logits[3::5, 60] = nan
    allowed = {row: allowing({1, 2, 99}, 100) for row in range(3, len(rows), 5)}

    with computing(is_on_host=is_on_host):
        output = sample(logits, SamplingBatch.of_rows(rows), mask_of(allowed))

    assert output.token_ids == sample_plainly(logits, rows, allowed)
    assert output.num_nans == [1, 0, 0, 1, 0] * 4


def test_a_mask_may_be_wider_than_the_logits() -> None:
    """A tokenizer may know more tokens than the model has logits."""
    rows = [SamplingRow(SamplingParams(temperature=0.0), NO_TOKENS, NO_TOKENS, EOS)]
    wide = mask_of({0: allowing({7, 90}, 100)})

    assert sample(torch.ones(1, 40), SamplingBatch.of_rows(rows), wide).token_ids == [7]


def test_a_token_outside_of_the_vocabulary_changes_no_other_row() -> None:
    rows = [
        SamplingRow(SamplingParams(temperature=0.0, logit_bias={100: 9.0}), NO_TOKENS, NO_TOKENS, EOS),
        SamplingRow(SamplingParams(temperature=0.0), NO_TOKENS, NO_TOKENS, EOS),
    ]
    with pytest.raises(IndexError, match="outside of the vocabulary"):
        sample(torch.zeros(2, 100), SamplingBatch.of_rows(rows))


def test_a_device_computes_a_step_without_being_waited_for() -> None:
    """Tensors of the device meta have no numbers: whatever asked for one would fail."""
    rows = [
        SamplingRow(
            SamplingParams(
                temperature=temperature,
                top_k=top_k,
                top_p=0.9,
                min_p=0.1,
                presence_penalty=0.5,
                repetition_penalty=1.1,
                logit_bias={3: 1.0},
                bad_words=((4,),),
                allowed_token_ids=(4, 5),
                min_tokens=5,
                logprobs=2,
            ),
            np.arange(5),
            np.arange(3),
            EOS,
        )
        for temperature in (0.0, 1.0)
        for top_k in (0, 2, 80)
    ]
    step = sampler._Step(SamplingBatch.of_rows(rows), mask_of({1: allowing({4}, 100)}))

    chunk = step.sample_chunk(torch.empty(6, 100, dtype=torch.bfloat16, device="meta"), 0)

    assert (chunk.token_ids.shape, chunk.num_nans.shape) == ((6,), (6,))
    assert chunk.token_ids.is_meta
    assert [[tensor.shape for tensor in tensors] for _, tensors in chunk.logprobs] == [[(6, 3), (6, 3), (6,)]]
