"""Checks of a checkpoint's files, and the sizes of the model that they describe; no weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.checks.checkpoint_files import UnreadableCheckpoint, Weight, read_config_file, read_weights
from cluster.commands.doctor.findings import Finding, failure, gib, ok, warning

_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The directory, configuration and tensors of a checkpoint.

    text_config: the decoder's part of config.json if there is one (models with images), else all of config.json
    """

    directory: Path
    text_config: dict[str, Any]
    weights: tuple[Weight, ...]

    def dtype(self, wanted: str) -> str:
        """Return the dtype that the weights are loaded in. wanted: the setting model.dtype"""
        own = self.text_config.get("dtype") or self.text_config.get("torch_dtype") or "float32"
        return str(own) if wanted == "auto" else wanted

    def dtype_bytes(self, wanted: str) -> int:
        """Return the size of one weight in bytes. wanted: the setting model.dtype"""
        return _DTYPE_BYTES.get(self.dtype(wanted), 4)

    def number(self, *names: str) -> int:
        """Return the first of these fields that config.json has, as an integer; 0 if it has none of them."""
        return next((int(value) for name in names if (value := self.text_config.get(name))), 0)

    @property
    def num_heads(self) -> int:
        """The number of attention heads of a layer."""
        return self.number("num_attention_heads", "n_head")

    @property
    def num_kv_heads(self) -> int:
        """The number of heads of a layer that have keys and values."""
        return self.number("num_key_value_heads") or self.num_heads

    @property
    def head_dim(self) -> int:
        """The number of elements of one head's key."""
        if self.number("kv_lora_rank"):
            return self.number("qk_nope_head_dim") + self.number("qk_rope_head_dim")
        return self.number("head_dim") or self.number("hidden_size", "n_embd") // max(self.num_heads, 1)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.number("num_hidden_layers", "n_layer")

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the model was trained for, in tokens; 0 if config.json does not state it."""
        return self.number("max_position_embeddings", "n_positions")


def read_checkpoint(directory: Path) -> tuple[Checkpoint | None, list[Finding]]:
    """Read a checkpoint's files. Returns the findings, and the checkpoint, or None if its files cannot be used."""
    check = "model files"
    try:
        config, weights = read_config_file(directory), read_weights(directory)
    except UnreadableCheckpoint as error:
        advice = "give the directory of a complete checkpoint in Hugging Face format, at the same path on every node"
        return None, [failure(check, str(error), advice)]
    checkpoint = Checkpoint(directory, config.get("text_config") or config, weights)
    num_parameters = sum(weight.num_elements for weight in weights)
    found = f"{directory.name}: {num_parameters / 1e6:,.0f} million parameters, {checkpoint.dtype('auto')}"
    return checkpoint, [ok(check, f"{found}, {gib(_size_bytes(directory))} in files, all complete")]


def check_tokenizer(directory: Path, *, use_fastokens: bool) -> Finding:
    """Check whether an ingress could use the checkpoint's tokenizer. use_fastokens: as in ModelTokenizer"""
    # transformers takes seconds to import, and only this check needs it.
    from cluster.errors import TokenizerUnusable
    from cluster.text.model_tokenizer import ModelTokenizer

    check = "tokenizer"
    try:
        tokenizer = ModelTokenizer.from_directory(directory, use_fastokens=use_fastokens)
    except TokenizerUnusable as error:
        return failure(check, str(error), "add tokenizer.json and tokenizer_config.json of the model")
    encoder = f"Hugging Face's tokenizers ({tokenizer.why_not_fast})" if tokenizer.why_not_fast else "fastokens"
    found = f"{tokenizer.backend.get_vocab_size()} tokens, prompts are encoded by {encoder}"
    if not tokenizer.has_chat_template:
        advice = "conversations will be refused; add chat_template to tokenizer_config.json"
        return warning(check, f"{found}, no chat template", advice)
    return ok(check, f"{found}, with a chat template")


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
