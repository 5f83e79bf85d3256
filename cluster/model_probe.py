"""What transformers' configs, and a checkpoint's tokenizer, say of a model: `python -m cluster.model_probe`.

A program of its own for processes that do not have transformers yet: it imports transformers without torch, which takes
a second, and half of what it would take with torch. It reads {"model": ModelConfig, "sizes": {setting: ranks}} from its
standard input and prints a list of mistakes, both JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from actors.config import ModelConfig
from cluster.torch_free import without_torch


def find_config_mistakes(model: ModelConfig, tensor_parallel_sizes: Mapping[str, int]) -> list[str]:
    """Why no engine would serve this model; empty if nothing that is known without its weights speaks against it."""
    from actors.model.config_rules import (
        architecture_name,
        read_config,
        reason_in_config,
        reason_on_ranks,
        reason_on_trial,
    )
    from actors.model.errors import ModelError
    from actors.model.limits import derive_max_model_len

    try:
        config = read_config(Path(model.model), trust_remote_code=False)
        if reason := reason_in_config(config) or reason_on_trial(config):
            return [f"model.model: {architecture_name(config)} cannot be served: {reason}"]
        derive_max_model_len(config, model.max_model_len)
    except ModelError as error:
        return [f"model.model: {str(error).removeprefix('model: ')}"]
    reasons = {name: reason_on_ranks(config, size) for name, size in tensor_parallel_sizes.items()}
    name_of_model = architecture_name(config)
    mistakes = [
        f"{name} = {tensor_parallel_sizes[name]}: {name_of_model} cannot be served so: {reason}"
        for name, reason in reasons.items()
        if reason
    ]
    return [*mistakes, *_tokenizer_mistakes(Path(model.model))]


def _tokenizer_mistakes(directory: Path) -> list[str]:
    """Nothing but whether there is one: to load it takes long, and the ingresses do so before engines are ready."""
    if any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return []
    return [f"model.model: {str(directory)!r} has no tokenizer: there is no {_TOKENIZER_FILES[0]} in it"]


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "tekken.json",
)
"""Those of which transformers makes a tokenizer of the tokenizers library."""


def main() -> None:
    """Answer the question on standard input."""
    question = json.load(sys.stdin)
    with without_torch():
        mistakes = find_config_mistakes(ModelConfig.model_validate(question["model"]), question["sizes"])
    sys.stdout.write(json.dumps(mistakes) + "\n")


if __name__ == "__main__":
    main()
