"""A graph on the simulated GPU: it records operators with their memory, and replays them there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.simulated_gpu.block_order import ORDER
from tests.simulated_gpu.tensors import SIMULATION, memory_of, poison


class FreedMemory(RuntimeError):
    """A graph reads memory that no tensor has any more: on a GPU other tensors may have it by now."""


@dataclass(frozen=True)
class _Operator:
    """outputs: the results that do not share memory with an argument"""

    func: Any
    args: Any
    kwargs: Any
    outputs: tuple[Tensor, ...]


class Pool:
    """The memory of several graphs: what one computes may lie where another one's results were."""

    def __init__(self) -> None:
        self.graphs: WeakSet[SimulatedGraph] = WeakSet()


@dataclass(eq=False)
class SimulatedGraph:
    """Has the interface of torch.cuda.CUDAGraph that the project uses."""

    pool: Pool = field(default_factory=Pool)
    num_replays: int = 0
    _operators: list[_Operator] = field(default_factory=list)
    _computed: dict[int, Tensor] = field(default_factory=dict)
    _read: set[int] = field(default_factory=set)

    def record(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        """Take an operator. One that only makes a view does nothing when it is replayed."""
        arguments = {memory_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        # Numbers of the host, as tensors without dimensions, belong to no tensor of the device: a launch contains them.
        self._read |= {address for address in arguments if SIMULATION.owners[address]} - set(self._computed)
        results = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        new = tuple(leaf for leaf in results if memory_of(leaf) not in arguments)
        schema = getattr(func, "_schema", None)
        if new or schema is None or schema.is_mutable:
            self._operators.append(_Operator(func, args, kwargs, new))
        for leaf in new:
            self._computed[memory_of(leaf)] = leaf

    def allocate(self, memory: Tensor) -> None:
        """Take memory that is allocated while the graph records: it is the graph's."""
        self._computed[memory_of(memory)] = memory

    def replay(self) -> None:
        """Compute all of it again, on the same memory."""
        if any(SIMULATION.owners[address] <= 0 for address in self._read):
            raise FreedMemory("a graph reads memory that no tensor has any more")
        for graph in self.pool.graphs:
            graph.forget_results()
        with torch.inference_mode():
            for operator in self._operators:
                ORDER.queue(operator.func, operator.args, operator.kwargs)
                outputs = operator.func(*operator.args, **operator.kwargs)
                fresh = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
                arguments = {
                    memory_of(x) for x in tree_leaves((operator.args, operator.kwargs)) if isinstance(x, Tensor)
                }
                fresh = [leaf for leaf in fresh if memory_of(leaf) not in arguments]
                for target, source in zip(operator.outputs, fresh, strict=True):
                    target.copy_(source)
        self.num_replays += 1

    def forget_results(self) -> None:
        """Overwrite everything that the graph computes."""
        for leaf in self._computed.values():
            poison(leaf)


@contextmanager
def recording(graph: SimulatedGraph, pool: Pool | None = None, stream: object = None) -> Iterator[None]:
    """Record into a graph what this thread does, as torch.cuda.graph does."""
    if pool is not None:
        graph.pool = pool
    assert SIMULATION.recorder is None, "one graph records at a time"
    SIMULATION.recorder, SIMULATION.thread_of_recorder = graph, threading.get_ident()
    try:
        yield
    finally:
        SIMULATION.recorder = None
    graph.pool.graphs.add(graph)
