"""A step that the device computes, and its outputs, which come to the host later.

On a GPU the next step is launched before the tokens of this one have come, so that the device never waits for the host.
The tokens stay on the device, where the next step reads them (LateTokens).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from actors.core.outputs.model_runner_output import NO_TOKEN, ModelRunnerOutput, TokenLogprobs
from actors.model.input_batch import AwaitedTokens, InputBatch, StepInputs
from actors.model.sampling.sampler import KnownSampling, SamplerOutput, StartedSampling
from kv_transfer.device_kind import StreamEvent


@dataclass(frozen=True, slots=True)
class LateTokens:
    """Tokens of a step's input that the host does not know yet. All are on the device.

    indices:   [n] int64, where they stand in the step's input
    token_ids: [n] int64
    """

    indices: Tensor
    token_ids: Tensor

    def put_into(self, token_ids: Tensor) -> Tensor:
        """Return a copy of the step's input with these tokens. token_ids: [num_tokens], any integers"""
        return token_ids.index_copy(0, self.indices, self.token_ids.to(token_ids.dtype))


class KnownStep:
    """A step whose outputs are known, although the device may still compute it."""

    def __init__(self, output: ModelRunnerOutput, computed: StreamEvent | None = None) -> None:
        """computed: the point at which the device has computed the step; None if it has"""
        self._output, self._computed = output, computed

    @property
    def is_finished(self) -> bool:
        """Whether result() returns at once, and may be called by any thread."""
        return self._computed is None

    def result(self) -> ModelRunnerOutput:
        """Wait until the step is computed, since its duration is measured, and later steps must not pile up."""
        if self._computed is not None:
            self._computed.synchronize()
            self._computed = None
        return self._output


class SamplingStep:
    """A step in which one token is sampled for each request whose last token it computes. One thread uses it."""

    def __init__(
        self,
        batch: InputBatch,
        req_ids: list[str],
        inputs: StepInputs,
        sampling: StartedSampling | KnownSampling,
        prompt_logprobs: dict[str, list[TokenLogprobs]] | None,
    ) -> None:
        """Count the tokens in the batch. prompt_logprobs: of prompts that end in the step, by request id"""
        self._batch, self._req_ids, self._sampled = batch, req_ids, inputs.sampled
        self._sampling, self._prompt_logprobs = sampling, prompt_logprobs
        self._awaited: AwaitedTokens = batch.extend(inputs.sampled_rows)
        self._output: ModelRunnerOutput | None = None
        self.is_replayed = False
        """Whether a CUDA graph has computed the step, or a compiled one; set before result()."""

    @property
    def is_finished(self) -> bool:
        """Whether result() returns at once, and may be called by any thread."""
        return self._output is not None

    def result(self) -> ModelRunnerOutput:
        """Wait for the tokens, and write them into the batch, at the first call."""
        if self._output is None:
            sampled = self._sampling.wait()
            token_ids = np.full((len(self._req_ids), 1), NO_TOKEN, dtype=np.int64)
            token_ids[self._sampled, 0] = sampled.token_ids
            self._batch.fill(self._awaited, token_ids[self._sampled, 0])
            output = collect(self._req_ids, token_ids, self._sampled, sampled)
            output.prompt_logprobs_dict = self._prompt_logprobs or {}
            output.is_replayed = self.is_replayed
            self._output = output
        return self._output


LaunchedStep = KnownStep | SamplingStep


def collect(req_ids: list[str], token_ids: np.ndarray, sampled: np.ndarray, output: SamplerOutput) -> ModelRunnerOutput:
    """Make the step's output, which names requests by their ids.

    token_ids: [num_requests, most tokens] int64, filled up with NO_TOKEN
    sampled:   [num_positions] int64, the index of the request that each sampled position belongs to
    """
    logprobs: dict[str, list[TokenLogprobs]] = {}
    for index, entry in zip(sampled.tolist(), output.logprobs, strict=True):
        if entry is not None:
            logprobs.setdefault(req_ids[index], []).append(entry)
    num_nans: Counter[str] = Counter()
    if any(output.num_nans):
        for index, count in zip(sampled.tolist(), output.num_nans, strict=True):
            if count:
                num_nans[req_ids[index]] += count
    return ModelRunnerOutput(req_ids, token_ids, logprobs=logprobs, num_nans_in_logits=num_nans)
