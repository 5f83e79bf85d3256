"""The parts by which an engine exchanges KV and embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from actors.core.loads.embedding_transfers import Staging
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.interface import KVConnectorScheduler
from kv_transfer.prefix.prefix_sources import PrefixSources
from kv_transfer.stores.store_set import StoreSet


@dataclass(frozen=True, slots=True)
class TransferParts:
    """The parts that an engine needs for transfers; by default it has none of them.

    prefix_sources: where else a request's prefix may be
    staging: the facts for sending and fetching embeddings of images
    """

    connector: KVConnectorScheduler | None = None
    prefix_sources: PrefixSources | None = None
    staging: Staging | None = None
    config: KVTransferConfig = field(default_factory=KVTransferConfig)

    @property
    def stores(self) -> StoreSet | None:
        """The stores outside of the device that keep blocks; None if there are none."""
        return None if self.prefix_sources is None else self.prefix_sources.stores


NO_TRANSFERS: Final = TransferParts()
