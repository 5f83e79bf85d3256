"""Fetches: an engine says in its READY that it wants something in another one's memory, without a request there."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.params import EngineAddress
from kv_transfer.ranges import Count, PositiveCount, ShortBytes, WireName

MAX_BLOCK_HASHES: Final = 2**17
"""The most in one READY: a prompt of two million tokens in blocks of 16."""


class PrefixFetch(msgspec.Struct, frozen=True, tag="prefix"):
    """These blocks, or as many of them, from the first one on, as the peer has in its prefix cache.

    fetch_id: the same for all parts of the fetch, each of which has a transfer id of its own
    """

    fetch_id: WireName
    block_hashes: Annotated[tuple[ShortBytes, ...], Meta(max_length=MAX_BLOCK_HASHES)]


class BytesFetch(msgspec.Struct, frozen=True, tag="bytes"):
    """The bytes that the peer has under a name, for example the embeddings of an image under the image's hash."""

    fetch_id: WireName
    name: WireName


Fetch: TypeAlias = PrefixFetch | BytesFetch


class WantedFetch(msgspec.Struct, frozen=True):
    """Worker -> scheduler: another engine fetches something that this one may have.

    The answer is a producer without a request, whose ticket has this transfer id, attempt and peer.
    num_ranks: so many ranks of this engine hear of it, each from those of its peers that want something of it
    """

    transfer_id: WireName
    attempt: Count
    peer: EngineAddress
    fetch: Fetch
    num_ranks: PositiveCount = 1

    @property
    def answer_key(self) -> TransferKey:
        """The key of the transfer that answers it."""
        is_prefix = isinstance(self.fetch, PrefixFetch)
        return TransferKey(TransferKind.PREFIX_ANSWER if is_prefix else TransferKind.BYTES_ANSWER, self.transfer_id)
