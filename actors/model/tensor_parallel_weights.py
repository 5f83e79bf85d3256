"""Where a rank's slices of the weights come from: the checkpoint's files, or a whole model that was drawn at random.

Some checkpoints name or cut weights otherwise than transformers' models do (each expert's matrices apart, where the
model has one tensor for all experts). transformers says how the two belong together; MergedWeights reads by that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from actors.model.errors import CheckpointError

# Experts one after the other, or that for several matrices, which then lie one after the other within each expert.
_KNOWN_MERGES = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])


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


@dataclass(frozen=True, slots=True)
class _Experts:
    """A weight that the checkpoint has in parts: [experts] of each of the matrices that lie one after the other."""

    matrices: tuple[tuple[str, ...], ...]


class MergedWeights:
    """A checkpoint's weights under the names that transformers' models use."""

    def __init__(self, checkpoint: CheckpointWeights, model_type: str) -> None:
        self._checkpoint = checkpoint
        conversions = get_checkpoint_conversion_mapping(model_type) or []  # type: ignore[no-untyped-call]  # left untyped
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See WeightSource. A weight that is to be merged in a way that is not known here counts as missing."""
        found = self._find(name)
        if not isinstance(found, _Experts):
            return None if found is None else self._checkpoint.shape(found)
        counts = {len(experts) for experts in found.matrices}
        shapes = [self._checkpoint.shape(experts[0]) or () for experts in found.matrices]
        return (max(counts), sum(shape[0] for shape in shapes), *shapes[0][1:]) if len(counts) == 1 else None

    def read(self, name: str, dim: int = 0, rows: range | None = None) -> Tensor:
        """See WeightSource; rows lie within one of the matrices that are merged."""
        found = self._find(name)
        assert found is not None, "only what has a shape is read"
        if not isinstance(found, _Experts):
            return self._checkpoint.read(found, dim, rows)
        if rows is None:
            return torch.cat([self._stack(experts, 0, None) for experts in found.matrices], dim=1)
        if dim != 1:
            (experts,) = found.matrices
            return self._stack(experts, dim - 1, rows)
        num_rows = (self._checkpoint.shape(found.matrices[0][0]) or (1,))[0]
        matrix, first_row = divmod(rows.start, num_rows)
        return self._stack(found.matrices[matrix], 0, range(first_row, first_row + len(rows)))

    def _stack(self, experts: Sequence[str], dim: int, rows: range | None) -> Tensor:
        return torch.stack([self._checkpoint.read(expert, dim, rows) for expert in experts])

    def _find(self, name: str) -> str | _Experts | None:
        """The name, or the names, that a weight has in the checkpoint; None if it is not there."""
        for candidate in self._names(name):
            if self._checkpoint.shape(candidate) is not None:
                return candidate
            for converter in self._converters:
                if (found := self._find_experts(candidate, converter)) is not None:
                    return found
        return None

    def _names(self, name: str) -> Iterator[str]:
        yield name
        for renaming in self._renamings:
            for source, target in zip(renaming.source_patterns, renaming.target_patterns, strict=True):
                if target in name:
                    yield name.replace(target, source)

    def _find_experts(self, name: str, converter: WeightConverter) -> _Experts | None:
        kinds = [type(operation).__name__ for operation in converter.operations]
        (target, *others) = converter.target_patterns
        if others or not name.endswith(target) or kinds not in _KNOWN_MERGES:
            return None
        prefix = name.removesuffix(target)
        matrices = tuple(tuple(self._numbered(prefix + source)) for source in converter.source_patterns)
        return _Experts(matrices) if all(matrices) else None

    def _numbered(self, pattern: str) -> Iterator[str]:
        """The names that there are for 0, 1, 2, … in the place of *."""
        for number in itertools.count():
            name = pattern.replace("*", str(number))
            if self._checkpoint.shape(name) is None:
                return
            yield name


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
