"""An adapter's matrices, as one rank adds them to its part of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from actors.checkpoint.adapter_files import WEIGHTS_FILE, AdapterFiles
from actors.checkpoint.peft_config import AdapterConfig, AdapterRefused
from actors.model.lora.targets import LoraTarget

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """One adapter's matrices for one layer, which add b.T @ a @ inputs to the layer's output.

    a: [rank, inputs of this rank]; b: [rank, outputs of this rank], transposed and scaled; both of the model's dtype
    """

    a: Tensor
    b: Tensor


def load_weights(
    files: AdapterFiles, targets: Mapping[str, LoraTarget], dtype: torch.dtype
) -> dict[str, ModuleWeights]:
    """Load a rank's part of an adapter to the CPU, by module. Raises AdapterRefused if it does not fit the model."""
    found = _group(_read(files.weights))
    weights: dict[str, ModuleWeights] = {}
    for module, matrices in sorted(found.items()):
        target = _find_target(module, files.config, targets)
        weights[module] = _cut(module, matrices, target, files.config, dtype)
    if not weights:
        raise AdapterRefused(f"{WEIGHTS_FILE} has no matrices")
    return weights


def _read(data: bytes) -> dict[str, Tensor]:
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise AdapterRefused(f"{WEIGHTS_FILE} is broken: {error}") from error


def _group(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the matrices A and B of each module."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise AdapterRefused(f"{WEIGHTS_FILE} has {name!r}, which is no LoRA matrix of a linear layer")
        found.setdefault(match["module"], {})[match["matrix"]] = tensor
    return found


def _find_target(module: str, config: AdapterConfig, targets: Mapping[str, LoraTarget]) -> LoraTarget:
    if not config.targets(module):
        raise AdapterRefused(f"it has weights for {module}, which its target_modules do not name")
    if (target := targets.get(module)) is None:
        raise AdapterRefused(f"it changes {module}, which in this model is no linear layer that adapters may change")
    return target


def _cut(
    module: str, matrices: Mapping[str, Tensor], target: LoraTarget, config: AdapterConfig, dtype: torch.dtype
) -> ModuleWeights:
    rank = config.rank_of(module)
    expected = {"A": (rank, target.in_features), "B": (target.out_features, rank)}
    shapes = {matrix: tuple(tensor.shape) for matrix, tensor in sorted(matrices.items())}
    if shapes != expected:
        raise AdapterRefused(f"its matrices for {module} have the shapes {shapes}, the model needs {expected}")
    for matrix, tensor in matrices.items():
        # All requests of a batch share one matrix product, so a NaN in one adapter would spoil the other requests.
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise AdapterRefused(f"its matrix {matrix} for {module} has values that are no finite numbers")
    inputs, outputs = target.inputs, target.outputs
    a = matrices["A"][:, inputs.start : inputs.stop]
    b = matrices["B"][outputs.start : outputs.stop].float() * config.scaling_of(module)
    weights = ModuleWeights(a.to(dtype).contiguous(), b.T.to(dtype).contiguous())
    if not (torch.isfinite(weights.a).all() and torch.isfinite(weights.b).all()):
        raise AdapterRefused(f"its matrices for {module} do not fit into {dtype}")
    return weights
