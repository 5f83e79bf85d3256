"""Checks that a model split over ranks is the model of the checkpoint, by comparing its output with the whole model's.

Every other check compares the split model with itself. Here rank 0 runs the whole model on random tokens, with
weights that transformers' own loader reads and converts. It reads a decoder layer's weights when the forward pass
reaches the layer, and drops them afterwards, so the whole model never has to fit into memory. If reading takes too
long, the layers that were reached are compared instead of the output.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from actors.model.checks.self_check import draw_sequences, error_limit, relative_error, stock_attention
from actors.model.config.config_rules import architecture_name
from actors.model.config.model_kind import kind_of
from actors.model.errors import SelfCheckFailed
from actors.model.forward import FlatForward
from actors.model.tensor_parallel.group import TensorParallelGroup
from actors.model.tensor_parallel.part import compute_buffers
from actors.model.tensor_parallel.weight_sources import CheckpointWeights, MergedWeights

logger = logging.getLogger(__name__)

MAX_SECONDS: Final = 60.0
"""Seconds after which no further layer of the whole model is read; the first layer is read in any case."""
_NUM_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class ModelRun:
    """The hidden states and the output that a model computed from some tokens.

    layers: the hidden states, [num_tokens, hidden_size], of each decoder layer that was reached
    output: logits, [num_tokens, vocab_size], or the last hidden states; None if time ran out before the last layer
    """

    layers: tuple[Tensor, ...]
    output: Tensor | None


class _OutOfTimeError(Exception):
    """The deadline passed before the next layer was read."""


def check_split(
    split: FlatForward,
    group: TensorParallelGroup,
    run_whole: Callable[[Tensor], ModelRun],
    *,
    vocab_size: int,
    max_tokens: int,
) -> None:
    """Raise SelfCheckFailed on every rank unless the split model computes what the whole one computes.

    Every rank has to call check_split at the same point, since the ranks wait for each other.
    run_whole: runs the whole model on tokens, [num_tokens] int64; only rank 0 calls it
    max_tokens: the longest sequence that the model can compute
    """
    started = time.monotonic()
    tokens = draw_sequences(split, vocab_size, min(_NUM_TOKENS, max_tokens))[0]
    with torch.inference_mode(), stock_attention(split.model):
        ours = record_run(split, tokens)
    error: SelfCheckFailed | None = None
    if group.rank == 0:
        theirs = run_whole(tokens)
        error = _compare(split, ours, theirs)
        logger.info(
            "compared the split model with the whole one",
            extra={
                "compared": "output" if theirs.output is not None else "layers",
                "num_layers": len(theirs.layers),
                "num_all_layers": len(ours.layers),
                "num_ranks": group.size,
                "elapsed_s": round(time.monotonic() - started, 3),
            },
        )
    is_right = group.smallest(int(error is None))
    if error is not None:
        raise error
    if not is_right:
        raise SelfCheckFailed(type(split.model).__name__, "rank 0 found that the split model is not the whole one")


@torch.inference_mode()
def run_from_files(
    directory: Path, config: PretrainedConfig, dtype: torch.dtype, tokens: Tensor, *, trust_remote_code: bool
) -> ModelRun:
    """Run the whole model of a checkpoint, layer by layer, on the tokens' device.

    tokens: [num_tokens], int64
    """
    # A model writes its attention implementation into its config: the split model's config must stay as it is.
    config = copy.deepcopy(config)
    with torch.device("meta"):
        model: PreTrainedModel = kind_of(config).auto_class.from_config(  # type: ignore[no-untyped-call]  # left untyped
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
        )
    model.train(False)
    with CheckpointWeights(directory) as checkpoint, ExitStack() as files:
        names_by_owner = _names_by_owner(model, MergedWeights(checkpoint, model))
        compute_buffers(model, config)
        for module in model.modules():
            module._buffers.update({k: b.to(tokens.device) for k, b in module._buffers.items() if b is not None})
        slices: dict[str, Any] = {}  # safetensors has no types for its slices
        for path in sorted(directory.glob("*.safetensors")):
            file = files.enter_context(safe_open(path, framework="pt"))
            slices.update({name: file.get_slice(name) for name in file.keys()})  # noqa: SIM118  # no mapping
        reader = _Reader(model, slices, names_by_owner, dtype, tokens.device)
        with _no_progress_bars(), reader.attached(time.monotonic() + MAX_SECONDS):
            return record_run(FlatForward(model, kind_of(config)), tokens)


def record_run(forward: FlatForward, tokens: Tensor) -> ModelRun:
    """Run a model with its own attention, and keep the hidden states that its decoder layers return."""
    layers: list[Tensor] = []

    def keep(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        layers.append((output if isinstance(output, Tensor) else output[0])[0])

    hooks = [layer.register_forward_hook(keep) for _, layer in decoder_layers(forward.model)]
    try:
        output = forward.stock(tokens)
    except _OutOfTimeError:
        return ModelRun(tuple(layers), None)
    finally:
        for hook in hooks:
            hook.remove()
    return ModelRun(tuple(layers), output)


def decoder_layers(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return the decoder's layers with their names, in order. Raises SelfCheckFailed if they are not in one list."""
    text = model.config.get_text_config(decoder=True)
    # LongCat-Flash counts a layer's two attentions in num_hidden_layers.
    num_layers = text.num_layers if text.model_type == "longcat_flash" else text.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return [(f"{name}.{index}", layer) for index, layer in enumerate(module)]
    raise SelfCheckFailed(type(model).__name__, "its layers are not in one list, so it cannot be run layer by layer")


class _Reader:
    """Reads each layer's weights when the forward reaches the layer, and drops the weights after the layer has run."""

    def __init__(
        self,
        model: PreTrainedModel,
        slices: dict[str, Any],
        names_by_owner: dict[str, list[str]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Keep what each layer's weights are read from.

        slices: safetensors' handle of each weight in the checkpoint, by the weight's name
        names_by_owner: the names of each layer's weights in the checkpoint; weights outside the layers are under ""
        """
        self._model = model
        self._slices = slices
        self._names_by_owner = names_by_owner
        self._load_config = LoadStateDictConfig(
            device_map={"": device},
            dtype=dtype,
            dtype_plan=model._get_dtype_plan(dtype),
            weight_mapping=get_model_conversion_mapping(model),  # type: ignore[arg-type]  # transformers' own disagree
        )

    @contextmanager
    def attached(self, deadline_s: float) -> Iterator[None]:
        """Read the weights outside the layers now, and each layer's weights when the forward pass reaches the layer.

        deadline_s: on the clock of time.monotonic(). After deadline_s, reading a further layer raises _OutOfTimeError;
            the first layer is read in any case.
        """
        self._read("")
        self._model.tie_weights()
        hooks = []
        for index, (name, layer) in enumerate(decoder_layers(self._model)):
            hooks.append(layer.register_forward_pre_hook(self._reading(name, deadline_s if index else math.inf)))
            hooks.append(layer.register_forward_hook(_drop))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _reading(self, name: str, deadline_s: float) -> Callable[[nn.Module, object], None]:
        def read(layer: nn.Module, inputs: object) -> None:
            if time.monotonic() > deadline_s:
                raise _OutOfTimeError
            self._read(name)

        return read

    def _read(self, owner: str) -> None:
        weights = {name: self._slices[name] for name in self._names_by_owner[owner]}
        convert_and_load_state_dict_in_model(self._model, weights, self._load_config)


@torch.inference_mode()
def _drop(layer: nn.Module, inputs: object, output: object) -> None:
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)


def _names_by_owner(model: PreTrainedModel, weights: MergedWeights) -> dict[str, list[str]]:
    owners = [name for name, _ in decoder_layers(model)]
    prefix = owners[0].removesuffix("0")
    names: dict[str, list[str]] = defaultdict(list)
    for target, sources in weights.sources.items():
        is_in_layer = target.startswith(prefix)
        owner = prefix + target.removeprefix(prefix).partition(".")[0] if is_in_layer else ""
        names[owner].extend(sources)
    return names


def _compare(split: FlatForward, ours: ModelRun, theirs: ModelRun) -> SelfCheckFailed | None:
    limit = error_limit(split.model.dtype)
    pairs = [*zip(ours.layers, theirs.layers, strict=False)]
    if theirs.output is not None and ours.output is not None:
        error = relative_error(ours.output, theirs.output)
    else:
        error = max((relative_error(one, other) for one, other in pairs), default=0.0)
    if error <= limit:  # This comparison is false for a NaN, so a NaN fails the check.
        return None
    wrong = (index for index, (one, other) in enumerate(pairs) if not relative_error(one, other) <= limit)
    first = next(wrong, None)
    where = "its layers agree" if first is None else f"layer {first} is the first that differs"
    return SelfCheckFailed(
        architecture_name(split.model.config),
        f"split over ranks, it is not the model of the checkpoint: the outputs differ by {error:.2g} (at most "
        f"{limit:.2g}), and {where}; set tensor_parallel_size to 1",
    )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    had = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # left untyped
    try:
        yield
    finally:
        if had:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # left untyped
