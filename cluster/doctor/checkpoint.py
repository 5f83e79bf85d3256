"""A checkpoint by its config.json and the headers of its safetensors files, without reading a weight.

The format: eight bytes with the header's length, the header (JSON: name -> dtype, shape, data_offsets), the data;
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cluster.doctor.findings import Finding, failure, gib, ok, warning

INDEX_FILE: Final = "model.safetensors.index.json"

_MAX_HEADER_BYTES: Final = 100 * 2**20
"""safetensors' own limit."""
_DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint says of itself. text_config: of the decoder, where config.json nests it."""

    directory: Path
    text_config: dict[str, Any]
    weights: tuple[Weight, ...]

    def dtype(self, wanted: str) -> str:
        """The dtype that it is loaded in. wanted: model.dtype of the settings."""
        own = self.text_config.get("dtype") or self.text_config.get("torch_dtype") or "float32"
        return str(own) if wanted == "auto" else wanted

    def dtype_bytes(self, wanted: str) -> int:
        """Of one number."""
        return _DTYPE_BYTES.get(self.dtype(wanted), 4)

    def number(self, *names: str) -> int:
        """The first of these settings that there is; 0 if there is none."""
        return next((int(value) for name in names if (value := self.text_config.get(name))), 0)

    @property
    def num_heads(self) -> int:
        """Attention heads of a layer."""
        return self.number("num_attention_heads", "n_head")

    @property
    def num_kv_heads(self) -> int:
        """Heads that KV is kept of."""
        return self.number("num_key_value_heads") or self.num_heads

    @property
    def head_dim(self) -> int:
        """Numbers of a key."""
        return self.number("head_dim") or self.number("hidden_size", "n_embd") // max(self.num_heads, 1)

    @property
    def num_layers(self) -> int:
        """Layers that own KV."""
        return self.number("num_hidden_layers", "n_layer")

    @property
    def max_model_len(self) -> int:
        """The longest sequence that it was made for; 0 if it does not say."""
        return self.number("max_position_embeddings", "n_positions")


class _UnreadableError(Exception):
    """A file is not what it should be."""


def read_checkpoint(directory: Path) -> tuple[Checkpoint | None, list[Finding]]:
    """Everything that can be known without loading it; None if it cannot be loaded."""
    check = "model files"
    try:
        config = json.loads((directory / "config.json").read_text())
        weights = tuple(_read_weights(directory))
    except OSError as error:
        advice = "give a directory in Hugging Face format, at the same path on every node"
        return None, [failure(check, f"{error.filename}: {error.strerror}", advice)]
    except (ValueError, _UnreadableError) as error:
        return None, [failure(check, str(error), "download it again; this copy is not whole")]
    checkpoint = Checkpoint(directory, config.get("text_config") or config, weights)
    num_parameters = sum(weight.num_elements for weight in weights)
    found = f"{directory.name}: {num_parameters / 1e6:,.0f} million parameters, {checkpoint.dtype('auto')}"
    if not num_parameters:
        return None, [failure(check, f"{directory} has no *.safetensors", "convert the checkpoint to safetensors")]
    return checkpoint, [ok(check, f"{found}, {gib(_size_bytes(directory))} in files, all whole")]


def check_tokenizer(directory: Path, *, use_fastokens: bool = True) -> Finding:
    """Whether an ingress could use it. use_fastokens: as in ModelTokenizer"""
    # transformers takes seconds to import, and only this check needs it.
    from cluster.errors import TokenizerUnusable
    from cluster.model_tokenizer import ModelTokenizer

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


def _read_weights(directory: Path) -> Iterator[Weight]:
    paths = sorted(directory.glob("*.safetensors"))
    index = directory / INDEX_FILE
    if index.exists():
        named = set(json.loads(index.read_text())["weight_map"].values())
        if missing := sorted(named - {path.name for path in paths}):
            raise _UnreadableError(f"{index.name} names files that are not there: {', '.join(missing)}")
    for path in paths:
        yield from _read_header(path)


def _read_header(path: Path) -> Iterator[Weight]:
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, size_bytes):
            raise _UnreadableError(f"{path} is not a safetensors file")
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError as error:
            raise _UnreadableError(f"{path} has a broken header: {error}") from error
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if 8 + header_bytes + end != size_bytes:
        raise _UnreadableError(f"{path} has {size_bytes} bytes; by its header it should have {8 + header_bytes + end}")
    for name, tensor in header.items():
        yield Weight(name, tuple(tensor["shape"]))


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
