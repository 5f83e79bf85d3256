"""Measures what sampling costs, all rows at once beside one row after another.

Samples one step's rows, each with other parameters, by the sampler and by the plain one that the tests compare it with.
The two take turns, and choose the same tokens. Times are the thread's CPU time, so that other processes count little.

    python -m benchmarks.sampling
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from actors.core.requests.sampling_params import SamplingParams
from actors.core.requests.token_rules import TokenRules
from actors.model.grammar.mask import GrammarMask
from actors.model.sampling.sampler import sample
from actors.model.sampling.sampling_batch import SamplingBatch
from actors.model.sampling.sampling_row import SamplingRow
from tests.actors.model.sampling.plain_sampler import sample_plainly

_NUM_PROMPT = 500
_NUM_OUTPUT = 200
_EOS = (2,)
_MIXES: dict[str, list[SamplingParams]] = {
    "mixed": [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=50),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1),
        SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={7: 2.0, 90: -5.0}),
        SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_tokens=400, bad_words=((5, 6), (7,))),
    ],
    "top_p 0.9": [SamplingParams(temperature=1.0, top_p=0.9)],
    "top_k 20, top_p 0.8": [SamplingParams(temperature=0.7, top_k=20, top_p=0.8)],
    "temperature": [SamplingParams(temperature=1.0)],
    "greedy": [SamplingParams(temperature=0.0)],
}
_WITH_GRAMMAR = 8
"""Every so many rows of the mixed ones, one has a grammar."""


def run(
    sizes: Annotated[str, typer.Option(help="Rows x vocabulary.")] = "64x32768,256x131072",
    mixes: Annotated[str, typer.Option()] = "mixed",
    dtype: Annotated[str, typer.Option(help="The dtype of the logits.")] = "float32",
    pairs: Annotated[int, typer.Option(help="How often the two take turns.")] = 5,
    threads: Annotated[int, typer.Option()] = 1,
) -> None:
    """Print milliseconds per step: medians, and the least and the most."""
    torch.set_num_threads(threads)
    table = Table("rows x vocabulary", "parameters", "row by row (ms)", "at once (ms)", "times as fast", title=dtype)
    for size in sizes.split(","):
        for mix in mixes.split(","):
            num_rows, vocab_size = map(int, size.split("x"))
            plain, batched = _measure(num_rows, vocab_size, mix, getattr(torch, dtype), pairs)
            ratio = statistics.median(a / b for a, b in zip(plain, batched, strict=True))
            table.add_row(size, mix, _describe(plain), _describe(batched), f"{ratio:.1f}")
    Console().print(table)


def _describe(times_ms: list[float]) -> str:
    return f"{statistics.median(times_ms):.1f} ({min(times_ms):.1f} to {max(times_ms):.1f})"


@torch.inference_mode()
def _measure(
    num_rows: int, vocab_size: int, mix: str, dtype: torch.dtype, pairs: int
) -> tuple[list[float], list[float]]:
    generator = np.random.default_rng(0)
    # As spread as a language model's logits: a few tokens have most of the probability.
    logits = torch.from_numpy(generator.standard_normal((num_rows, vocab_size), dtype=np.float32) * 3.0).to(dtype)
    rows = [_row(_MIXES[mix][index % len(_MIXES[mix])], index, vocab_size, generator) for index in range(num_rows)]
    masked = np.arange(0, num_rows, _WITH_GRAMMAR) if mix == "mixed" else np.zeros(0, dtype=np.int64)
    is_allowed = generator.random((len(masked), vocab_size)) < 0.3
    bits = np.packbits(is_allowed, axis=1, bitorder="little").view(np.int32)
    mask = GrammarMask(masked, bits) if len(masked) else None
    allowed = dict(zip(masked.tolist(), is_allowed, strict=True))
    batch = SamplingBatch.of_rows(rows)
    times_ms: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 1):
        started_s = time.thread_time()
        expected = sample_plainly(logits, rows, allowed)
        between_s = time.thread_time()
        token_ids = sample(logits, batch, mask).token_ids
        ended_s = time.thread_time()
        assert token_ids == expected
        if pair:
            times_ms[0].append((between_s - started_s) * 1e3)
            times_ms[1].append((ended_s - between_s) * 1e3)
    return times_ms


def _row(params: SamplingParams, seed: int, vocab_size: int, generator: np.random.Generator) -> SamplingRow:
    prompt, output = (generator.integers(0, vocab_size, count) for count in (_NUM_PROMPT, _NUM_OUTPUT))
    params = replace(params, seed=seed)
    return SamplingRow(params, prompt, output, _EOS, TokenRules.of(params))


if __name__ == "__main__":
    typer.run(run)
