"""The gloo transport: torch.distributed's ProcessGroupGloo, one two-rank group per link, made directly.

No default group and no environment variable is involved. A group of its own per link matters: a timeout closes every
pair of its group, and so takes only this link with it. Blocks travel as bytes, one message each, straight out of and
into the cache; many are in flight at once, told apart by their tags, which both ends count alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import ProcessGroupGloo

from kv_transfer.errors import ChunkTimeout, LinkLost
from kv_transfer.transports.base import ComputeEvent

logger = logging.getLogger(__name__)

_PRODUCER_RANK: Final = 0
_CONSUMER_RANK: Final = 1
_NUM_TAGS: Final = 2**30
_ABORT_TAG: Final = _NUM_TAGS
_ABORT_TIMEOUT: Final = timedelta(milliseconds=1)
_MIN_WAIT_S: Final = 0.001
"""Zero would mean "no timeout" to torch."""


class GlooLink:
    """One end of a link. timeout_s of a call bounds all its messages together."""

    def __init__(
        self, group: Any, store: TCPStore, peer_rank: int
    ) -> None:  # ProcessGroupGloo's stubs lack its methods
        self._group = group
        self._store: TCPStore | None = store
        self._peer_rank = peer_rank
        self._next_tag = 0
        self._is_aborted = False

    def send(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Post all blocks, then wait for them."""
        del after  # The CPU computes in order.
        self._exchange("send", blocks, timeout_s)

    def receive(self, blocks: Sequence[Tensor], timeout_s: float, after: ComputeEvent | None = None) -> None:
        """Post all receives, then wait for them."""
        del after
        self._exchange("recv", blocks, timeout_s)

    def abort(self) -> None:
        """Wake whoever waits on this link, at both ends.

        ProcessGroupGloo.abort() does not wake a pending wait (torch 2.13); a timeout does, as it closes every pair of
        the group. So one is provoked, by a receive that nobody will ever answer.
        """
        self._is_aborted = True
        group = self._group
        if group is None:
            return
        try:
            group.recv([torch.empty(1, dtype=torch.uint8)], self._peer_rank, _ABORT_TAG).wait(_ABORT_TIMEOUT)
        except RuntimeError:
            logger.debug("a link was aborted")

    def close(self) -> None:
        """Drop the group, which closes its connections; the peer hears of it at once."""
        self._is_aborted = True
        self._group = self._store = None

    def _exchange(self, operation: str, blocks: Sequence[Tensor], timeout_s: float) -> None:
        if self._is_aborted:
            raise LinkLost("the link was closed")
        post = getattr(self._group, operation)
        deadline_s = time.monotonic() + timeout_s
        views = [block.view(-1).view(torch.uint8) for block in blocks]
        try:
            # The views stay alive until every operation is over.
            for work in [post([view], self._peer_rank, self._take_tag()) for view in views]:
                work.wait(timedelta(seconds=max(_MIN_WAIT_S, deadline_s - time.monotonic())))
        except RuntimeError as error:
            text = str(error).splitlines()[0]
            if "timeout" in text.lower() or "timed out" in text.lower():
                raise ChunkTimeout(f"a chunk did not move within {timeout_s:g} s: {text}") from error
            raise LinkLost(text) from error

    def _take_tag(self) -> int:
        tag = self._next_tag
        self._next_tag = (tag + 1) % _NUM_TAGS
        return tag


class _PendingGlooLink:
    def __init__(self, host: str, timeout_s: float) -> None:
        self._host = host
        self._store = TCPStore(host, 0, 2, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
        self.rendezvous = f"{host}:{self._store.port}"

    def accept(self, timeout_s: float) -> GlooLink:
        return _join(self._host, self._store, _PRODUCER_RANK, timeout_s)


class GlooTransport:
    """A Transport over TCP. host: this end's own address, as its peers reach it."""

    name = "gloo"

    def __init__(self, host: str, connect_timeout_s: float) -> None:
        self._host = host
        self._connect_timeout_s = connect_timeout_s

    def listen(self) -> _PendingGlooLink:
        """Open a store for the rendezvous."""
        try:
            return _PendingGlooLink(self._host, self._connect_timeout_s)
        except RuntimeError as error:
            raise LinkLost(f"no rendezvous can be opened at {self._host}: {error}") from error

    def connect(self, rendezvous: str, timeout_s: float) -> GlooLink:
        """Join the producer's store, then its group."""
        host, _, port = rendezvous.rpartition(":")
        try:
            store = TCPStore(
                host, int(port), 2, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            )
        except RuntimeError as error:
            raise LinkLost(f"no rendezvous at {rendezvous}: {error}") from error
        return _join(self._host, store, _CONSUMER_RANK, timeout_s)


def _join(host: str, store: TCPStore, rank: int, timeout_s: float) -> GlooLink:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    try:
        group = ProcessGroupGloo(PrefixStore("link", store), rank, 2, options)
    except RuntimeError as error:
        raise LinkLost(f"the peer did not join the link: {str(error).splitlines()[0]}") from error
    return GlooLink(group, store, 1 - rank)
