"""Holds that work on a side stream comes after the work on KV blocks that it depends on.

The simulated device computes at once, so blocks that are read too early hold the right numbers all the same. This file
notes for each block of a watched KV cache which operator of the main stream has written it last, and which has read or
written it last. An operator on a side stream may read a block if its stream has waited for an event behind the last
write, and write it if the event is behind the last use.

Blocks are taken from the arguments of the attention kernels, from indices along the first dimension, or from where a
view lies. The opposite order needs no check: the host waits for a transfer's end before it launches a step that uses
the blocks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.simulated_gpu.kernels import attend_tiles, write_kv

_ROWS_READ: Final = {"aten::index_select"}
_ROWS_WRITTEN: Final = {"aten::index_copy_", "aten::index_fill_", "aten::index_add_"}
_SHAPED_LIKE: Final = ("aten::new_", "aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like")
"""Operators that read the shape, the dtype and the device of their argument, and no numbers."""


class Unordered(RuntimeError):
    """Work was queued on a side stream that does not wait for what the main stream does with its memory."""


@dataclass
class _Blocks:
    """Holds the points at which the main stream has written, and has used, each block of a cache."""

    block_bytes: int
    written: np.ndarray
    used: np.ndarray


@dataclass(frozen=True)
class _Touch:
    """Blocks that an operator reads or writes. ids: [n] int64, or a slice of all blocks"""

    blocks: _Blocks
    ids: np.ndarray | slice
    is_write: bool


class BlockOrder:
    """The order of the device's work on all watched caches."""

    def __init__(self) -> None:
        self._caches: dict[int, _Blocks] = {}
        self._lock = threading.Lock()
        self.point = 0
        """The number of operators that were queued on the main stream."""

    def watch(self, kv_cache: Tensor) -> None:
        """Watch a cache from now on, until its memory is freed. kv_cache: [num_blocks, ...], the host tensor"""
        memory = kv_cache.untyped_storage()
        num_blocks, address = len(kv_cache), memory.data_ptr()
        zeros = np.zeros(num_blocks, dtype=np.int64)
        self._caches[address] = _Blocks(memory.nbytes() // num_blocks, zeros, zeros.copy())
        weakref.finalize(memory, self._caches.pop, address, None)

    def queue(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note an operator of the main stream. args, kwargs: with host tensors"""
        touches = self._touches(func, args, kwargs)
        with self._lock:
            self.point += 1
            for touch in touches:
                touch.blocks.used[touch.ids] = self.point
                if touch.is_write:
                    touch.blocks.written[touch.ids] = self.point

    def check(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], waited: int) -> None:
        """Check an operator of a side stream that has waited for the main stream up to a point. Raises Unordered."""
        for touch in self._touches(func, args, kwargs):
            points = (touch.blocks.used if touch.is_write else touch.blocks.written)[touch.ids]
            if (points > waited).any():
                verb = "writes blocks that are still used" if touch.is_write else "reads blocks that are not computed"
                raise Unordered(f"{func} {verb}: it has waited up to {waited}, and not up to {points.max()}")

    def _touches(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Touch]:
        if not self._caches:
            return []
        if func is write_kv or func is attend_tiles:
            blocks = self._caches.get(args[2 if func is attend_tiles else 0].untyped_storage().data_ptr())
            kernel_ids = _written_blocks(args) if func is write_kv else _attended_blocks(args)
            return [] if blocks is None else [_Touch(blocks, kernel_ids, func is write_kv)]
        schema = getattr(func, "_schema", None)
        if schema is None or schema.name.startswith(_SHAPED_LIKE) or _makes_view(schema):
            return []
        writes = {id(leaf) for leaf in _written_arguments(schema, args, kwargs)}
        tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
        touches = []
        for tensor in tensors:
            if (blocks := self._caches.get(tensor.untyped_storage().data_ptr())) is not None and tensor.numel():
                ids = _block_ids(schema.name, tensor, args, blocks.block_bytes)
                touches.append(_Touch(blocks, ids, id(tensor) in writes))
        return touches


def _written_blocks(args: Sequence[Any]) -> np.ndarray:
    """Return the blocks of write_kv()'s slots."""
    slots, block_size = args[3].numpy(), args[4][3]
    return np.unique(slots[slots >= 0] // block_size)


def _attended_blocks(args: Sequence[Any]) -> np.ndarray:
    """Return the blocks that attend_tiles() reads."""
    seq_lens, block_tables, block_size = args[6].numpy(), args[7].numpy(), args[11][3]
    num_blocks = -(-seq_lens // block_size)
    is_read = np.arange(block_tables.shape[1]) < num_blocks[:, None]
    return np.unique(block_tables[: len(seq_lens)][is_read])


def _makes_view(schema: Any) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)


def _written_arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    return tree_leaves(
        [
            given.get(argument.name)
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    )


def _block_ids(name: str, tensor: Tensor, args: Sequence[Any], block_bytes: int) -> np.ndarray | slice:
    """Return the blocks in which an operator's argument lies, or the rows that it chooses among the argument's."""
    first = tensor.storage_offset()
    if name in _ROWS_READ | _ROWS_WRITTEN and tensor is args[0] and args[1] == 0:
        rows = args[2].numpy().reshape(-1)
        return np.unique((first + rows * tensor.stride(0)) * tensor.element_size() // block_bytes)
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    itemsize = tensor.element_size()
    return slice(first * itemsize // block_bytes, last * itemsize // block_bytes + 1)


ORDER: Final = BlockOrder()
