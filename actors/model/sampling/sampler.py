"""Samples tokens from logits, all rows at once.

Order of operations, as in vLLM: log-probabilities are taken from the raw logits; then logit_bias, penalties,
min_tokens, allowed_token_ids and bad_words, and what a grammar does not allow; a greedy row takes the argmax; a random
one goes on with temperature, min_p, top_k, top_p and draws.

A draw is one Philox uniform number of (seed, output position), inverted through the cumulative sum of the probabilities
in float64. Each row is computed from its own logits alone, so its token does not depend on the rest of the batch.

Rows are computed in chunks, so that temporary tensors stay in a CPU's cache and have a bound that does not grow with
the batch: at most 48 bytes for each logit of a chunk, which are 12 MiB on a CPU and 384 MiB elsewhere, for 256 rows of
128 Ki logits as for fewer. The host waits for the device once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.model.grammar.mask import GrammarMask
from actors.model.sampling.filters import Filters, filter_logits
from actors.model.sampling.logit_changes import StepChanges
from actors.model.sampling.logprobs import compute_logprobs, read_logprobs
from actors.model.sampling.philox import uniforms
from actors.model.sampling.sampling_batch import NO_LOGPROBS, SamplingBatch
from actors.model.sampling.token_masks import EVERY_TOKEN, forbid_unmasked
from actors.model.sampling.transfers import Fetch, is_on_host, upload

_NO_MASK: Final = -1
_MAX_CHUNK_ON_HOST: Final = 1 << 18
_MAX_CHUNK_ON_DEVICE: Final = 1 << 23
"""The most logits that are computed together, unless one row has more."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token per row.

    logprobs: per row, None where none were asked for
    num_nans: per row
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    num_nans: list[int]

    def at(self, rows: np.ndarray) -> SamplerOutput:
        """Return the output of some of the rows. rows: [m] int64"""
        chosen = rows.tolist()
        return SamplerOutput(
            [self.token_ids[row] for row in chosen],
            [self.logprobs[row] for row in chosen],
            [self.num_nans[row] for row in chosen],
        )


def sample(logits: Tensor, batch: SamplingBatch, grammar_mask: GrammarMask | None = None) -> SamplerOutput:
    """Sample one token per row.

    logits: [n, vocab_size], any floating dtype; not changed
    grammar_mask: of the rows that have a grammar, if any has
    """
    return start_sampling(logits, batch, grammar_mask).wait()


def start_sampling(
    logits: Tensor, batch: SamplingBatch, grammar_mask: GrammarMask | None = None
) -> StartedSampling | KnownSampling:
    """Queue what sample() does, without waiting for the device."""
    if grammar_mask is None and batch.is_plain and is_on_host(logits) and logits.numel() <= _MAX_CHUNK_ON_HOST:
        return KnownSampling(logits)
    step = _Step(batch, grammar_mask)
    chunks = [step.sample_chunk(logits[start:stop], start) for start, stop in _chunk_bounds(logits)]
    return StartedSampling(chunks, len(logits))


class KnownSampling:
    """The largest logits of rows on the host: all that greedy requests need, in few operators.

    A step of one token takes some milliseconds, and each operator some microseconds.
    """

    def __init__(self, logits: Tensor) -> None:
        """logits: [n, vocab_size], any floating dtype"""
        raw = logits.float()
        numbers = raw.numpy()
        found = numbers.argmax(axis=1)
        self.token_ids = torch.from_numpy(found)
        """[n] int64."""
        # numpy takes a NaN for the largest number.
        has_nans = np.isnan(numbers[np.arange(len(found)), found]).any()
        num_nans = _count_nans(raw).tolist() if has_nans else [0] * len(found)
        self._output = SamplerOutput(found.tolist(), [None] * len(found), num_nans)

    def wait(self) -> SamplerOutput:
        """Return the tokens."""
        return self._output


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The results of m rows that follow each other, still on the device.

    token_ids, num_nans: [m] int64
    logprobs: for rows that want equally many log-probabilities, their indices in the batch and compute_logprobs()
    """

    token_ids: Tensor
    num_nans: Tensor
    logprobs: list[tuple[np.ndarray, list[Tensor]]]


class StartedSampling:
    """Rows whose tokens the device samples; the tokens are on their way to the host."""

    def __init__(self, chunks: list[_Chunk], num_rows: int) -> None:
        """Queue the transfer of the results."""
        self._num_rows, self._num_chunks = num_rows, len(chunks)
        self.token_ids = torch.cat([chunk.token_ids for chunk in chunks])
        """[n] int64, on the device."""
        tensors = [tensor for chunk in chunks for tensor in (chunk.token_ids, chunk.num_nans)]
        groups = [group for chunk in chunks for group in chunk.logprobs]
        self._logprobs_rows = [rows for rows, _ in groups]
        self._fetch = Fetch([*tensors, *(tensor for _, computed in groups for tensor in computed)])

    def wait(self) -> SamplerOutput:
        """Wait for the tokens."""
        arrays = self._fetch.wait()
        end = 2 * self._num_chunks
        logprobs: list[TokenLogprobs | None] = [None] * self._num_rows
        of_groups = arrays[end:]
        for number, rows in enumerate(self._logprobs_rows):
            for row, entry in zip(rows.tolist(), read_logprobs(of_groups[3 * number : 3 * number + 3]), strict=True):
                logprobs[row] = entry
        token_ids, num_nans = (np.concatenate(arrays[first:end:2]).astype(np.int64) for first in (0, 1))
        return SamplerOutput(token_ids.tolist(), logprobs, num_nans.tolist())


class _Step:
    """Samples the rows of one step, chunk by chunk."""

    def __init__(self, batch: SamplingBatch, grammar_mask: GrammarMask | None) -> None:
        self._batch = batch
        self._grammar_mask = grammar_mask
        self._mask_of_row = np.full(len(batch), _NO_MASK)
        if grammar_mask is not None:
            self._mask_of_row[grammar_mask.rows] = np.arange(len(grammar_mask.rows))
        self._is_involved = batch.is_random | batch.has_changes | (self._mask_of_row != _NO_MASK)
        self._sums: Tensor | None = None
        self._numbers = np.zeros(len(batch))
        if batch.is_random.any():
            seeds, positions = batch.seeds_and_positions()
            self._numbers[batch.is_random] = uniforms(seeds[batch.is_random], positions[batch.is_random])

    def sample_chunk(self, logits: Tensor, start: int) -> _Chunk:
        """Sample rows that follow each other. start: the index of the first one in the batch"""
        raw, rows = logits.float(), np.arange(start, start + len(logits))
        is_random, is_involved = self._batch.is_random[rows], self._is_involved[rows]
        token_ids = torch.empty_like(raw[:, 0], dtype=torch.int64) if is_involved.all() else _argmax(raw)
        if is_involved.any():
            # The random rows come first, so that they are a slice.
            order = np.concatenate([np.flatnonzero(is_random), np.flatnonzero(is_involved & ~is_random)])
            chosen = upload(order, raw.device)
            changed = self._change(raw.index_select(0, chosen), rows[order])
            sampled = self._choose(changed, rows[order], int(is_random.sum()))
            token_ids = token_ids.index_copy(0, chosen, sampled)
        logprobs = []
        wanted = self._batch.num_logprobs[rows]
        for num_top in np.unique(wanted[wanted != NO_LOGPROBS]).tolist():
            group = np.flatnonzero(wanted == num_top)
            chosen = upload(group, raw.device)
            logprobs.append((rows[group], compute_logprobs(raw.index_select(0, chosen), token_ids[chosen], num_top)))
        return _Chunk(token_ids, _count_nans(raw), logprobs)

    def _change(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        """Apply what comes before temperature, and may do so in place. rows: the indices of logits in the batch"""
        vocab_size, batch = logits.shape[1], self._batch
        changed = np.flatnonzero(batch.has_changes[rows]).tolist()
        changes = [(index, *batch.changes(int(rows[index]), vocab_size)) for index in changed]
        if changes:
            StepChanges(changes, vocab_size).apply(logits)
        allowed = {index: change.allowed_bits for index, change, _ in changes if change.has_allowed_tokens}
        is_masked = self._mask_of_row[rows] != _NO_MASK
        is_masked[list(allowed)] = True
        if not is_masked.any():
            return logits
        bits = self._masks(rows, allowed, -(-vocab_size // 32))[is_masked]
        if is_masked.all():
            return forbid_unmasked(logits, bits)
        masked = upload(np.flatnonzero(is_masked), logits.device)
        logits[masked] = forbid_unmasked(logits.index_select(0, masked), bits)
        return logits

    def _masks(self, rows: np.ndarray, allowed: dict[int, np.ndarray], num_words: int) -> np.ndarray:
        """[n, num_words] int32, the tokens that grammars and allowed_token_ids leave. allowed: by index into rows"""
        bits = np.full((len(rows), num_words), EVERY_TOKEN, dtype=np.int32)
        mask_of_row = self._mask_of_row[rows]
        if self._grammar_mask is not None:
            has_grammar = mask_of_row != _NO_MASK
            bits[has_grammar] = self._grammar_mask.bits[mask_of_row[has_grammar], :num_words]
        for index, mask in allowed.items():
            bits[index] &= mask
        return bits

    def _choose(self, logits: Tensor, rows: np.ndarray, num_random: int) -> Tensor:
        """Draw for the first num_random rows, and take the argmax of the others: [n] int64. Changes the logits."""
        if num_random == 0:
            return _argmax(logits)
        random = rows[:num_random]
        numbers = upload(self._numbers[random], logits.device)
        if self._sums is None or len(self._sums) < num_random:
            # Memory that is taken anew for each chunk costs as much as the sums: the system has to clear it each time.
            self._sums = torch.empty((len(rows), logits.shape[1]), dtype=torch.float64, device=logits.device)
        kept = _filter(logits[:num_random], self._batch.temperature[random], self._batch.filters(random))
        drawn = _draw(kept, numbers, self._sums[:num_random])
        return drawn if num_random == len(rows) else torch.cat([drawn, _argmax(logits[num_random:])])


def _filter(logits: Tensor, temperature: np.ndarray, filters: Filters) -> Tensor:
    """Apply temperature and filters, and may do so in place."""
    # The largest logit becomes 0, so that even the smallest temperature makes no logit infinite.
    logits -= logits.amax(dim=-1, keepdim=True)
    logits /= upload(temperature, logits.device).to(logits)[:, None].clamp_min(torch.finfo(logits.dtype).tiny)
    return filter_logits(logits, filters)


def _draw(logits: Tensor, numbers: Tensor, sums: Tensor) -> Tensor:
    """[n] int64: in each row the first token whose cumulative probability exceeds the row's number.

    sums: [n, vocab_size] float64, memory for the cumulative probabilities
    """
    cumulative = torch.cumsum(torch.softmax(logits, dim=-1), dim=-1, dtype=torch.float64, out=sums)
    total = cumulative[:, -1]
    # Rounding may make number * total equal to total, which no token exceeds. And a token of probability 0 must not be
    # drawn.
    target = torch.minimum(total * numbers, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return drawn.clamp_max(logits.shape[-1] - 1)


def _argmax(logits: Tensor) -> Tensor:
    """[n] int64, the first of the largest. On the CPU numpy's takes a tenth of the time of torch's."""
    if is_on_host(logits):
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=-1)


def _count_nans(raw: Tensor) -> Tensor:
    """[n] int64. On the CPU counted only where there are any: a maximum carries every NaN and costs a short pass."""
    if is_on_host(raw) and not raw.amax(dim=-1).isnan().any():
        return torch.zeros(len(raw), dtype=torch.int64)
    return raw.isnan().sum(dim=-1)


def _chunk_bounds(logits: Tensor) -> Iterator[tuple[int, int]]:
    num_rows, vocab_size = logits.shape
    num_logits = _MAX_CHUNK_ON_HOST if is_on_host(logits) else _MAX_CHUNK_ON_DEVICE
    size = max(1, num_logits // vocab_size)
    for start in range(0, num_rows, size):
        yield start, min(start + size, num_rows)
