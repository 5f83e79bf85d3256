"""Sources of a rank's slices of the weights: the checkpoint's files, or a whole model that was drawn at random.

Some checkpoints name or cut weights otherwise than transformers' models do (each expert's matrices apart, where the
model has one tensor for all experts). transformers says how the two belong together; MergedWeights reads by that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from actors.model.config.config_rules import architecture_name
from actors.model.errors import CheckpointError, UnsupportedModel

# Experts are stacked; the second kind then concatenates several matrices within each expert.
_KNOWN_MERGES = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])


class WeightSource(Protocol):
    """Weights by name. unread: names of weights that the model does not have."""

    unread: list[str]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the whole weight's shape; None if there is no weight of that name."""

    def read(self, name: str, dim: int = 0, rows: range | None = None) -> Tensor:
        """Read a weight, or only the given rows along dim."""


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

    @property
    def names(self) -> Collection[str]:
        """Return the names of all weights, as the files have them."""
        return self._file_of.keys()

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
        """Return the dtype of the first floating-point weight, which transformers uses if the config names none."""
        for name in self._file_of:
            dtype = self.read(name).dtype
            if dtype.is_floating_point:
                return dtype
        return torch.float32


@dataclass(frozen=True, slots=True)
class _Experts:
    """A weight that the checkpoint has in parts. matrices: for each concatenated matrix, its name for every expert."""

    matrices: tuple[tuple[str, ...], ...]


class MergedWeights:
    """A checkpoint's weights under the names that transformers' models use.

    unread: the checkpoint's weights, under the model's names, that the model has no place for
    sources: the checkpoint's names of each of the model's weights
    """

    def __init__(self, checkpoint: CheckpointWeights, model: PreTrainedModel) -> None:
        """Raises UnsupportedModel if weights have to be converted in a way that is not known here.

        model: as transformers builds it; its weights are not looked at (the meta device will do)
        """
        self._checkpoint = checkpoint
        conversions = get_model_conversion_mapping(model)
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._found: dict[str, str | _Experts] = {}
        self.unread: list[str] = []
        self.sources: dict[str, list[str]] = defaultdict(list)
        parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        known = model.state_dict()
        for name in sorted(checkpoint.names, key=dot_natural_key):
            target, pattern = self._rename(name, model.base_model_prefix, known)
            if target not in known:
                self.unread.append(target)
                continue
            self.sources[target].append(name)
            if pattern is None:
                self._found[target] = name
            else:
                parts[target][pattern].append(name)
        for target, by_pattern in parts.items():
            self._found[target] = self._merge(target, by_pattern, model)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See WeightSource. A weight of which parts are missing counts as missing."""
        found = self._found.get(name)
        if not isinstance(found, _Experts):
            return None if found is None else self._checkpoint.shape(found)
        counts = {len(experts) for experts in found.matrices}
        shapes = [self._checkpoint.shape(experts[0]) or () for experts in found.matrices if experts]
        if len(counts) != 1 or len(shapes) != len(found.matrices):
            return None
        return (max(counts), sum(shape[0] for shape in shapes), *shapes[0][1:])

    def read(self, name: str, dim: int = 0, rows: range | None = None) -> Tensor:
        """See WeightSource; rows lie within one of the matrices that are merged."""
        found = self._found[name]
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

    def _rename(self, name: str, prefix: str, known: dict[str, Tensor]) -> tuple[str, str | None]:
        """Return the name in the model, and the pattern of its converter if any, as transformers' loader finds them."""
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, known)
        if target not in known and name in known:
            return name, None
        return target, pattern

    def _merge(self, target: str, by_pattern: Mapping[str, Sequence[str]], model: PreTrainedModel) -> _Experts:
        (converter,) = [c for c in self._converters if set(by_pattern) <= set(c.source_patterns)][:1]
        kinds = [type(operation).__name__ for operation in converter.operations]
        if kinds not in _KNOWN_MERGES or len(converter.target_patterns) != 1:
            raise UnsupportedModel(
                architecture_name(model.config),
                f"transformers converts {target} when it loads it ({', '.join(kinds)}), which several ranks cannot",
            )
        return _Experts(tuple(tuple(by_pattern.get(pattern, ())) for pattern in converter.source_patterns))


class DrawnWeights:
    """A whole model's weights, which every rank has drawn from the same seed."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        self.unread: list[str] = []

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See WeightSource."""
        weight = self._weights.get(name)
        return None if weight is None else tuple(weight.shape)

    def read(self, name: str, dim: int = 0, rows: range | None = None) -> Tensor:
        """See WeightSource."""
        weight = self._weights[name].detach()
        return weight if rows is None else weight.narrow(dim, rows.start, len(rows)).clone()
