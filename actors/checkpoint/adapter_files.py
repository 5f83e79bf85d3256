"""Reads an adapter's directory: its digest, for the ingresses, and its content, for the engines."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from actors.checkpoint.peft_config import AdapterConfig, AdapterRefused
from actors.core.requests.adapter import Adapter
from actors.lora_config import LoraConfig

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_MAX_CONFIG_BYTES: Final = 1 << 20
_CHUNK_BYTES: Final = 1 << 20
_NUM_DIGEST_CHARS: Final = 32


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The content of an adapter's directory.

    weights: the bytes of the safetensors file
    digest:  hexadecimal digest of the config and of these bytes
    """

    config: AdapterConfig
    weights: bytes
    digest: str


def check_adapter(directory: str, limits: LoraConfig) -> None:
    """Check an adapter's files without reading the weights. Raises AdapterRefused."""
    AdapterConfig.parse(_read_config(directory, limits), limits.max_lora_rank)
    _weights_path(directory, limits)


def describe_adapter(name: str, directory: str, limits: LoraConfig) -> Adapter:
    """Check an adapter's files, and return the adapter with their digest. Blocks for as long as reading them takes.

    Raises AdapterRefused.
    """
    config_text = _read_config(directory, limits)
    AdapterConfig.parse(config_text, limits.max_lora_rank)
    path = _weights_path(directory, limits)
    digest = _begin_digest(config_text)
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise AdapterRefused(f"{path} cannot be read: {error.strerror}") from error
    return Adapter(name, directory, digest.hexdigest()[:_NUM_DIGEST_CHARS])


def read_adapter(directory: str, limits: LoraConfig) -> AdapterFiles:
    """Read an adapter's files. Blocks for as long as reading them takes. Raises AdapterRefused."""
    config_text = _read_config(directory, limits)
    config = AdapterConfig.parse(config_text, limits.max_lora_rank)
    path = _weights_path(directory, limits)
    try:
        weights = path.read_bytes()
    except OSError as error:
        raise AdapterRefused(f"{path} cannot be read: {error.strerror}") from error
    digest = _begin_digest(config_text)
    digest.update(weights)
    return AdapterFiles(config, weights, digest.hexdigest()[:_NUM_DIGEST_CHARS])


def files_signature(directory: str) -> tuple[int, ...]:
    """Return numbers that change when the adapter's files change: their times of change, sizes and inodes.

    Raises AdapterRefused if the files cannot be read.
    """
    try:
        stats = [Path(directory, name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except OSError as error:
        raise AdapterRefused(f"{error.filename} cannot be read: {error.strerror}") from error
    return tuple(number for stat in stats for number in (stat.st_mtime_ns, stat.st_size, stat.st_ino))


def _read_config(directory: str, limits: LoraConfig) -> bytes:
    if not limits.permits(directory):
        raise AdapterRefused(
            f"{directory} is not in lora.allowed_directories ({', '.join(limits.allowed_directories) or 'none'})"
        )
    path = Path(directory, CONFIG_FILE)
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise AdapterRefused(f"{path} has more than {_MAX_CONFIG_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise AdapterRefused(f"{path} cannot be read: {error.strerror}") from error


def _weights_path(directory: str, limits: LoraConfig) -> Path:
    """Return the path of the weights, which have to be safetensors: PEFT's older format is a pickle, which runs code.

    Raises AdapterRefused if the file is missing or too large.
    """
    path = Path(directory, WEIGHTS_FILE)
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise AdapterRefused(f"{path} cannot be read: {error.strerror}") from error
    if num_bytes > limits.max_adapter_mib << 20:
        raise AdapterRefused(
            f"{path} has {num_bytes >> 20} MiB, more than lora.max_adapter_mib ({limits.max_adapter_mib})"
        )
    return path


def _begin_digest(config_text: bytes) -> hashlib._Hash:
    """Begin a digest with the config, whose lists of names are sorted first.

    PEFT writes these lists in a different order each time, and an adapter that is saved twice is to have one digest.
    """
    settings = json.loads(config_text)
    for key, value in settings.items():
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            settings[key] = sorted(value)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode() + b"\0")
