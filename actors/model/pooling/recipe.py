"""Reads how a checkpoint's vectors are computed: from its sentence-transformers files, its config, or by convention.

modules.json names a pipeline: a Transformer, a Pooling and perhaps a Normalize, each with a directory of settings. The
checkpoint was trained for the output of that pipeline. A pipeline with other parts (a Dense layer, pooling by maximum)
is refused, because its output would be wrong without them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from transformers import PretrainedConfig

from actors.checkpoint.pooling_facts import Activation, PoolingFacts
from actors.core.requests.sampling_params import Pooling
from actors.model.config.model_kind import ModelKind
from actors.model.errors import CheckpointError

_POOLINGS: Final[dict[str, Pooling]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
}
_PARTS: Final = ["Transformer", "Pooling", "Normalize"]


def read_pooling_facts(
    directory: Path, config: PretrainedConfig, kind: ModelKind, hidden_size: int, *, is_causal: bool = True
) -> PoolingFacts:
    """Return the vectors that this checkpoint gives.

    hidden_size: of its last hidden states
    is_causal:   whether tokens see only those before them: without files of its own such a model's last token has seen
        all others, and another one's first token is what it was trained to read
    Raises CheckpointError if a file is there and cannot be read.
    """
    custom: Pooling = "last" if is_causal else "cls"
    if kind is ModelKind.CLASSIFICATION:
        why = "its checkpoint has a classification head: it classifies and scores"
        labels = tuple(str(label) for _, label in sorted((int(i), name) for i, name in config.id2label.items()))  # type: ignore[union-attr]  # None by its type, never by its code
        return PoolingFacts(
            why_no_embeddings=why, pooling=custom, normalize=False, labels=labels, activation=_activation(config)
        )
    dimensions = tuple(sorted(getattr(config, "matryoshka_dimensions", None) or ()))
    modules = _read_json(directory / "modules.json")
    if modules is None:
        return PoolingFacts(embedding_size=hidden_size, pooling=custom, matryoshka_dimensions=dimensions)
    try:
        pooling, has_normalize = _read_pipeline(directory, modules)
    except _NotServed as reason:
        return PoolingFacts(why_no_embeddings=str(reason))
    return PoolingFacts(
        embedding_size=hidden_size, pooling=pooling, normalize=has_normalize, matryoshka_dimensions=dimensions
    )


class _NotServed(Exception):
    """The checkpoint computes its vectors in a way that is not supported."""


def _read_pipeline(directory: Path, modules: Any) -> tuple[Pooling, bool]:
    """The pooling, and whether vectors are normalized after it. Raises _NotServed."""
    try:
        parts = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"model: {directory / 'modules.json'} is not a list of modules: {error!r}") from error
    names = [name for name, _ in parts]
    if names not in (_PARTS, _PARTS[:2]):
        raise _NotServed(f"its modules.json asks for {' -> '.join(names)}; served is {' -> '.join(_PARTS)}")
    settings = _read_json(directory / parts[1][1] / "config.json")
    if not isinstance(settings, dict):
        raise CheckpointError(f"model: {directory / parts[1][1]} has no config.json, but modules.json asks for it")
    return _read_pooling(settings), len(parts) == len(_PARTS)


def _read_pooling(settings: dict[str, Any]) -> Pooling:  # Any: the values of parsed JSON
    """Return the mode of pooling. Newer files name it, older files have a boolean for each mode. Raises _NotServed."""
    if settings.get("include_prompt") is False:
        raise _NotServed("its pooling leaves out a prompt's tokens")
    named = settings.get("pooling_mode") or []
    modes = [named] if isinstance(named, str) else list(named)
    modes += [name for name, is_on in settings.items() if name.startswith("pooling_mode_") and is_on is True]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise _NotServed(
            f"its pooling is {' and '.join(map(str, modes)) or 'not named'}; served are last, mean and cls"
        )
    return _POOLINGS[modes[0]]


def _activation(config: PretrainedConfig) -> Activation:
    """Return the function from logits to scores: the cross-encoder's own, or that of the head's task."""
    settings = getattr(config, "sentence_transformers", None) or {}
    name = settings.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    if name is not None:
        known: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}
        activation = known.get(str(name).rpartition(".")[2])
        if activation is None:
            raise CheckpointError(f"model: config.json asks for the activation {name}; served are Identity and Sigmoid")
        return activation
    if config.problem_type == "regression":
        return "none"
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def _read_json(file: Path) -> Any:
    """Return a JSON file's content; None if there is no such file."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"model: {file} cannot be read: {error}") from error
