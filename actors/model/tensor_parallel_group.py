"""The ranks of one engine that share a model, and what they say to each other inside a forward.

The process group is made directly, without torch.distributed's default group or environment variables: one process may
hold ranks of several engines. A rank that dies is noticed by the others at once (gloo: closed connections; NCCL: the
timeout), and every operation has a deadline, so a forward either ends on all ranks or fails on all of them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroupGloo

from actors.model.errors import RankLost
from actors.model.tensor_parallel_mesh import MAX_MESSAGE_BYTES, SocketMesh


class TensorParallelGroup:
    """One rank's end of the group. Operations are collective: every rank calls the same ones in the same order."""

    def __init__(
        self, rank: int, size: int, device: torch.device, backend: Any, store: TCPStore | None, mesh: SocketMesh | None
    ) -> None:
        """backend: a torch process group, whose stubs lack its methods; store: kept alive as long as the group.

        mesh: for small tensors, on CPUs
        """
        self.rank = rank
        self.size = size
        self._device = device
        self._backend = backend
        self._mesh = mesh
        self._store = store

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on every rank; the tensor may be overwritten. Raises RankLost."""
        if self._mesh is not None and tensor.nbytes <= MAX_MESSAGE_BYTES:
            first, *others = self._mesh.exchange(tensor)
            for other in others:
                first = first + other
            return first
        try:
            self._backend.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise RankLost(f"an all-reduce failed: {str(error).splitlines()[0]}") from error
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[size, *tensor.shape]: every rank's contiguous tensor, by rank. Raises RankLost."""
        if self._mesh is not None and tensor.nbytes <= MAX_MESSAGE_BYTES:
            return torch.stack(self._mesh.exchange(tensor))
        gathered = tensor.new_empty((self.size, *tensor.shape))
        try:
            self._backend._allgather_base(gathered.view(-1), tensor.view(-1)).wait()
        except RuntimeError as error:
            raise RankLost(f"an all-gather failed: {str(error).splitlines()[0]}") from error
        return gathered

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers. Raises RankLost."""
        return int(self.all_gather(torch.tensor([number], device=self._device)).min())

    def set_timeout(self, timeout_s: float) -> None:
        """From now on, for every operation."""
        self._backend._set_default_timeout(timedelta(seconds=timeout_s))
        if self._mesh is not None:
            self._mesh.set_timeout(timeout_s)

    def close(self) -> None:
        """Drop the group, which closes its connections."""
        self._backend = self._store = None
        if self._mesh is not None:
            self._mesh.close()


def open_rendezvous(host: str, timeout_s: float) -> TCPStore:
    """Where ranks find each other, on a free port of host; whoever opens it keeps it until all have joined."""
    return TCPStore(host, 0, None, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join_group(
    rendezvous: tuple[str, int], rank: int, size: int, *, device: torch.device, host: str, timeout_s: float
) -> TensorParallelGroup:
    """Meet the other ranks; blocks until all are there. gloo on the CPU, NCCL on GPUs.

    rendezvous: host and port of a store that open_rendezvous() opened
    host: this rank's own address, as the others reach it; timeout_s: for this and for every later operation
    Raises RankLost if they do not come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    make = _make_nccl if device.type == "cuda" else _make_gloo
    try:
        store = TCPStore(*rendezvous, None, is_master=False, timeout=timeout, wait_for_workers=False)
        backend = make(PrefixStore("tensor-parallel", store), rank, size, host, timeout)
    except RuntimeError as error:
        raise RankLost(f"rank {rank} of {size} did not meet the others: {str(error).splitlines()[0]}") from error
    mesh = None
    if device.type == "cpu":
        mesh = SocketMesh(PrefixStore("mesh", store), rank, size, host, timeout_s)
    return TensorParallelGroup(rank, size, device, backend, store, mesh)


def _make_gloo(store: PrefixStore, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def _make_nccl(store: PrefixStore, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    del host  # NCCL finds its own way; NCCL_SOCKET_IFNAME guides it.
    from torch.distributed import ProcessGroupNCCL  # only in builds with CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, size, options)
