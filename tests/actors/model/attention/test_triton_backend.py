"""The Triton backend says which models it covers.

Tests of actors/model/attention/triton_backend.py, actors/model/attention/choice.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from actors.model.attention.backend import AttentionNeeds, BackendName
from actors.model.attention.batch_attention import AttentionLayer
from actors.model.attention.choice import KINDS, choose_backend
from actors.model.attention.probe import KVGeometry
from actors.model.attention.triton_backend import TritonKind, find_uncovered
from actors.model.cache.kv_groups import LayerGroup, RecurrentState
from kv_transfer.layout import KeyOrder

LAYER = AttentionLayer(0, 0.1, 50.0, 4096)
NEEDS = AttentionNeeds(torch.device("cpu"), torch.bfloat16, KVGeometry(28, 4, 112, (LAYER,)), 24, KeyOrder.PLAIN)


def test_it_is_for_cuda_devices_and_comes_before_torch_there() -> None:
    assert TritonKind().find_obstacle(NEEDS) == "it needs a CUDA device"
    names = [kind.name for kind in KINDS]
    assert names.index(BackendName.TRITON) < names.index(BackendName.TORCH)
    assert "triton: it needs a CUDA device" in choose_backend("auto", NEEDS, (TritonKind(), KINDS[-1])).reason


@pytest.mark.parametrize(
    ("dtype", "geometry", "expected"),
    [
        (torch.bfloat16, NEEDS.geometry, None),
        (torch.float64, NEEDS.geometry, "it does not compute in float64"),
        (torch.float16, KVGeometry(8, 8, 520, (LAYER,)), "heads have 520 numbers, and 512 is the most"),
        (
            torch.float16,
            KVGeometry(8, 8, 64, (LAYER,), state=RecurrentState(())),
            "it keeps recurrent states, which only the torch backend serves",
        ),
        (
            torch.float16,
            KVGeometry(8, 4, 256, (LAYER,), further_groups=(LayerGroup(1, 64, 1, 512, 512),)),
            "64 query heads share a KV head, and 32 is the most",
        ),
        (torch.float16, KVGeometry(71, 1, 64, (LAYER,)), "71 query heads share a KV head, and 64 is the most"),
        (torch.float32, KVGeometry(40, 1, 64, (LAYER,)), "40 query heads share a KV head, and 32 is the most"),
        (
            torch.float32,
            KVGeometry(8, 8, 64, (replace(LAYER, is_causal=False),)),
            "a layer has a sliding window and attends to both sides",
        ),
    ],
)
def test_it_says_what_it_does_not_cover(dtype: torch.dtype, geometry: KVGeometry, expected: str | None) -> None:
    assert find_uncovered(replace(NEEDS, dtype=dtype, geometry=geometry)) == expected
