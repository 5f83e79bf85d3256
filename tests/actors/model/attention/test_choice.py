"""A backend is chosen where it covers the model and computes right, and refused with the reason otherwise.

Tests of actors/model/attention/backend.py, actors/model/attention/backend_check.py, actors/model/attention/choice.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from actors.model.attention.backend import AttentionBackend, AttentionBackendKind, AttentionNeeds, BackendName
from actors.model.attention.backend_check import find_fault
from actors.model.attention.batch_attention import AttentionLayer, BatchAttention, BatchShape
from actors.model.attention.choice import choose_backend, fastest_key_order
from actors.model.attention.probe import KVGeometry
from actors.model.attention.torch_backend import TorchKind
from actors.model.cache.kv_groups import LayerGroup, LayerPlane
from actors.model.errors import AttentionBackendUnavailable
from kv_transfer.layout import KeyOrder

LAYERS = (
    AttentionLayer(0, 0.3, None, None),
    AttentionLayer(1, 0.3, None, 4096),
    AttentionLayer(2, 0.3, 2.0, 10),
    AttentionLayer(3, 0.3, 2.0, None),
    AttentionLayer(4, 0.3, None, 10, has_sinks=True),
    AttentionLayer(5, 0.3, 2.0, None, has_sinks=True),
)
NEEDS = AttentionNeeds(torch.device("cpu"), torch.float32, KVGeometry(6, 2, 32, LAYERS), 16, KeyOrder.PLAIN)


class WrongBatch:
    """Loses a part of what the right backend returns."""

    def __init__(self, right: BatchAttention) -> None:
        self._right = right

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        attended = self._right.attend(layer, query, key, value, sinks)
        if layer.softcap is not None:
            attended[-1, -1] = 0
        return attended


class WrongBackend:
    def __init__(self, right: AttentionBackend) -> None:
        self._right = right
        self.kv_cache = right.kv_cache

    def prepare(self, shape: BatchShape) -> BatchAttention:
        return WrongBatch(self._right.prepare(shape))


@dataclass(frozen=True)
class FakeKind:
    """A kind that is faster than torch, in the transposed order, which it keeps to itself here."""

    name: BackendName = BackendName.VLLM_CPU
    obstacle: str | None = None
    orders: tuple[KeyOrder, ...] = (KeyOrder.TRANSPOSED, KeyOrder.PLAIN)
    is_wrong: bool = False

    def key_orders(self, needs: AttentionNeeds) -> tuple[KeyOrder, ...]:
        return self.orders

    def find_obstacle(self, needs: AttentionNeeds) -> str | None:
        return self.obstacle

    def open(self, kv_cache: Tensor, needs: AttentionNeeds) -> AttentionBackend:
        right = TorchKind().open(kv_cache, needs)
        return WrongBackend(right) if self.is_wrong else right


def chosen(setting: str, *kinds: AttentionBackendKind) -> tuple[str, str]:
    choice = choose_backend(setting, NEEDS, kinds)
    return choice.kind.name.value, choice.reason


def test_auto_takes_the_first_kind_that_serves_the_model() -> None:
    name, reason = chosen("auto", FakeKind(), TorchKind())
    assert (name, reason) == ("vllm_cpu", "it is the fastest of those that serve this model")


def test_auto_goes_on_to_the_next_kind_and_says_why() -> None:
    name, reason = chosen("auto", FakeKind(obstacle="it is not installed"), TorchKind())
    assert (name, reason) == ("torch", "vllm_cpu: it is not installed")


def test_a_kind_that_computes_wrong_is_not_taken() -> None:
    name, reason = chosen("auto", FakeKind(is_wrong=True), TorchKind())
    assert name == "torch"
    assert reason.startswith("vllm_cpu: its self-check found an error of")


def test_a_named_kind_is_taken_or_refused() -> None:
    kinds = (FakeKind(obstacle="it is not installed"), TorchKind())
    assert chosen("torch", *kinds) == ("torch", "cache.attention_backend names it")
    with pytest.raises(AttentionBackendUnavailable, match="vllm_cpu cannot be used: vllm_cpu: it is not installed"):
        chosen("vllm_cpu", *kinds)


def test_a_kind_that_does_not_read_the_order_of_keys_is_refused() -> None:
    unknown = replace(NEEDS, key_order=KeyOrder.TRANSPOSED)
    with pytest.raises(AttentionBackendUnavailable, match="it does not read keys in the order transposed"):
        choose_backend("vllm_cpu", unknown, (FakeKind(orders=(KeyOrder.PLAIN,)),))


def test_the_order_of_keys_is_no_reason_where_the_device_is_one() -> None:
    unknown = replace(NEEDS, key_order=KeyOrder.TRANSPOSED)
    kinds = (FakeKind(orders=(KeyOrder.PLAIN,), obstacle="it needs a CUDA device"), FakeKind())
    assert choose_backend("auto", unknown, kinds).reason == "vllm_cpu: it needs a CUDA device"


def test_the_fastest_order_is_that_of_the_kind_that_would_be_chosen() -> None:
    assert fastest_key_order("auto", NEEDS, (FakeKind(), TorchKind())) is KeyOrder.TRANSPOSED
    assert fastest_key_order("auto", NEEDS, (FakeKind(obstacle="absent"), TorchKind())) is KeyOrder.PLAIN
    assert fastest_key_order("torch", NEEDS, (FakeKind(), TorchKind())) is KeyOrder.PLAIN
    with pytest.raises(AttentionBackendUnavailable, match="absent"):
        fastest_key_order("vllm_cpu", NEEDS, (FakeKind(obstacle="absent"), TorchKind()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("key_order", KeyOrder)
def test_the_torch_backend_passes_the_check_that_the_others_have_to_pass(
    key_order: KeyOrder, is_causal: bool, dtype: torch.dtype
) -> None:
    layers = LAYERS if is_causal else (AttentionLayer(0, 0.3, None, None, is_causal=False),)
    needs = replace(NEEDS, dtype=dtype, key_order=key_order, geometry=replace(NEEDS.geometry, layers=layers))
    assert find_fault(TorchKind(), needs) is None


@dataclass(frozen=True)
class FaultyKind(FakeKind):
    """A kind that adds a little to one number of what a layer returns, where the fault is, at most fifty limits."""

    is_faulty: Callable[[AttentionNeeds, AttentionLayer, BatchShape], bool] = lambda needs, layer, shape: False

    def open(self, kv_cache: Tensor, needs: AttentionNeeds) -> AttentionBackend:
        return FaultyBackend(self, TorchKind().open(kv_cache, needs), needs)


class FaultyBackend:
    def __init__(self, kind: FaultyKind, right: AttentionBackend, needs: AttentionNeeds) -> None:
        self.kind, self.right, self.needs, self.kv_cache = kind, right, needs, right.kv_cache

    def prepare(self, shape: BatchShape) -> BatchAttention:
        return FaultyBatch(self, shape)


class FaultyBatch:
    def __init__(self, backend: FaultyBackend, shape: BatchShape) -> None:
        self.backend, self.shape, self.right = backend, shape, backend.right.prepare(shape)

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        attended = self.right.attend(layer, query, key, value, sinks)
        if self.backend.kind.is_faulty(self.backend.needs, layer, self.shape):
            attended[-1, -1, -1] += 5e-4
        return attended


ALIKE = replace(NEEDS, geometry=KVGeometry(6, 2, 32, (LAYERS[0], replace(LAYERS[0], index=1))))
GROUPED = replace(
    NEEDS,
    geometry=KVGeometry(
        *(6, 2, 32, LAYERS[:2]),
        further_groups=(LayerGroup(1, 8, 4, 16, 16),),
        planes=(LayerPlane(0, 0, 0), LayerPlane(1, 1, 0)),
    ),
)
CHUNKED = replace(NEEDS, geometry=KVGeometry(6, 2, 32, (LAYERS[0], AttentionLayer(1, 0.3, None, None, chunk_size=64))))


@pytest.mark.parametrize(
    ("needs", "is_faulty"),
    [
        pytest.param(NEEDS, lambda needs, layer, shape: layer.sliding_window is not None, id="windows"),
        pytest.param(NEEDS, lambda needs, layer, shape: layer.softcap is not None, id="caps"),
        pytest.param(NEEDS, lambda needs, layer, shape: layer.has_sinks, id="sinks"),
        pytest.param(CHUNKED, lambda needs, layer, shape: layer.chunk_size is not None, id="chunks"),
        pytest.param(ALIKE, lambda needs, layer, shape: layer.index == 1, id="the second layer"),
        pytest.param(GROUPED, lambda needs, layer, shape: needs.geometry.head_dim == 16, id="the second group"),
        pytest.param(ALIKE, lambda needs, layer, shape: shape.num_computed.max() > 512, id="a long context"),
        pytest.param(ALIKE, lambda needs, layer, shape: len(shape.num_computed) > 1, id="several requests"),
        pytest.param(
            NEEDS,
            lambda needs, layer, shape: shape.num_computed.max() > 512 and (layer.sliding_window or 0) > 512,
            id="a long window",
        ),
    ],
)
def test_the_self_check_looks_at_every_layer_and_every_kind_of_batch(
    needs: AttentionNeeds, is_faulty: Callable[[AttentionNeeds, AttentionLayer, BatchShape], bool]
) -> None:
    said = find_fault(FaultyKind(is_faulty=is_faulty), needs)
    assert said is not None
    assert said.startswith("its self-check found an error of")


@pytest.mark.parametrize("fault", ["not a number", "without sinks"])
def test_the_self_check_notices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(
        batch: WrongBatch, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        attended = batch._right.attend(layer, query, key, value, None if fault == "without sinks" else sinks)
        return attended * torch.nan if fault == "not a number" else attended

    monkeypatch.setattr(WrongBatch, "attend", attend)
    said = find_fault(FakeKind(is_wrong=True), NEEDS)
    assert said is not None
    assert said.startswith("its self-check found an error of")
