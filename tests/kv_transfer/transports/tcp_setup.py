"""The TCP transport as tests use it."""

from __future__ import annotations

from torch import Tensor

from kv_transfer.config import KVTransferConfig
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.trust.refusals import Refusals
from kv_transfer.trust.tls import InternalTls


def tcp_transport(
    host: str, kv_cache: Tensor, tls: InternalTls | None = None, refusals: Refusals | None = None
) -> TcpTransport:
    """A transport that bears as much silence as the settings do by default."""
    return TcpTransport(host, kv_cache, KVTransferConfig().chunk_timeout_s, tls, refusals)
