"""Small tensors between the ranks of an engine on CPUs: one socket for each pair, used by the forward's own thread.

gloo hands every collective from thread to thread, several times on each side. A decode step has two collectives a
layer, of a few KiB each, and where waking a thread takes long they cost more than the model (benchmarks/RESULTS.md).
Here every rank sends its part to every other, and all parts are added up in the order of the ranks, so the sum has the
same bits everywhere.

Invariant: a rank is at most one exchange ahead of any other, so at most two messages are on a socket; the kernel's
buffers hold both, and nobody blocks in sending.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from actors.model.errors import RankLost

MAX_MESSAGE_BYTES: Final = 64 * 1024
_BUFFER_BYTES: Final = 4 * MAX_MESSAGE_BYTES


class SocketMesh:
    """One rank's sockets to all others."""

    def __init__(self, store: Store, rank: int, size: int, host: str, timeout_s: float) -> None:
        """Connect every pair; blocks until all ranks do. host: this rank's own address. Raises RankLost."""
        self._rank = rank
        self._size = size
        self._sockets: dict[int, socket.socket] = {}
        try:
            self._connect(store, host, timeout_s)
        except (OSError, RuntimeError) as error:
            self.close()
            raise RankLost(f"rank {rank} of {size} did not meet the others: {error}") from error
        for peer in self._sockets.values():
            peer.setblocking(True)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_timeout(timeout_s)

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, by rank, of the same shape and at most MAX_MESSAGE_BYTES. Raises RankLost."""
        outgoing = _bytes_of(tensor)
        parts = [tensor if rank == self._rank else torch.empty_like(tensor) for rank in range(self._size)]
        try:
            for peer in self._sockets.values():
                peer.sendall(outgoing)
            for rank, peer in self._sockets.items():
                incoming = _bytes_of(parts[rank])
                # With MSG_WAITALL less than all means that the rank has hung up.
                if peer.recv_into(incoming, len(incoming), socket.MSG_WAITALL) < len(incoming):
                    raise RankLost(f"rank {rank} has hung up")
        except OSError as error:
            raise RankLost(f"a rank is gone, or too late: {error}") from error
        return parts

    def set_timeout(self, timeout_s: float) -> None:
        """From now on, for every exchange."""
        seconds, microseconds = divmod(int(timeout_s * 1e6), 1_000_000)
        for peer in self._sockets.values():
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, microseconds))

    def close(self) -> None:
        """Hang up on every rank; they notice at once."""
        for peer in self._sockets.values():
            peer.close()
        self._sockets = {}

    def _connect(self, store: Store, host: str, timeout_s: float) -> None:
        """Call every lower rank, then wait for every higher one."""
        with socket.socket() as server:
            _widen(server)
            server.bind((host, 0))
            server.listen(self._size)
            server.settimeout(timeout_s)
            store.set(str(self._rank), f"{host}:{server.getsockname()[1]}")
            for rank in range(self._rank):
                address, _, port = store.get(str(rank)).decode().rpartition(":")
                peer = self._sockets[rank] = socket.socket()
                _widen(peer)
                peer.settimeout(timeout_s)
                peer.connect((address, int(port)))
                peer.sendall(bytes([self._rank]))
            for _ in range(self._rank + 1, self._size):
                peer, _ = server.accept()
                peer.settimeout(timeout_s)
                self._sockets[peer.recv(1)[0]] = peer


def _widen(peer: socket.socket) -> None:
    """Before it connects: the window that it offers is fixed then."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        peer.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
