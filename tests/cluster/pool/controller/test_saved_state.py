"""The controller's states are written one at a time, the newest last."""

from __future__ import annotations

import asyncio
import pickle
import threading

import pytest
import ray

from actors.process.ray_calls import RayCallFailed
from cluster.pool.controller import saved_state
from cluster.pool.controller.saved_state import ControllerReplaced, SavedState, StateStore
from cluster.sessions.cluster_membership import Membership
from tests.cluster.pool.fake_ray import nodes_of


class FakeStore:
    """Ray's store. While `is_up` is not set its head is away: writes wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.data: dict[bytes, bytes] = {}
        self.versions: list[int] = []
        self.is_up = threading.Event()
        self.is_up.set()
        monkeypatch.setattr(saved_state, "_put", self.put)
        monkeypatch.setattr(saved_state, "_get", self.data.get)
        monkeypatch.setattr(saved_state, "_delete", self.data.pop)
        monkeypatch.setattr(saved_state, "_TIMEOUT_S", 60.0)
        monkeypatch.setattr(ray, "nodes", list)

    def put(self, key: bytes, data: bytes) -> None:
        assert self.is_up.wait(60)
        self.versions.append(pickle.loads(data).membership.version)
        self.data[key] = data


@pytest.fixture
def ray_store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    return FakeStore(monkeypatch)


def state(version: int) -> SavedState:
    return SavedState((), {}, {}, (), Membership(version, ()), {1: "model"}, (), None, frozenset(), ())


async def test_what_was_saved_is_loaded_until_it_is_cleared(ray_store: FakeStore) -> None:
    store = StateStore("raypd")
    assert await store.load() is None
    await store.save(lambda: state(3))
    assert await StateStore("raypd").load() == state(3)
    assert await StateStore("another").load() is None
    await store.clear()
    assert await store.load() is None


async def test_a_late_write_does_not_land_on_a_newer_one(ray_store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StateStore("raypd")
    ray_store.is_up.clear()
    with monkeypatch.context() as patch:
        patch.setattr(saved_state, "_TIMEOUT_S", 0.5)
        for version in (1, 2):
            with pytest.raises(RayCallFailed, match="head did not answer"):
                await store.save(lambda version=version: state(version))  # type: ignore[misc]  # mypy cannot infer it
    ray_store.is_up.set()
    async with asyncio.timeout(60):
        while True:
            try:
                await store.save(lambda: state(3))
                break
            except TimeoutError:
                continue
    assert ray_store.versions == [1, 3]


async def test_of_several_that_save_at_once_the_last_one_saves_what_is_so_then(ray_store: FakeStore) -> None:
    store = StateStore("raypd")
    version = 0

    def now() -> SavedState:
        return state(version)

    async def change_and_save() -> None:
        nonlocal version
        version += 1
        await store.save(now)

    await asyncio.gather(*(change_and_save() for _ in range(5)))
    assert ray_store.versions[-1] == 5
    assert await store.load() == state(5)


async def test_a_controller_on_a_node_that_ray_has_given_up_does_not_overwrite_the_state_of_its_successor(
    ray_store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await StateStore("raypd").save(lambda: state(7))
    monkeypatch.setattr(ray, "nodes", nodes_of(monkeypatch, own="a", alive=["b"], dead=["a"]))
    with pytest.raises(ControllerReplaced):
        await StateStore("raypd").save(lambda: state(8))
    assert await StateStore("raypd").load() == state(7)


async def test_the_death_of_another_node_keeps_no_state_from_being_saved(
    ray_store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "nodes", nodes_of(monkeypatch, own="a", alive=["a"], dead=["b"]))
    await StateStore("raypd").save(lambda: state(8))
    assert await StateStore("raypd").load() == state(8)
