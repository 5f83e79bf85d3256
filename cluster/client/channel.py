"""Makes the gRPC channels from a client to its ingresses, with keepalive, message sizes, TLS and the token."""

from __future__ import annotations

import functools
from typing import Any, Final, Self

import grpc.aio

from cluster.client.client_credentials import Credentials

_OPTIONS: Final = (
    # The client must notice an ingress that the network has cut off, even while no response is due.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without this option gRPC waits a minute for the answer to a ping, whatever the keepalive timeout is.
    ("grpc.http2.ping_timeout_ms", 5_000),
    # A client that only receives sends no data; without this option gRPC would stop after two pings.
    ("grpc.http2.max_pings_without_data", 0),
    # The client finds an ingress that comes back within a second or so; gRPC's default delay grows to minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.max_send_message_length", 16 * 2**20),
)


def open_channel(address: str, credentials: Credentials | None = None) -> grpc.aio.Channel:
    """Open a channel to an ingress on the running event loop; it connects when it is first used.

    address:     host:port
    credentials: each call carries their token; None: those that Credentials.from_environment() reads
    Raises InvalidConfig if the credentials cannot be used.
    """
    credentials = credentials or Credentials.from_environment()
    metadata = credentials.metadata(address)
    if credentials.is_encrypted:
        channel = grpc.aio.secure_channel(address, credentials.channel_credentials(), options=_OPTIONS)
    else:
        channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
    return _ChannelWithMetadata(channel, metadata) if metadata else channel


class _ChannelWithMetadata(grpc.aio.Channel):
    """A channel whose calls all carry the same metadata.

    An interceptor of grpc.aio could add the metadata too, but would cost a task for each call.
    """

    def __init__(self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return functools.partial(self._channel.unary_unary(*arguments, **options), metadata=self._metadata)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return functools.partial(self._channel.unary_stream(*arguments, **options), metadata=self._metadata)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return functools.partial(self._channel.stream_unary(*arguments, **options), metadata=self._metadata)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return functools.partial(self._channel.stream_stream(*arguments, **options), metadata=self._metadata)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()
