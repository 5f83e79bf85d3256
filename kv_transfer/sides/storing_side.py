"""The layer of a connector's worker side that adds stores to its links."""

from __future__ import annotations

from dataclasses import replace

from kv_transfer.connector.interface import KVConnectorWorker
from kv_transfer.connector.reports import FinishedLoading, KVConnectorOutput
from kv_transfer.connector.steps import KVConnectorMetadata
from kv_transfer.stores.store_copier import StoreCopier


class StoringSide:
    """A KVConnectorWorker around another one. Evicted blocks are copied into stores before a link may write them."""

    def __init__(self, links: KVConnectorWorker, copier: StoreCopier) -> None:
        self._links = links
        self._copier = copier

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        """Begin what a step asks of stores, then what it asks of links."""
        if metadata.stores is not None:
            self._copier.start_step(metadata.stores)
            metadata = replace(metadata, stores=None)
        self._links.start_step(metadata)

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        """Let the blocks leave that the step's forward pass has completed."""
        self._links.finish_step(metadata)

    def take_output(self) -> KVConnectorOutput:
        """Return the reports since the last call, of links and of stores, with the counters of stores."""
        output = self._links.take_output()
        loaded = self._copier.take_loaded()
        output.reports += [FinishedLoading(request_id, load) for request_id, load in loaded.items()]
        output.store_stats = self._copier.stats
        return output

    def shutdown(self) -> None:
        """Close every link, then every store."""
        self._links.shutdown()
        self._copier.close()
