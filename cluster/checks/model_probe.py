"""The check of a model by transformers' config classes, and of its tokenizer's file.

This module is also a program, `python -m cluster.checks.model_probe`, for processes that have not imported
transformers: it imports transformers without torch, which takes a second, half the time of the import with torch. It
reads {"model": ModelConfig, "sizes": {setting: ranks}, "drafts": {setting: directory}, "stores": [setting],
"block_sizes": {setting: tokens}} from standard input and prints a list of mistakes; both are JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from actors.config import ModelConfig
from actors.process.garbage_collection import no_collection
from cluster.text.torch_free import without_torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def find_config_mistakes(
    model: ModelConfig,
    tensor_parallel_sizes: Mapping[str, int],
    draft_models: Mapping[str, str],
    *,
    stores: Sequence[str],
    block_sizes: Mapping[str, int],
) -> list[str]:
    """Return why engines would refuse a model; empty if nothing is wrong that can be found without its weights.

    tensor_parallel_sizes: numbers of ranks, by the setting's name
    draft_models: directories of the draft models of speculative decoding, by the setting's name
    stores: the names of the settings that give engines KV stores
    block_sizes: tokens of a block, by the setting's name
    """
    from actors.model.config.config_rules import architecture_name, read_config, reason_on_ranks
    from actors.model.config.setting_rules import reason_against_block_sizes, reason_against_stores
    from actors.model.errors import ModelError

    try:
        config = read_config(Path(model.model), trust_remote_code=False)
        if reason := _reason_on_one_rank(config, model.max_model_len):
            return [f"model.model: {architecture_name(config)} cannot be served: {reason}"]
    except ModelError as error:
        return [f"model.model: {str(error).removeprefix('model: ')}"]
    reasons = {name: reason_on_ranks(config, size) for name, size in tensor_parallel_sizes.items()}
    name_of_model = architecture_name(config)
    mistakes = [
        f"{name} = {tensor_parallel_sizes[name]}: {name_of_model} cannot be served so: {reason}"
        for name, reason in reasons.items()
        if reason
    ]
    if stores and (reason := reason_against_stores(config)):
        mistakes.append(f"{', '.join(stores)}: {name_of_model} cannot be served so: {reason}")
    if len(set(block_sizes.values())) > 1 and (reason := reason_against_block_sizes(config)):
        named = ", ".join(f"{name} = {size}" for name, size in block_sizes.items())
        mistakes.append(f"{named}: {name_of_model} cannot be served so: {reason}")
    drafts = [f"{name}: {why}" for name, draft in draft_models.items() if (why := _why_no_draft(Path(draft), config))]
    return [*mistakes, *drafts, *_tokenizer_mistakes(Path(model.model))]


def _reason_on_one_rank(config: PretrainedConfig, max_model_len: int | None) -> str | None:
    """Return why one rank cannot serve a model, or None. Raises ModelError if max_model_len is too long for the model.

    max_model_len: None for the model's own limit
    """
    from actors.model.config.config_rules import reason_in_config, reason_on_trial
    from actors.model.config.limits import derive_max_model_len

    return reason_in_config(config) or reason_on_trial(config, derive_max_model_len(config, max_model_len))


def _why_no_draft(directory: Path, target: PretrainedConfig) -> str:
    """Return why a model cannot be the draft model of another one; empty if its config shows no mistake."""
    from actors.model.config.config_rules import architecture_name, read_config, reason_against_drafts
    from actors.model.config.model_kind import kind_of
    from actors.model.errors import ModelError

    try:
        config = read_config(directory, trust_remote_code=False)
        name = architecture_name(config)
        if reason := _reason_on_one_rank(config, None):
            return f"{name} cannot be the draft model: {reason}"
        if reason := reason_against_drafts(config):
            return f"{name} cannot be the draft model: {reason}"
        if reason := reason_against_drafts(target):
            return f"{architecture_name(target)} cannot be served so: {reason}"
        if not kind_of(config).generates:
            return f"{name} cannot be the draft model: it gives no tokens"
    except ModelError as error:
        return str(error).removeprefix("model: ")
    own, wanted = (text.get_text_config(decoder=True).vocab_size for text in (config, target))
    if own == wanted:
        return ""
    return f"{name} cannot be the draft model: it has {own} tokens, and the target model has {wanted}"


def _tokenizer_mistakes(directory: Path) -> list[str]:
    """Return why there is no usable tokenizer file; empty if there is one.

    The tokenizer is not loaded, since that takes long: ingresses load it while the engines start.
    """
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return [f"model.model: {str(directory)!r} has no tokenizer: there is no {_TOKENIZER_FILES[0]} in it"]
    path = directory / _TOKENIZER_FILES[0]
    if path.is_file() and not _is_json_object(path):
        return [f"model.model: {str(path)!r} is no JSON object, or was cut short: download the checkpoint again"]
    return []


def _is_json_object(path: Path) -> bool:
    """Whether a file begins and ends like a JSON object. It has tens of MB, so the ingresses alone read all of it."""
    with path.open("rb") as file:
        first = file.read(64).lstrip()
        file.seek(max(0, path.stat().st_size - 64))
        last = file.read().rstrip()
    return len(first) > 0 and first[:1] == b"{" and len(last) > 1 and last[-1:] == b"}"


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
"""The files from which transformers can make a fast tokenizer (of the tokenizers library)."""


def main() -> None:
    """Read the question from standard input, and print the mistakes."""
    question = json.load(sys.stdin)
    with no_collection(), without_torch():
        model = ModelConfig.model_validate(question["model"])
        mistakes = find_config_mistakes(
            model,
            question["sizes"],
            question.get("drafts", {}),
            stores=question.get("stores", []),
            block_sizes=question.get("block_sizes", {}),
        )
    sys.stdout.write(json.dumps(mistakes) + "\n")


if __name__ == "__main__":
    main()
