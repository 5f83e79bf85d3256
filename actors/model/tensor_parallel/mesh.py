"""Collectives between the ranks of an engine on CPUs: one socket for each pair, used by the forward's own thread.

gloo hands every collective from thread to thread, several times on each side. A forward has two collectives a layer,
and where waking a thread takes long they cost more than the model (benchmarks/RESULTS.md). Here only the thread that
waits for the result moves bytes.

- A small tensor goes whole to every other rank, and every rank adds all parts up in the order of the ranks.
- A large one is cut: each rank adds up its slice of all parts, then gives the sum to the others. That is as few bytes
  as a sum over ranks can take.

Either way the result has the same bits on every rank.

Invariant: a rank is at most one exchange ahead of any other, so at most two messages are on a socket. The kernel's
buffers hold two small ones, so nobody blocks in sending them; large ones are sent and received at the same time.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias

import msgspec
import torch
from torch import Tensor

from actors.model.errors import RankLost
from actors.model.tensor_parallel.rank_calls import RankCallers, RankTrust, call_rank, wait_to_call_again
from actors.model.tensor_parallel.rank_peers import RankPeer, as_peer
from kv_transfer.errors import Untrusted
from kv_transfer.layout import MAX_TP_SIZE
from kv_transfer.message_ranges import MALFORMED
from kv_transfer.trust.callers import BACKLOG

MAX_SMALL_BYTES: Final = 64 * 1024
_MAX_MESSAGE_BYTES: Final = 256 * 1024
"""The largest message with the addresses of all ranks."""
_BUFFER_BYTES: Final = 4 * MAX_SMALL_BYTES
RankAddress: TypeAlias = tuple[
    Annotated[str, msgspec.Meta(min_length=1, max_length=256)], Annotated[int, msgspec.Meta(ge=1, le=2**16 - 1)]
]
"""Host and port where a rank listens for the others."""
RankAddresses: TypeAlias = Annotated[
    dict[Annotated[int, msgspec.Meta(ge=1, lt=MAX_TP_SIZE)], RankAddress], msgspec.Meta(max_length=MAX_TP_SIZE)
]
decode_address: Final = msgspec.msgpack.Decoder(RankAddress).decode
decode_addresses: Final = msgspec.msgpack.Decoder(RankAddresses).decode


class SocketMesh:
    """One rank's sockets to all others."""

    def __init__(
        self,
        meeting: socket.socket | tuple[str, int],
        rank: int,
        size: int,
        *,
        host: str,
        timeout_s: float,
        trust: RankTrust,
    ) -> None:
        """Connect every pair; blocks until all ranks do.

        meeting: rank 0's own open_server(); to the others, its host and port
        host: this rank's own address, as the others reach it
        trust: what the ranks prove to each other on every connection, before anything else is read
        Raises RankLost.
        """
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._trust = trust
        self._peers: dict[int, RankPeer] = {}
        try:
            if isinstance(meeting, socket.socket):
                self._meet_at_rank_0(meeting)
            else:
                self._meet(meeting, host)
        except (OSError, Untrusted, *MALFORMED) as error:
            self.close()
            raise RankLost(f"rank {rank} of {size} did not connect to the other ranks: {error}") from error

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See TensorParallelGroup."""
        if tensor.nbytes <= MAX_SMALL_BYTES:
            parts = self.all_gather(tensor)
            return _add_up(list(parts))
        result = torch.empty_like(tensor)
        slices = _slices(tensor, self._size)
        own = slices[self._rank]
        parts = own.new_empty((self._size, len(own)))
        parts[self._rank] = own
        self._swap({rank: slices[rank] for rank in self._peers}, {rank: parts[rank] for rank in self._peers})
        sums = _slices(result, self._size)
        sums[self._rank].copy_(_add_up(list(parts)))
        self._swap(dict.fromkeys(self._peers, sums[self._rank]), {rank: sums[rank] for rank in self._peers})
        return result

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See TensorParallelGroup."""
        gathered = tensor.new_empty((self._size, *tensor.shape))
        gathered[self._rank] = tensor
        self._swap(dict.fromkeys(self._peers, tensor), {rank: gathered[rank] for rank in self._peers})
        return gathered

    def set_timeout(self, timeout_s: float) -> None:
        """Set the time limit of every later message, in seconds."""
        self._timeout_s = timeout_s
        for peer in self._peers.values():
            peer.set_timeout(timeout_s)

    def close(self) -> None:
        """Close the connections to all other ranks, which notice this at once."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def _swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send a contiguous tensor to every other rank, and receive one from each. Raises RankLost."""
        sent = {rank: _bytes_of(tensor) for rank, tensor in outgoing.items()}
        received = {rank: _bytes_of(tensor) for rank, tensor in incoming.items()}
        is_small = max((len(message) for message in (*sent.values(), *received.values())), default=0) <= MAX_SMALL_BYTES
        try:
            if is_small:
                self._swap_small(sent, received)
            else:
                self._swap_large(sent, received)
        except OSError as error:
            raise RankLost(f"a rank has ended, or sent too late: {error}") from error

    def _swap_small(self, sent: Mapping[int, memoryview], received: Mapping[int, memoryview]) -> None:
        for rank, peer in self._peers.items():
            peer.send(sent[rank])
        for rank, peer in self._peers.items():
            peer.receive_into(received[rank])

    def _swap_large(self, sent: dict[int, memoryview], received: dict[int, memoryview]) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            # A descriptor does not report bytes that TLS has already decrypted: first try, then wait.
            moving = set(self._peers)
            while moving:
                for rank in moving:
                    self._move(rank, sent, received)
                    self._watch(selector, rank, sent, received)
                if not selector.get_map():
                    return
                moving = {key.data for key, _ in selector.select(max(0.0, deadline_s - time.monotonic()))}
        raise RankLost(f"a rank did not move a tensor within {self._timeout_s:g} s")

    def _move(self, rank: int, sent: dict[int, memoryview], received: dict[int, memoryview]) -> None:
        """Send to and receive from one rank the bytes that can be moved without waiting."""
        peer = self._peers[rank]
        while sent[rank] and (num_bytes := peer.try_send(sent[rank])):
            sent[rank] = sent[rank][num_bytes:]
        while received[rank] and (num_bytes := peer.try_receive_into(received[rank])):
            received[rank] = received[rank][num_bytes:]

    def _watch(
        self,
        selector: selectors.BaseSelector,
        rank: int,
        sent: Mapping[int, memoryview],
        received: Mapping[int, memoryview],
    ) -> None:
        """Wait for what is still to be moved between this rank and that one, and for nothing more."""
        peer = self._peers[rank]
        events = (selectors.EVENT_WRITE if sent[rank] else 0) | (selectors.EVENT_READ if received[rank] else 0)
        watched = selector.get_map().get(peer)
        if watched is not None and watched.events == events:
            return
        if watched is not None:
            selector.unregister(peer)
        if events:
            selector.register(peer, events, rank)

    def _meet_at_rank_0(self, server: socket.socket) -> None:
        """On rank 0, accept the other ranks' connections, then send each rank the addresses of the others."""
        addresses: dict[int, RankAddress] = {}
        deadline_s = time.monotonic() + self._timeout_s
        with RankCallers(server, self._rank, self._trust) as callers:
            for rank, connection in callers.take(set(range(1, self._size)), deadline_s):
                self._peers[rank] = as_peer(connection, self._timeout_s)
                addresses[rank] = decode_address(_receive_message(self._peers[rank]))
        for peer in self._peers.values():
            _send_message(peer, msgspec.msgpack.encode(addresses))

    def _meet(self, rank_0: tuple[str, int], host: str) -> None:
        """On other ranks, connect to rank 0 and every lower rank, then accept the connections of every higher rank."""
        deadline_s = time.monotonic() + self._timeout_s
        with open_server(host) as server, RankCallers(server, self._rank, self._trust) as callers:
            first = self._call(0, rank_0, deadline_s)
            _send_message(first, msgspec.msgpack.encode((host, server.getsockname()[1])))
            for rank, address in decode_addresses(_receive_message(first)).items():
                if rank < self._rank:
                    self._call(rank, address, deadline_s)
            for rank, connection in callers.take(set(range(self._rank + 1, self._size)), deadline_s):
                self._peers[rank] = as_peer(connection, self._timeout_s)

    def _call(self, rank: int, address: tuple[str, int], deadline_s: float) -> RankPeer:
        """Connect to a lower rank until it answers and authenticates. Raises OSError or Untrusted at the deadline."""
        while True:
            peer = socket.socket()
            _widen(peer)
            try:
                peer.settimeout(max(0.001, deadline_s - time.monotonic()))
                peer.connect(address)
                proven = call_rank(peer, self._rank, rank, self._trust, deadline_s)
            except (OSError, Untrusted):
                peer.close()
                if not wait_to_call_again(deadline_s):
                    raise
                continue
            self._peers[rank] = as_peer(proven, self._timeout_s)
            return self._peers[rank]


def open_server(host: str) -> socket.socket:
    """Open a socket on a free port of host that other ranks connect to."""
    server = socket.socket()
    _widen(server)
    server.bind((host, 0))
    server.listen(BACKLOG)
    return server


def _send_message(peer: RankPeer, message: bytes) -> None:
    peer.send(struct.pack("!I", len(message)) + message)


def _receive_message(peer: RankPeer) -> bytes:
    (length,) = struct.unpack("!I", _receive_exactly(peer, 4))
    if length > _MAX_MESSAGE_BYTES:
        raise ValueError(f"a rank sent a message of {length} bytes, more than {_MAX_MESSAGE_BYTES}")
    return _receive_exactly(peer, length)


def _receive_exactly(peer: RankPeer, num_bytes: int) -> bytes:
    message = bytearray(num_bytes)
    peer.receive_into(memoryview(message))
    return bytes(message)


def _add_up(parts: list[Tensor]) -> Tensor:
    """Add tensors up in the order of the list, so that every rank gets the same bits."""
    total, *others = parts
    for other in others:
        total = total + other
    return total


def _slices(tensor: Tensor, count: int) -> list[Tensor]:
    """Cut a contiguous tensor into count flat views, the last ones shorter or empty."""
    flat = tensor.view(-1)
    share = -(-len(flat) // count)
    return [flat[index * share : (index + 1) * share] for index in range(count)]


def _widen(peer: socket.socket) -> None:
    """Enlarge a socket's buffers, before it connects or listens: the TCP window scale is fixed then."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        peer.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
