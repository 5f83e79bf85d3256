"""A compiled step of one token.

A step of one token is what a single stream has, and its time goes to the number of operators as much as to what they
compute. torch's compiler makes few operators of the many small ones between products, norms and attention: rotary
positions, residuals, activations. It is told to round as torch does, and each start compares the results with the plain
step's: a compiled step is used only if all bits are the same. So a request's tokens do not depend on
whether other requests are in its step, which then is a plain one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule

from actors.model.attention.batch_attention import BatchAttention
from actors.model.compiled.kept_calls import KeptCalls
from actors.model.compiled.one_token_trace import TracedBatch, example_inputs, trace_one_token
from actors.model.forward import FlatForward

logger = logging.getLogger(__name__)

_OPTIONS: Final = {
    # Round after each operator, as torch's own operators do.
    "emulate_precision_casts": True,
    # A step's small operators read a few KiB each, so one thread computes them soonest.
    "cpp.threads": 1,
    # No processes that outlive the compilation.
    "compile_threads": 1,
    # The shapes are those of the trace, in every step.
    "size_asserts": False,
    "alignment_asserts": False,
}


class OneTokenStep:
    """A compiled step of a model. Belongs to the thread that computes steps. Is a OneTokenForward."""

    def __init__(self, forward: FlatForward) -> None:
        """Trace and compile, which takes from seconds to a minute.

        Raises RuntimeError, TypeError or AssertionError where torch cannot trace the model or compile what was traced.
        """
        self._kept = KeptCalls()
        self._batch = TracedBatch(self._kept)
        started_s = time.monotonic()
        graph = trace_one_token(forward, self._batch, self._kept)
        traced_s = time.monotonic()
        with self._kept.running():
            self._compiled = compile_graph(graph)
        self.elapsed_s = time.monotonic() - started_s
        logger.info(
            "compiled the step of one token",
            extra={
                "num_operators": sum(node.op == "call_function" for node in graph.graph.nodes),
                "num_kept": len(self._kept),
                "trace_s": round(traced_s - started_s, 3),
                "elapsed_s": round(self.elapsed_s, 3),
            },
        )

    def __call__(self, input_ids: Tensor, positions: Tensor, batch: BatchAttention, indices: Tensor) -> Tensor:
        """See OneTokenForward."""
        self._batch.current = batch
        with self._kept.running():
            return self._compiled(input_ids, positions, indices)


def compile_graph(graph: GraphModule) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Compile a traced step with inductor, which runs a C++ compiler. It keeps what it compiled in a cache on disk.

    Raises RuntimeError or AssertionError where that fails.
    """
    # To import the compiler takes seconds.
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    formulas = {**select_decomp_table(), torch.ops.aten.silu.default: _silu}
    compiled: Any = compile_fx(graph, list(example_inputs()), config_patches=_OPTIONS, decompositions=formulas)

    def compute(input_ids: Tensor, positions: Tensor, indices: Tensor) -> Tensor:
        output: Tensor | Sequence[Tensor] = compiled(input_ids, positions, indices)
        return output if isinstance(output, Tensor) else output[0]

    return compute


def _silu(inputs: Tensor) -> Tensor:
    """Compute x / (1 + exp(-x)) as torch's kernel does; inductor's own formula multiplies by a sigmoid."""
    numbers = inputs.float()
    return (numbers / (1 + (-numbers).exp())).to(inputs.dtype)
