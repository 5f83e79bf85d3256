"""Chooses the attention backend of a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from actors.model.attention.backend import AttentionBackendKind, AttentionNeeds, BackendName
from actors.model.attention.backend_check import find_fault
from actors.model.attention.torch_backend import TorchKind
from actors.model.attention.triton_backend import TritonKind
from actors.model.attention.vllm_cpu_backend import VllmCpuKind
from actors.model.errors import AttentionBackendUnavailable
from kv_transfer.layout import KeyOrder

KINDS: Final[tuple[AttentionBackendKind, ...]] = (TritonKind(), VllmCpuKind(), TorchKind())
"""All kinds of backends; where several serve a model, the first of them is the fastest."""

_AUTO: Final = "auto"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that was chosen, and the reason in words, for the log and `raypd status`."""

    kind: AttentionBackendKind
    reason: str


def choose_backend(setting: str, needs: AttentionNeeds, kinds: Sequence[AttentionBackendKind] = KINDS) -> BackendChoice:
    """Return the backend that the setting names, or with `auto` the fastest one that serves the needs.

    A backend other than torch has to pass its self-check.
    Raises AttentionBackendUnavailable if the setting names a backend that cannot serve the needs.
    """
    obstacles: list[str] = []
    for kind in kinds:
        if setting not in (_AUTO, kind.name):
            continue
        obstacle = _find_obstacle(kind, needs)
        if obstacle is None:
            reason = "; ".join(obstacles) if obstacles else "it is the fastest of those that serve this model"
            return BackendChoice(kind, reason if setting == _AUTO else "cache.attention_backend names it")
        obstacles.append(f"{kind.name}: {obstacle}")
    raise AttentionBackendUnavailable(f"attention_backend: {setting} cannot be used: {'; '.join(obstacles)}")


def fastest_key_order(setting: str, needs: AttentionNeeds, kinds: Sequence[AttentionBackendKind] = KINDS) -> KeyOrder:
    """Return the order of K in which the backend is fastest that the setting would choose. needs.key_order is ignored.

    Raises AttentionBackendUnavailable if the setting names a backend that cannot serve the needs in any order.
    """
    for kind in kinds:
        if setting not in (_AUTO, kind.name):
            continue
        for key_order in kind.key_orders(needs):
            if _find_obstacle(kind, replace(needs, key_order=key_order)) is None:
                return key_order
    choose_backend(setting, needs, kinds)
    raise AssertionError("a backend without an obstacle has an order without one")


def _find_obstacle(kind: AttentionBackendKind, needs: AttentionNeeds) -> str | None:
    # What no setting can change comes first: on a CPU, the order of keys is not why triton does not run.
    if (obstacle := kind.find_obstacle(needs)) is not None:
        return obstacle
    if needs.key_order not in kind.key_orders(needs):
        return f"it does not read keys in the order {needs.key_order}"
    return None if kind.name is BackendName.TORCH else find_fault(kind, needs)
