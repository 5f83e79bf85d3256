"""Where a rank's slices of the weights come from: the checkpoint's files, or a whole model that was drawn at random."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actors.model.errors import CheckpointError


class WeightSource(Protocol):
    """Weights by name."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The whole weight's shape; None if there is none of that name."""

    def read(self, name: str, dim: int = 0, rows: range | None = None) -> Tensor:
        """A weight, or only these rows of one of its dimensions."""


class CheckpointWeights:
    """A directory's safetensors files, of which only what is asked for is read. Use as a context manager."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError if a file cannot be opened."""
        self._files = ExitStack()
        self._file_of: dict[str, Any] = {}  # safetensors' handles are untyped
        for path in sorted(directory.glob("*.safetensors")):
            try:
                file = self._files.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"model: the weights in {directory} cannot be loaded: {error}") from error
            self._file_of.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> CheckpointWeights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.__exit__(kind, error, at)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See WeightSource."""
        file = self._file_of.get(name)
        return None if file is None else tuple(file.get_slice(name).get_shape())

    def read(self, name: str, dim: int = 0, rows: range | None = None) -> Tensor:
        """See WeightSource."""
        file = self._file_of[name]
        if rows is None:
            whole: Tensor = file.get_tensor(name)
            return whole
        part: Tensor = file.get_slice(name)[(slice(None),) * dim + (slice(rows.start, rows.stop),)]
        return part

    def first_dtype(self) -> torch.dtype:
        """Of the first floating-point weight: the checkpoint's dtype to transformers if the config is silent."""
        for name in self._file_of:
            dtype = self.read(name).dtype
            if dtype.is_floating_point:
                return dtype
        return torch.float32


class DrawnWeights:
    """A whole model's weights, which every rank has drawn from the same seed."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See WeightSource."""
        weight = self._weights.get(name)
        return None if weight is None else tuple(weight.shape)

    def read(self, name: str, dim: int = 0, rows: range | None = None) -> Tensor:
        """See WeightSource."""
        weight = self._weights[name].detach()
        return weight if rows is None else weight.narrow(dim, rows.start, len(rows)).clone()
