"""Computes a digest that tells two models apart, so that no engine uses the KV of another model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from actors.config import ModelConfig

_NUM_SAMPLES = 64
_SAMPLE_SIZE_BYTES = 4096
_MAX_HEADER_SIZE_BYTES = 64 << 20


def fingerprint_checkpoint(directory: Path, model_config: ModelConfig, dtype: str) -> str:
    """Digest config.json, the dtype in use, and of each safetensors file its name, size, header and samples.

    The header (names, dtypes, shapes, offsets) is read whole. Of the weights, 64 pieces of 4 KiB are read, spread
    evenly over the file. This tells any two trainings apart, at a cost that does not grow with the model. It does not
    detect weights that somebody has forged. With load_format dummy, the seed is digested instead of the weights.
    Returns 32 hexadecimal digits, the first half of a SHA-256.
    """
    digest = hashlib.sha256()
    config = json.loads((directory / "config.json").read_text())
    config.pop("_name_or_path", None)
    digest.update(json.dumps([config, dtype], sort_keys=True).encode())
    if model_config.load_format == "dummy":
        digest.update(f"dummy {model_config.seed}".encode())
    else:
        for file in sorted(directory.glob("*.safetensors")):
            _add_file(digest, file)
    return digest.hexdigest()[:32]


def _add_file(digest: hashlib._Hash, file: Path) -> None:
    size_bytes = file.stat().st_size
    digest.update(f"{file.name} {size_bytes}".encode())
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_size_bytes = min(int.from_bytes(prefix, "little"), _MAX_HEADER_SIZE_BYTES)
        digest.update(prefix + stream.read(header_size_bytes))
        start = stream.tell()
        for sample in range(_NUM_SAMPLES):
            stream.seek(start + (size_bytes - start) * sample // _NUM_SAMPLES)
            digest.update(stream.read(_SAMPLE_SIZE_BYTES))
