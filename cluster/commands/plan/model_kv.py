"""Reads from config.json how many bytes of a token and of a request links move; numbers of KV take two bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cluster.checks.checkpoint_files import UnreadableCheckpoint, read_config_file
from cluster.commands.doctor.kv_figures import KVFigures, kv_figures
from cluster.errors import InvalidConfig
from cluster.simulation.timing.model_size import ModelSize, read_model_size
from cluster.simulation.workloads.workload_request import HASHED_TOKENS

_DTYPE_BYTES: Final = 2


def read_model_kv(directory: Path) -> KVFigures:
    """Read the sizes of a model's KV and of its recurrent state. Raises InvalidConfig."""
    try:
        config = read_config_file(directory)
        text = config.get("text_config") or config
        figures = kv_figures(text, dtype_bytes=_DTYPE_BYTES, block_size=HASHED_TOKENS)
    except UnreadableCheckpoint as error:
        raise InvalidConfig("model", [str(error)]) from error
    except (TypeError, ValueError) as error:
        raise InvalidConfig(str(directory / "config.json"), [f"a size is no number: {error}"]) from error
    if figures.bytes_per_token <= 0:
        raise InvalidConfig(str(directory / "config.json"), ["it does not say how large the KV of a token is"])
    return figures


def read_even_size(directory: Path) -> ModelSize:
    """Read the size of a model whose layers are alike. Raises InvalidConfig for others: nothing guesses their steps."""
    size, figures = read_model_size(directory), read_model_kv(directory)
    if figures.state_bytes:
        what = "some of its layers keep recurrent states"
    elif figures.bytes_per_token != size.kv_bytes_per_token:
        what = "its layers keep KV of different shapes, or share it"
    else:
        return size
    advice = "give measured times (--cost-model), and --kv-tokens"
    raise InvalidConfig(str(directory / "config.json"), [f"{what}, for which steps cannot be guessed; {advice}"])
