"""The ranks of one engine that share a model, and the tensors that they exchange during a forward pass.

Tensors move on CPUs over sockets of our own (mesh.py), on GPUs by NCCL, without torch.distributed's default group or
environment variables: one process may hold ranks of several engines. Every operation has a deadline, and a rank that
dies is noticed by the others (sockets: at once; NCCL: after the deadline), so a forward either ends on all ranks or
fails on all of them.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from actors.model.errors import RankLost
from actors.model.tensor_parallel.mesh import SocketMesh, open_server
from actors.model.tensor_parallel.rank_calls import RankTrust
from kv_transfer.device_kind import is_accelerator


class Collectives(Protocol):
    """How tensors are moved between ranks. All operations raise RankLost."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See TensorParallelGroup."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See TensorParallelGroup."""

    def set_timeout(self, timeout_s: float) -> None:
        """Set the deadline of every later operation."""

    def close(self) -> None:
        """Close the connections to the other ranks."""


class TensorParallelGroup:
    """One rank's end of the group. Operations are collective: every rank calls the same ones in the same order."""

    def __init__(self, rank: int, size: int, device: torch.device, collectives: Collectives) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._collectives = collectives

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks of contiguous tensors, the same bits on every rank. Raises RankLost.

        The tensor itself may be overwritten.
        """
        return self._collectives.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's contiguous tensor, [size, *tensor.shape], in the order of ranks. Raises RankLost."""
        return self._collectives.all_gather(tensor)

    def smallest(self, number: int) -> int:
        """Return the smallest of all ranks' numbers. Raises RankLost."""
        return int(self.all_gather(torch.tensor([number], device=self._device)).min())

    def set_timeout(self, timeout_s: float) -> None:
        """Set the deadline of every later operation."""
        self._collectives.set_timeout(timeout_s)

    def close(self) -> None:
        """Leave the group; the other ranks' operations fail from then on."""
        self._collectives.close()


class NcclCollectives:
    """NCCL through a process group made directly. Its own watchdog ends the process after an operation's deadline."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        """Meet the other ranks. timeout_s: for each operation. Raises RankLost."""
        from torch.distributed import ProcessGroupNCCL  # Only builds of torch with CUDA have this class.

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._size = size
        self._store = store
        try:
            # torch's stubs lack the methods of this class
            self._group: Any = ProcessGroupNCCL(store, rank, size, options)
        except RuntimeError as error:
            raise RankLost(
                f"rank {rank} of {size} did not connect to the other ranks: {str(error).splitlines()[0]}"
            ) from error

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum in place. Raises RankLost."""
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise RankLost(f"an all-reduce failed: {str(error).splitlines()[0]}") from error
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """See Collectives."""
        gathered = tensor.new_empty((self._size, *tensor.shape))
        try:
            self._group._allgather_base(gathered.view(-1), tensor.view(-1)).wait()
        except RuntimeError as error:
            raise RankLost(f"an all-gather failed: {str(error).splitlines()[0]}") from error
        return gathered

    def set_timeout(self, timeout_s: float) -> None:
        """Set the deadline of every later operation."""
        self._group._set_default_timeout(timedelta(seconds=timeout_s))

    def close(self) -> None:
        """Abort instead of waiting for peers, which may be gone."""
        self._group.abort()


class Rendezvous:
    """The address where ranks find each other. Rank 0 keeps it open until all have joined; the others connect to it."""

    def __init__(self, host: str, device: torch.device, timeout_s: float) -> None:
        """Listen on a free port of host."""
        self.server: socket.socket | None = None
        self.store: TCPStore | None = None
        if is_accelerator(device):
            timeout = timedelta(seconds=timeout_s)
            self.store = TCPStore(host, 0, None, is_master=True, timeout=timeout, wait_for_workers=False)
            self.address = (host, int(self.store.port))
        else:
            self.server = open_server(host)
            self.address = (host, int(self.server.getsockname()[1]))

    def close(self) -> None:
        """Close the address, once all ranks have joined or the start has failed."""
        if self.server is not None:
            self.server.close()
        self.store = None


def join_group(
    rendezvous: Rendezvous | tuple[str, int],
    rank: int,
    size: int,
    *,
    device: torch.device,
    host: str,
    timeout_s: float,
    trust: RankTrust,
) -> TensorParallelGroup:
    """Meet the other ranks; blocks until all are there.

    rendezvous: on rank 0 its own Rendezvous, on the other ranks the address of rank 0 (host, port)
    host: this rank's own address, as the others reach it; timeout_s: for this and for every later operation
    trust: what ranks on CPUs prove to each other; the store where ranks with GPUs meet has no proof (docs/security.md)
    Raises RankLost if the other ranks do not come in time.
    """
    collectives: Collectives
    if is_accelerator(device):
        collectives = NcclCollectives(_store_of(rendezvous, timeout_s), rank, size, timeout_s)
    else:
        meeting = rendezvous.server if isinstance(rendezvous, Rendezvous) else rendezvous
        assert meeting is not None, "a rendezvous is for one kind of device"
        collectives = SocketMesh(meeting, rank, size, host=host, timeout_s=timeout_s, trust=trust)
    return TensorParallelGroup(rank, size, device, collectives)


def _store_of(rendezvous: Rendezvous | tuple[str, int], timeout_s: float) -> TCPStore:
    if isinstance(rendezvous, Rendezvous):
        assert rendezvous.store is not None, "a rendezvous is for one kind of device"
        return rendezvous.store
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(*rendezvous, None, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise RankLost(f"the rendezvous of the ranks cannot be reached: {str(error).splitlines()[0]}") from error
