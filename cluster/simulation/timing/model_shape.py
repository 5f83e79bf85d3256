"""Reads the shape of a model, which tables of operators do not say, from a small JSON file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.simulation.timing.op_files import bad_file

_MAX_BYTES: Final = 1 << 20
_log = logging.getLogger(__name__)


class ModelShape(BaseModel):
    """The shape of a model, and the size of an engine's KV cache.

    num_layers:    layers, each of which has attention
    num_kv_heads:  heads of keys and values
    head_dim:      numbers of a head
    num_kv_tokens: tokens whose KV one engine has room for
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    num_layers: int = Field(ge=1, le=10_000)
    num_kv_heads: int = Field(ge=1, le=100_000)
    head_dim: int = Field(ge=1, le=100_000)
    num_kv_tokens: int = Field(ge=1, le=1 << 40)

    def kv_bytes_per_token(self, bytes_per_number: int = 2) -> int:
        """Return the bytes of one token's KV in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_number


def read_model_shape(path: Path) -> ModelShape:
    """Read the file. Raises InvalidConfig, which names the field; fields that mean nothing here are said in the log."""
    try:
        with path.open("rb") as file:
            shape = ModelShape.model_validate_json(file.read(_MAX_BYTES))
    except OSError as error:
        raise bad_file(path, f"it cannot be read: {error.strerror}") from error
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}" for one in error.errors()]
        raise bad_file(path, "; ".join(mistakes)) from error
    if shape.model_extra:
        _log.warning("ignored fields of the model's shape: %s", ", ".join(shape.model_extra), extra={"path": str(path)})
    return shape
