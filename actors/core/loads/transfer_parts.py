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
    """The parts that an engine needs for transfers; each is None if the engine has no such transfers.

    connector: the scheduler's side of handoffs
    prefix_sources: stores and engines that may have a request's prefix
    staging: what the engine needs to send and fetch embeddings of images
    kv_bytes_per_token: bytes of one token's KV, all layers and heads of the model
    """

    connector: KVConnectorScheduler | None = None
    prefix_sources: PrefixSources | None = None
    staging: Staging | None = None
    config: KVTransferConfig = field(default_factory=KVTransferConfig)
    kv_bytes_per_token: int = 0

    @property
    def stores(self) -> StoreSet | None:
        """The stores outside the device that keep blocks; None if there are none."""
        return None if self.prefix_sources is None else self.prefix_sources.stores


NO_TRANSFERS: Final = TransferParts()
