"""The innermost layer of the connector's worker side: it makes the transport and the agent, and passes steps on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kv_transfer.agent.transfer_agent import TransferAgent
from kv_transfer.config import KVTransferConfig
from kv_transfer.connector.reports import KVConnectorOutput
from kv_transfer.connector.steps import KVConnectorMetadata
from kv_transfer.device_kind import is_accelerator, mark_stream
from kv_transfer.errors import TransportUnavailable, TransportWedged
from kv_transfer.layout import KVCacheLayout
from kv_transfer.links.control_streams import Control
from kv_transfer.links.link_compatibility import PairingFacts
from kv_transfer.links.loopback_control import LoopbackControl
from kv_transfer.params import EngineAddress
from kv_transfer.transports.base import Transport
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.nccl import ABORT_MARGIN_S, NcclTransport
from kv_transfer.transports.nccl_device import CudaDevice
from kv_transfer.transports.nccl_library import install_command, load_nccl, nccl_report
from kv_transfer.transports.tcp import TcpTransport


class WorkerSide:
    """A KVConnectorWorker for transfers between two ranks, over one transport."""

    def __init__(
        self,
        config: KVTransferConfig,
        identity: EngineAddress,
        layout: KVCacheLayout,
        kv_cache: Tensor,
        control: Control,
        on_progress: Callable[[], None],
    ) -> None:
        """Make the transport and start the agent. Raises TransportUnavailable.

        identity:    the rank's name and address
        on_progress: called when take_output() has something new, on a thread of the agent or of a link
        """
        self._device = kv_cache.device
        self._on_progress = on_progress
        self._wedged: str | None = None
        transport = make_transport(config, identity, control, kv_cache, self._on_wedged)
        self.transport_name = str(nccl_report()) if transport.name == "nccl" else transport.name
        """The transport as status pages show it; for NCCL with the versions and the library's path."""
        self.pairing = PairingFacts.of_rank(
            layout, transport.name, checksum=config.checksum, is_on_gpu=is_accelerator(kv_cache.device)
        )
        """The facts that a peer must share to exchange KV with this rank."""
        self._agent = TransferAgent(config, identity, layout, kv_cache, transport, control, on_progress)

    def start_step(self, metadata: KVConnectorMetadata) -> None:
        """Pass on what a step asks for, before its forward pass."""
        if not metadata.is_empty():
            self._agent.start_step(metadata, mark_stream(self._device))

    def finish_step(self, metadata: KVConnectorMetadata) -> None:
        """Let the blocks leave that the step's forward pass has completed."""
        if metadata.progress:
            self._agent.finish_step(metadata.progress, mark_stream(self._device))

    def take_output(self) -> KVConnectorOutput:
        """Return the reports since the last call.

        Raises TransportWedged if a link could not be aborted, and KVTransferError if the agent has died.
        """
        output = self._agent.take_output()
        # Checked after the output is taken: a link is reported as wedged before it is reported as dead, so no block
        # that the device may still write is ever reported as free.
        if self._wedged is not None:
            raise TransportWedged(self._wedged)
        return output

    def shutdown(self) -> None:
        """Close every link."""
        self._agent.stop()

    def _on_wedged(self, reason: str) -> None:
        """Note, on a link's thread, that a link is wedged; take_output() raises it, and the engine ends."""
        self._wedged = reason
        self._on_progress()


def make_transport(
    config: KVTransferConfig,
    identity: EngineAddress,
    control: Control,
    kv_cache: Tensor,
    on_wedged: Callable[[str], None],
) -> Transport:
    """Return the configured transport. Raises TransportUnavailable, with what is missing.

    on_wedged: called with the reason, on a link's thread, if the device may still write blocks after a link's end: the
               engine has to end
    """
    if isinstance(control, LoopbackControl):
        if config.transport not in {"loopback", "auto"}:
            raise TransportUnavailable(f"engines of one process are joined by loopback, not by {config.transport}")
        return LoopbackTransport(control.hub)
    is_on_gpu = is_accelerator(kv_cache.device)
    if config.transport == "nccl" or (config.transport == "auto" and is_on_gpu):
        return _make_nccl_transport(config, kv_cache.device, on_wedged)
    if config.transport == "loopback":
        raise TransportUnavailable("kv_transfer.transport = 'loopback' joins engines of one process only; use 'auto'")
    if is_on_gpu:
        raise TransportUnavailable(
            f"kv_transfer.transport = {config.transport!r} moves CPU memory, but this engine's KV cache is on "
            f"{kv_cache.device}; use 'auto'"
        )
    host, _, _ = identity.control_address.rpartition(":")
    # An IPv6 address has brackets in control_address, which sockets do not accept.
    host = host.removeprefix("[").removesuffix("]")
    return TcpTransport(host, kv_cache, config.chunk_timeout_s, control.tls, control.refusals)


def _make_nccl_transport(
    config: KVTransferConfig, device: torch.device, on_wedged: Callable[[str], None]
) -> NcclTransport:
    if not is_accelerator(device):
        raise TransportUnavailable(
            f"kv_transfer.transport = 'nccl' moves GPU memory, but this engine's KV cache is on {device}: run it on a "
            f"GPU (model.device = 'cuda', {install_command(torch.version.cuda)}), or use 'auto'"
        )
    return NcclTransport(load_nccl(), CudaDevice(device), on_wedged, config.chunk_timeout_s + ABORT_MARGIN_S)
