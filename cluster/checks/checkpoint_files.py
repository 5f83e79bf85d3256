"""Reading of a checkpoint's config.json and the headers of its safetensors files, without transformers or weights.

A safetensors file has eight bytes with the header's length, the header (JSON: name -> dtype, shape, data_offsets), and
the data; see https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

INDEX_FILE: Final = "model.safetensors.index.json"

_MAX_HEADER_BYTES: Final = 100 * 2**20
"""The limit on the size of a header that the safetensors library has."""


class UnreadableCheckpoint(Exception):
    """A file of a checkpoint cannot be used; the message says which file and why."""


@dataclass(frozen=True, slots=True)
class Weight:
    """The name and shape of one tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)


def read_config_file(directory: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's config.json. Raises UnreadableCheckpoint."""
    path = directory / "config.json"
    if not directory.is_dir():
        there = "is not a directory" if directory.exists() else "does not exist"
        raise UnreadableCheckpoint(f"{str(directory)!r} {there}; it must be a checkpoint in Hugging Face format")
    if not path.exists():
        raise UnreadableCheckpoint(
            f"{str(directory)!r} is not a checkpoint in Hugging Face format: there is no config.json in it"
        )
    config = _read_json(path)
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise UnreadableCheckpoint(f"{str(path)!r}: text_config must be an object, not a {_json_type(text)}")
    return config


def read_weights(directory: Path) -> tuple[Weight, ...]:
    """Return the tensors of a checkpoint's safetensors files. Raises UnreadableCheckpoint if a file is incomplete."""
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise UnreadableCheckpoint(f"{str(directory)!r} has no *.safetensors; convert the checkpoint to safetensors")
    index = directory / INDEX_FILE
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UnreadableCheckpoint(f"{str(index)!r} has no weight_map")
        if missing := sorted({str(name) for name in weight_map.values()} - {path.name for path in paths}):
            raise UnreadableCheckpoint(f"{index.name} names files that are not there: {', '.join(missing)}")
    return tuple(weight for path in paths for weight in _read_header(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UnreadableCheckpoint(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnreadableCheckpoint(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnreadableCheckpoint(f"{str(path)!r} must be a JSON object, not a {_json_type(content)}")
    return content


def _json_type(value: object) -> str:
    return {list: "list", str: "string", bool: "boolean"}.get(type(value), "number")


def _read_header(path: Path) -> Iterator[Weight]:
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, size_bytes):
                raise UnreadableCheckpoint(f"{path} is not a safetensors file")
            header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        shapes = {str(name): tuple(int(size) for size in tensor["shape"]) for name, tensor in header.items()}
    except OSError as error:
        raise UnreadableCheckpoint(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UnreadableCheckpoint(f"{path} has a broken header: {error}") from error
    if 8 + header_bytes + end != size_bytes:
        raise UnreadableCheckpoint(
            f"{path} has {size_bytes} bytes; by its header it should have {8 + header_bytes + end}"
        )
    for name, shape in shapes.items():
        yield Weight(name, shape)
