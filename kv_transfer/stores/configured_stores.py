"""Makes the stores of an engine: the host tier if it is configured, then those of entry points, in the given order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Final

from kv_transfer.config import KVTransferConfig
from kv_transfer.errors import StoreUnavailable
from kv_transfer.layout import KVCacheLayout
from kv_transfer.stores.base import KVStore, KVStoreWorker
from kv_transfer.stores.host_tier import HostMemoryStore
from kv_transfer.stores.store_set import KVStoreScheduler

ENTRY_POINT_GROUP: Final = "raypd.kv_stores"


@dataclass(frozen=True, slots=True)
class ChosenStore:
    """A store that is configured, and its options."""

    name: str
    store: KVStore
    options: Mapping[str, Any]

    def make_scheduler(self, layout: KVCacheLayout) -> KVStoreScheduler:
        """Return the store's scheduler side. Raises StoreUnavailable if the store refuses its options or fails."""
        try:
            return self.store.make_scheduler(layout, self.options)
        except (OSError, TypeError, ValueError) as error:
            raise StoreUnavailable(f"KV store {self.name!r}: {error}") from error

    def make_worker(self, layout: KVCacheLayout) -> KVStoreWorker:
        """Return the store's worker side for a rank. Raises StoreUnavailable, as make_scheduler() does."""
        try:
            return self.store.make_worker(layout, self.options)
        except (OSError, TypeError, ValueError) as error:
            raise StoreUnavailable(f"KV store {self.name!r}: {error}") from error


def choose_stores(config: KVTransferConfig, *, is_on_gpu: bool) -> list[ChosenStore]:
    """Return the configured stores, the nearest first.

    Raises StoreUnavailable if a store is not installed or does not load.
    """
    chosen: list[ChosenStore] = []
    if config.cpu_cache_gib:
        options = {"cpu_cache_gib": config.cpu_cache_gib, "is_on_gpu": is_on_gpu}
        chosen.append(ChosenStore("cpu", HostMemoryStore(), options))
    chosen += [ChosenStore(entry.name, _load(entry.name), entry.options) for entry in config.stores]
    return chosen


def _load(name: str) -> KVStore:
    found = entry_points(group=ENTRY_POINT_GROUP)
    if name not in found.names:
        known = ", ".join(sorted(found.names)) or "none"
        raise StoreUnavailable(
            f"no installed package has a KV store {name!r}, an entry point of {ENTRY_POINT_GROUP!r}; installed: {known}"
        )
    try:
        store: KVStore = found[name].load()()
    except Exception as error:
        # Third-party code may raise anything: the engine does not start, and its error names the store.
        raise StoreUnavailable(f"KV store {name!r} does not load: {type(error).__name__}: {error}") from error
    return store
