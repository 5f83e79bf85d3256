"""The controller's state, saved in the key-value store of Ray's head (GCS), where the next controller finds it.

The store lasts as long as the Ray cluster. It also outlasts the head if Ray keeps it in Redis. The state is pickled,
since only raypd of the same version reads it, in the same cluster.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import ray
from ray.experimental import internal_kv

from actors.model_facts import ModelFacts
from actors.process.ray_calls import FailureKind, RayCallFailed, ask_head, on_thread
from cluster.observability.status import Decision
from cluster.planning.plan_record import PlanMemory
from cluster.pool.engines.engine_incarnation import SavedEngine
from cluster.pool.ingresses.ingress_incarnation import SavedIngress
from cluster.pool.ray_objects.ray_nodes import is_own_node_dead
from cluster.reconciling.engine_slots import Slot, SlotHistory
from cluster.routing.engine_connection import EngineRole
from cluster.sessions.cluster_membership import Membership

_KV_NAMESPACE = b"raypd"
_TIMEOUT_S = 5.0


class ControllerReplaced(Exception):
    """Ray's head has declared the node of this process dead, so Ray starts the controller on another node."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """Everything that a later controller needs to go on, without the secrets.

    wanted:            the slots that should have an engine
    histories, roles:  each slot's history, and its role if it differs from the one that its engine began in
    model_directories: the checkpoint of each model version
    facts:             the model's facts once clients were let in; None before
    cordoned:          ids of the nodes on which nothing is started, since they were drained
    trust_generation:  the generation of the newest secrets that were given out (TrustMaterial.generation)
    plan_memory:       what the planner remembers
    num_manual_changes: how often operators have changed the fleet, for the planner
    """

    wanted: tuple[Slot, ...]
    histories: Mapping[Slot, SlotHistory]
    roles: Mapping[Slot, EngineRole]
    engines: tuple[SavedEngine, ...]
    membership: Membership
    model_directories: Mapping[int, str]
    ingresses: tuple[SavedIngress, ...]
    facts: ModelFacts | None
    cordoned: frozenset[str]
    decisions: tuple[Decision, ...]
    trust_generation: int = 0
    plan_memory: PlanMemory = field(default_factory=PlanMemory)
    num_manual_changes: int = 0


class StateStore:
    """One cluster's entry in the store. Every method raises RayCallFailed if Ray's head does not answer.

    Invariant: one write at a time, so that a late write cannot replace a newer one.
    """

    def __init__(self, namespace: str) -> None:
        self._key = f"controller/{namespace}".encode()
        self._lock = asyncio.Lock()
        self._writing: asyncio.Future[None] | None = None

    async def save(self, make_state: Callable[[], SavedState]) -> None:
        """Replace the saved state by make_state(), which is called once earlier writes are done.

        Raises ControllerReplaced if the saved state belongs to the next controller by now.
        """
        async with self._lock:
            await self._written()
            self._writing = asyncio.ensure_future(on_thread(_put_own, self._key, pickle.dumps(make_state())))
            await self._written()

    async def _written(self) -> None:
        if self._writing is None:
            return
        done, _ = await asyncio.wait({self._writing}, timeout=_TIMEOUT_S)
        if not done:
            raise RayCallFailed(FailureKind.TIMED_OUT, f"Ray's head did not answer within {_TIMEOUT_S:g} s")
        writing, self._writing = self._writing, None
        writing.result()

    async def load(self) -> SavedState | None:
        """Return the state that was saved last; None if there is none."""
        data = await ask_head(_get, self._key)
        if data is None:
            return None
        # Unpickling is safe here: only processes that can run any code in Ray can write to this store.
        state: SavedState = pickle.loads(data)
        return state

    async def clear(self) -> None:
        """Delete the saved state."""
        await ask_head(_delete, self._key)


def _put_own(key: bytes, data: bytes) -> None:
    # Ray's head declares a node dead before it restarts the node's actors elsewhere. So if this node is not dead, no
    # later controller has started.
    if is_own_node_dead(ray.nodes()):  # type: ignore[no-untyped-call]  # ray
        raise ControllerReplaced
    _put(key, data)


def _put(key: bytes, data: bytes) -> None:
    internal_kv._internal_kv_put(key, data, overwrite=True, namespace=_KV_NAMESPACE)


def _get(key: bytes) -> bytes | None:
    data: bytes | None = internal_kv._internal_kv_get(key, namespace=_KV_NAMESPACE)
    return data


def _delete(key: bytes) -> None:
    internal_kv._internal_kv_del(key, namespace=_KV_NAMESPACE)
