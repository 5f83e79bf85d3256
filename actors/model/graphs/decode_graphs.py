"""Decode steps as graphs: captured once for each batch size, replayed for each step that is nothing but decoding.

To launch the thousand small operators of a decode step takes the host longer than the device takes to compute them. A
graph launches all of them at once. It repeats exactly what was recorded: the same kernels, on the same memory, with the
same numbers of the host. So all that changes from step to step lies in memory that stays (decode_inputs.py), and the
logits go into memory that all graphs share.

A step is replayed if each request computes one token and gets its next one, without drafts, images, prompt embeddings,
prompt log-probabilities or vectors; all other steps run eagerly. An engine with adapters has a second graph of each
size, in which each row may have an adapter. Sampling is no part of a graph.

Capturing is bounded by time and memory. The largest size comes first, since the smaller ones then find their memory in
its pool; a batch for which no graph of its size was captured is filled up to the next larger one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from actors.model.attention.static_batch import StaticAttention
from actors.model.forward import FlatForward
from actors.model.graphs.capture_sizes import smallest_that_holds
from actors.model.graphs.decode_inputs import DecodeInputs, DecodeStep
from actors.model.graphs.recorder import Graph, GraphRecorder
from actors.model.input_batch import StepInputs
from actors.model.launched_step import LateTokens

logger = logging.getLogger(__name__)


class StaticAdapters(Protocol):
    """A store of adapters whose products a graph can record."""

    def use_slots(self, slots: Tensor) -> None:
        """Let the next forward read each token's slot on the device. slots: [num_tokens] int32, NO_SLOT for none"""

    def use_none(self) -> None:
        """Let the next forward use no adapter."""


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """How long capturing may take, and how much memory; what is begun is ended."""

    time_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """A graph's batch size, and whether its rows may have adapters."""

    size: int
    has_adapters: bool


class DecodeGraphs:
    """The graphs of one rank. Belongs to the thread that computes steps."""

    def __init__(
        self,
        forward: FlatForward,
        attention: StaticAttention,
        recorder: GraphRecorder,
        sizes: Sequence[int],
        *,
        max_model_len: int,
        vocab_size: int,
        adapters: StaticAdapters | None = None,
    ) -> None:
        """sizes: batch sizes to capture, in increasing order; at least one"""
        self._forward, self._attention, self._recorder = forward, attention, recorder
        self._adapters = adapters
        self._wanted = tuple(sizes)
        self._max_model_len = max_model_len
        kv_cache = attention.kv_cache
        max_blocks = -(-max_model_len // attention.block_size)
        self._inputs = DecodeInputs(self._wanted[-1], max_blocks, kv_cache.device)
        self._logits = torch.zeros(self._wanted[-1], vocab_size, dtype=forward.model.dtype, device=kv_cache.device)
        self._graphs: dict[_Kind, Graph] = {}
        self._sizes: tuple[int, ...] = ()
        self.summary = ""
        """The batch sizes that were captured, what that took and why it ended, in words; empty before capture()."""
        self.num_replays = 0
        """How many steps were replayed."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that were captured, in increasing order."""
        return self._sizes

    @torch.inference_mode()
    def capture(
        self, limits: CaptureLimits, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Capture the largest size first, until all are captured or a limit is reached. The KV cache stays as it is.

        say: called before each size with how far it is
        """
        started_s, free_bytes = clock(), self._recorder.free_memory_bytes()
        reason = "all sizes are captured"
        for index, size in enumerate(reversed(self._wanted)):
            taken_bytes = free_bytes - self._recorder.free_memory_bytes()
            if clock() - started_s >= limits.time_s:
                reason = "the time limit is reached"
                break
            if taken_bytes >= limits.memory_bytes:
                reason = "the memory limit is reached"
                break
            say(f"capturing CUDA graphs, {index + 1} of {len(self._wanted)} batch sizes")
            try:
                self._capture_size(size)
            except RuntimeError as error:
                # torch and Triton raise this for all that a graph cannot hold. The engine serves without this graph.
                reason = f"{size} requests: {str(error).splitlines()[0]}"
                break
            self._sizes = (size, *self._sizes)
        taken_bytes, elapsed_s = free_bytes - self._recorder.free_memory_bytes(), clock() - started_s
        self.summary = self._describe(reason, taken_bytes, elapsed_s)
        logger.info(
            "captured CUDA graphs",
            extra={
                "sizes": list(self._sizes),
                "num_missing": len(self._wanted) - len(self._sizes),
                "ended_because": reason,
                "size_bytes": taken_bytes,
                "elapsed_s": round(elapsed_s, 3),
            },
        )

    def _describe(self, reason: str, taken_bytes: int, elapsed_s: float) -> str:
        if not self._sizes:
            return f"none: {reason}"
        sizes = ", ".join(map(str, self._sizes))
        return f"for {sizes} requests, {taken_bytes / (1 << 20):.0f} MiB, {elapsed_s:.1f} s; {reason}"

    def size_for(self, inputs: StepInputs) -> int | None:
        """Return the batch size of the graph that computes a step; None if the step has to run eagerly.

        A request that wants a vector gets no token, so its step is no decode step.
        """
        num_requests = len(inputs.shape.num_computed)
        is_decode = len(inputs.sampled) == inputs.shape.query_starts[-1] == num_requests
        if not is_decode or inputs.drafts is not None or inputs.prompts is not None or inputs.embeds is not None:
            return None
        return smallest_that_holds(self._sizes, num_requests)

    def run(self, step: DecodeStep, size: int, late: LateTokens | None = None) -> Tensor:
        """Queue a step, and return its logits, [num_requests, vocab_size]; they are valid until the next call.

        size: as size_for() returned it; late: tokens that only the device knows
        """
        self._inputs.write(step, size, self._attention.kv_cache, late)
        self._graphs[_Kind(size, step.adapter_slots is not None)].replay()
        self.num_replays += 1
        return self._logits[: len(step.token_ids)]

    def _capture_size(self, size: int) -> None:
        """Capture the graphs of a size. No row has a request, so that nothing is written into the cache."""
        self._inputs.clear()
        kinds = [_Kind(size, has_adapters) for has_adapters in ((False,) if self._adapters is None else (False, True))]
        graphs: dict[_Kind, Graph] = {}
        for kind in kinds:
            # The first run compiles kernels and makes the libraries allocate what they keep.
            self._compute(kind)
            graphs[kind] = self._recorder.record(partial(self._compute, kind))
        self._graphs |= graphs

    def _compute(self, kind: _Kind) -> None:
        inputs, size = self._inputs, kind.size
        batch = self._attention.decode(inputs.attention(size), self._max_model_len)
        if kind.has_adapters and self._adapters is not None:
            self._adapters.use_slots(inputs.adapter_slots(size))
        try:
            logits = self._forward(inputs.token_ids(size), inputs.positions(size), batch, inputs.indices[:size])
        finally:
            if self._adapters is not None:
                self._adapters.use_none()
        self._logits[:size].copy_(logits)
