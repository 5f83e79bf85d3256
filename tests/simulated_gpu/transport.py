"""The loopback transport on the simulated GPU: each end copies on a stream of its own, behind the event of its chunk.

The project's own loopback transport copies on the default stream, where the order needs no events. Between processes
NCCL moves chunks on side streams, and waits for their events; what comes too early there is noticed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, cast

from torch import Tensor

from kv_transfer.device_kind import StreamEvent, device_module
from kv_transfer.transports.base import ComputeEvent
from kv_transfer.transports.loopback import Pipe
from tests.simulated_gpu.block_order import Unordered
from tests.simulated_gpu.tensors import MixedDevices

FAULTS: Final[list[RuntimeError]] = []
"""The errors that threads of links have raised: such an error ends its link, after which engines recover."""


class SimulatedPipe(Pipe):
    """A data link between two caches on the device."""

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Gather the blocks on a side stream behind the event, and offer them; see DataLink."""
        with _behind(after, blocks):
            gathered = [block.clone() for block in blocks]
        super().send(gathered, timeout_s)

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Copy what is offered on a side stream behind the event; see DataLink."""
        with _behind(after, blocks):
            super().receive(blocks, timeout_s)


@contextmanager
def _behind(after: ComputeEvent | None, blocks: Sequence[Tensor]) -> Iterator[None]:
    module = device_module(blocks[0].device)
    stream = module.Stream(blocks[0].device)
    with module.stream(stream):
        if after is not None:
            stream.wait_event(cast(StreamEvent, after))  # the device's own
        try:
            yield
        except (MixedDevices, Unordered) as error:
            FAULTS.append(error)
            raise
