"""The connector's worker side: passes steps to the transfer agent and takes its reports."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kv_transfer.agent.transfer_agent import TransferAgent
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import KVConnectorOutput
from kv_transfer.connector.steps import KVConnectorMetadata
from kv_transfer.errors import TransportUnavailable, TransportWedged
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.control_streams import Control
from kv_transfer.links.link_compatibility import PairingFacts
from kv_transfer.links.loopback_control import LoopbackControl
from kv_transfer.params import EngineAddress
from kv_transfer.transports.base import Transport
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.nccl import ABORT_MARGIN_S, NcclTransport
from kv_transfer.transports.nccl_device import CudaDevice, mark_compute
from kv_transfer.transports.nccl_library import install_command, load_nccl, nccl_report
from kv_transfer.transports.tcp import TcpTransport


class WorkerSide:
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
        self._device = kv_cache.device
        self._on_progress = on_progress
        self._wedged: str | None = None
        transport = make_transport(config, identity, control, kv_cache, self._on_wedged)
        self.transport_name = str(nccl_report()) if transport.name == "nccl" else transport.name
        """For people: the transport, and for NCCL whose library it is."""
        self.pairing = PairingFacts.of_rank(
            layout, transport.name, checksum=config.checksum, is_on_gpu=kv_cache.is_cuda
        )
        """What the handshakes of this rank go by."""
        self._agent = TransferAgent(config, identity, layout, kv_cache, transport, control, on_progress)

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        """Before the forward."""
        if not metadata.is_empty():
            self._agent.start_step(metadata, mark_compute(self._device))

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        """After the forward."""
        if metadata.progress:
            self._agent.finish_step(metadata.progress, mark_compute(self._device))

    def take_output(self) -> KVConnectorOutput:
        """What happened since the last call. Raises TransportWedged, or what the agent died of."""
        output = self._agent.take_output()
        # After the output: a link says that it is wedged before it says that it is dead, so no block that the device
        # may still write is ever reported as free.
        if self._wedged is not None:
            raise TransportWedged(self._wedged)
        return output

    def shutdown(self) -> None:
        """Close every link."""
        self._agent.stop()

    def _on_wedged(self, reason: str) -> None:
        """On a link's thread: the engine thread, which ends the engine, finds it in take_output()."""
        self._wedged = reason
        self._on_progress()


def make_transport(
    config: KVTransferConfig,
    identity: EngineAddress,
    control: Control,
    kv_cache: Tensor,
    on_wedged: Callable[[str], None],
) -> Transport:
    """The configured transport. Raises TransportUnavailable with what is missing.

    on_wedged: called, with the reason, if a link leaves the cache in doubt: the engine has to end
    """
    if isinstance(control, LoopbackControl):
        if config.transport not in {"loopback", "auto"}:
            raise TransportUnavailable(f"engines of one process are joined by loopback, not by {config.transport}")
        return LoopbackTransport(control.hub)
    is_on_gpu = kv_cache.device.type == "cuda"
    if config.transport == "nccl" or (config.transport == "auto" and is_on_gpu):
        return _make_nccl_transport(config, kv_cache.device, on_wedged)
    if config.transport == "loopback":
        raise TransportUnavailable("kv_transfer.transport = 'loopback' joins engines of one process only; use 'auto'")
    if kv_cache.device.type != "cpu":
        raise TransportUnavailable(
            f"kv_transfer.transport = {config.transport!r} moves CPU memory, but this engine's KV cache is on "
            f"{kv_cache.device}; use 'auto'"
        )
    host, _, _ = identity.control_address.rpartition(":")
    # An IPv6 address has brackets around it there, which sockets do not know.
    host = host.removeprefix("[").removesuffix("]")
    return TcpTransport(host, kv_cache, config.chunk_timeout_s, control.tls, control.refusals)


def _make_nccl_transport(
    config: KVTransferConfig, device: torch.device, on_wedged: Callable[[str], None]
) -> NcclTransport:
    if device.type != "cuda":
        raise TransportUnavailable(
            f"kv_transfer.transport = 'nccl' moves GPU memory, but this engine's KV cache is on {device}: run it on a "
            f"GPU (model.device = 'cuda', {install_command(torch.version.cuda)}), or use 'auto'"
        )
    return NcclTransport(load_nccl(), CudaDevice(device), on_wedged, config.chunk_timeout_s + ABORT_MARGIN_S)
