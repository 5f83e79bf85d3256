"""The sizing table of docs/deploy.md is what `raypd doctor` computes for models of these shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from actors.config import EngineConfig
from cluster.checks.checkpoint_files import Weight
from cluster.commands.doctor.checkpoint import Checkpoint
from cluster.commands.doctor.findings import GIB
from cluster.commands.doctor.memory_budget import GPU_MEMORY_GIB, plan_memory

_PAGE = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()


@dataclass(frozen=True, slots=True)
class _Shape:
    """The figures of the model's config.json; 8 KV heads of 128 each, untied embeddings, bfloat16."""

    hidden: int
    between: int
    num_layers: int
    num_heads: int
    vocab: int
    max_model_len: int

    def checkpoint(self, name: str) -> Checkpoint:
        config = {
            "hidden_size": self.hidden,
            "intermediate_size": self.between,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_model_len,
            "torch_dtype": "bfloat16",
        }
        return Checkpoint(Path(name), config, tuple(self._weights()))

    def _weights(self) -> Iterator[Weight]:
        yield Weight("model.embed_tokens.weight", (self.vocab, self.hidden))
        yield Weight("lm_head.weight", (self.vocab, self.hidden))
        for layer in range(self.num_layers):
            for name, size in {"q": self.num_heads * 128, "k": 1024, "v": 1024, "o": self.num_heads * 128}.items():
                yield Weight(f"model.layers.{layer}.self_attn.{name}_proj.weight", (size, self.hidden))
            for name in ("gate", "up", "down"):
                yield Weight(f"model.layers.{layer}.mlp.{name}_proj.weight", (self.between, self.hidden))
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield Weight(f"model.layers.{layer}.{name}.weight", (self.hidden,))


_SHAPES = {
    "Qwen3-8B": _Shape(4096, 12288, 36, 32, 151936, 40960),
    "Qwen3-32B": _Shape(5120, 25600, 64, 64, 151936, 40960),
    "Llama-3.3-70B": _Shape(8192, 28672, 80, 64, 128256, 131072),
}


def _rows() -> list[list[str]]:
    table = _PAGE.partition("| model | ranks | GPU |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_table_has_models_whose_shapes_are_known() -> None:
    assert {row[0] for row in _rows()} == set(_SHAPES)


@pytest.mark.parametrize("row", _rows(), ids=lambda row: "-".join(row[:3]))
def test_a_row_says_what_the_doctor_computes(row: list[str]) -> None:
    name, num_ranks, gpu, *figures = row
    engine = EngineConfig.model_validate(
        {
            "model": {"model": name, "dtype": "bfloat16"},
            "cache": {"memory_fraction": float(_told("memory_fraction: ([0-9.]+)"))},
            "scheduler": {
                "max_num_seqs": int(_told("max_num_seqs: ([0-9]+)")),
                "max_num_batched_tokens": int(_told("max_num_batched_tokens: ([0-9]+)")),
            },
            "parallel": {"tensor_parallel_size": int(num_ranks)},
        }
    )
    free_bytes = int(GPU_MEMORY_GIB[gpu.partition(" ")[0].lower()] * GIB)

    budget = plan_memory(_SHAPES[name].checkpoint(name), engine, free_bytes, is_gpu=True)

    kib = budget.block_size_bytes / budget.block_size / 1024
    tokens = f"{round(budget.num_tokens, -3):,}".replace(",", " ")
    longest = budget.num_tokens // budget.max_model_len
    assert figures == [f"{budget.weight_bytes / GIB:.1f} GiB", f"{kib:g} KiB", tokens, str(longest)]


def _told(pattern: str) -> str:
    """Return what the page says that the table is computed with."""
    [found] = re.findall(pattern, _PAGE.partition("## Sizes")[2].partition("| model |")[0])
    return str(found)
