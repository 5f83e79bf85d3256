"""The memory of packed weights is given back, also where they are parts of a mapped file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.model.linears import onednn
from actors.model.linears.freed_memory import MappedPages
from tests.actors.model.linears import packing_child

PAGE = os.sysconf("SC_PAGE_SIZE")
SIZE = 64 * PAGE
"""Bytes of a weight."""


def resident_kib(weight: Tensor) -> int:
    """Return how much of the mapping in which a weight begins is in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    is_inside = False
    for line in lines:
        head = line.split()[0]
        if not head.endswith(":"):
            start, end = (int(edge, 16) for edge in head.split("-"))
            is_inside = start <= weight.data_ptr() < end
        elif is_inside and head == "Rss:":
            return int(line.split()[1])
    raise AssertionError("the weight is nowhere")


def mapped_weights(directory: Path) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(16, SIZE // 64, generator=generator) for name in "abc"}
    save_file(weights, directory / "weights.safetensors")
    loaded = load_file(directory / "weights.safetensors")
    for weight in loaded.values():
        weight.sum()  # brings its pages into memory
    return loaded


def test_a_mapped_weights_pages_are_given_back_and_its_neighbours_stay(tmp_path: Path) -> None:
    weights, pages = mapped_weights(tmp_path), MappedPages()
    expected = {name: weights[name].clone() for name in "ac"}
    before = resident_kib(weights["b"])

    released = pages.release(weights.pop("b"))

    assert SIZE - 2 * PAGE < released <= SIZE
    assert resident_kib(weights["a"]) <= before - released // 1024
    assert {name: bool(torch.equal(weights[name], expected[name])) for name in "ac"} == {"a": True, "c": True}


def test_memory_without_a_file_is_left_alone() -> None:
    weight = torch.ones(SIZE)

    assert MappedPages().release(weight) == 0
    assert bool((weight == 1).all())


def test_a_weight_that_is_not_wholly_in_one_mapping_is_left_alone() -> None:
    weight = torch.ones(SIZE)
    first = weight.data_ptr()
    line = f"{first - PAGE:x}-{first + PAGE:x} rw-p 00000000 fe:00 17 /model.safetensors"

    assert MappedPages([line]).release(weight) == 0
    assert bool((weight == 1).all())


def test_a_small_weight_shares_its_page_and_keeps_it() -> None:
    weight = torch.ones(8)
    first = weight.data_ptr() // PAGE * PAGE
    line = f"{first:x}-{first + 2 * PAGE:x} rw-p 00000000 fe:00 17 /model.safetensors"

    assert MappedPages([line]).release(weight) == 0
    assert bool((weight == 1).all())


def test_a_system_without_a_list_of_mappings_releases_nothing() -> None:
    assert MappedPages([]).release(torch.ones(SIZE)) == 0


@pytest.mark.more
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packing_needs_the_memory_of_one_product_besides_the_model(dtype: str, tmp_path: Path) -> None:
    """float32: mapped from the checkpoint; bfloat16: converted, so in the heap."""
    if (reason := onednn.reason_against(getattr(torch, dtype))) is not None:
        pytest.skip(reason)
    packing_child.make_checkpoints(tmp_path)
    command = [sys.executable, "-m", packing_child.__name__, str(tmp_path), dtype]
    measured = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.splitlines()[-1]
    before, peak, after, weights, largest = (int(number) for number in measured.split())

    assert weights > 6 * largest, "the model is large enough to see it"
    slack = 48 << 20  # the trials of shapes, and what the allocator keeps
    assert peak - before < 2 * largest + slack < weights / 2
    assert after - before < slack
