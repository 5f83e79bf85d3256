"""How a client connects to an ingress: the one place where its channels are made, with all that goes along."""

from __future__ import annotations

from typing import Final

import grpc.aio

_OPTIONS: Final = (
    # An ingress that the network has swallowed must be noticed, also while it has nothing to say.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without it a client's unanswered ping is waited for a minute, whatever the keepalive timeout.
    ("grpc.http2.ping_timeout_ms", 5_000),
    # A client says nothing while it listens: gRPC would stop asking after two pings.
    ("grpc.http2.max_pings_without_data", 0),
    # One that comes back is found again soon; gRPC's own patience grows to minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.max_send_message_length", 16 * 2**20),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to an ingress, of the running event loop; it connects when it is first used."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)
