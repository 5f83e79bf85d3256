"""The connector's worker side: passes steps to the transfer agent and takes its reports."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kv_transfer.agent import TransferAgent
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector import KVConnectorMetadata, KVConnectorOutput
from kv_transfer.control import Control
from kv_transfer.errors import TransportUnavailable
from kv_transfer.layout import KVCacheLayout
from kv_transfer.loopback import LoopbackControl
from kv_transfer.params import EngineAddress
from kv_transfer.transports.base import Transport
from kv_transfer.transports.gloo import GlooTransport
from kv_transfer.transports.loopback import LoopbackTransport


class ConnectorWorker:
    """A KVConnectorWorker over one transport."""

    def __init__(
        self,
        config: KVTransferConfig,
        identity: EngineAddress,
        layout: KVCacheLayout,
        kv_cache: Tensor,
        control: Control,
        on_progress: Callable[[], None],
    ) -> None:
        """on_progress: called on the agent's thread when take_output() has something. Raises TransportUnavailable."""
        transport = make_transport(config, identity, control, kv_cache)
        self._agent = TransferAgent(config, identity, layout, kv_cache, transport, control, on_progress)

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        """Before the forward."""
        if not metadata.is_empty():
            self._agent.start_step(metadata)

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        """After the forward."""
        if metadata.progress:
            self._agent.finish_step(metadata.progress)

    def take_output(self) -> KVConnectorOutput:
        """What happened since the last call."""
        return self._agent.take_output()

    def shutdown(self) -> None:
        """Close every link."""
        self._agent.stop()


def make_transport(config: KVTransferConfig, identity: EngineAddress, control: Control, kv_cache: Tensor) -> Transport:
    """The configured transport. Raises TransportUnavailable with what is missing."""
    if isinstance(control, LoopbackControl):
        if config.transport not in {"loopback", "auto"}:
            raise TransportUnavailable(f"engines of one process are joined by loopback, not by {config.transport}")
        return LoopbackTransport(control.hub)
    if config.transport == "loopback":
        raise TransportUnavailable("kv_transfer.transport = 'loopback' joins engines of one process only; use 'gloo'")
    if kv_cache.device.type != "cpu":
        raise TransportUnavailable(f"gloo moves CPU memory; there is no transport for {kv_cache.device} yet")
    host, _, _ = identity.control_address.rpartition(":")
    return GlooTransport(host, config.connect_timeout_s)
