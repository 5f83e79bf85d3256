"""Fetches: an engine asks, in its READY, for something in another engine's memory. No request runs there for it."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.message_ranges import Count, PositiveCount, ShortBytes, WireName
from kv_transfer.params import EngineAddress

MAX_BLOCK_HASHES: Final = 2**17
"""The most block hashes in one READY: enough for a prompt of two million tokens in blocks of 16."""


class PrefixFetch(msgspec.Struct, frozen=True, tag="prefix"):
    """A fetch of cached blocks. The peer sends as many of them, from the first one on, as its prefix cache has.

    fetch_id:     the same for all parts of the fetch; each part has a transfer id of its own
    block_hashes: of the wanted blocks, in the order of the prompt
    """

    fetch_id: WireName
    block_hashes: Annotated[tuple[ShortBytes, ...], Meta(max_length=MAX_BLOCK_HASHES)]


class BytesFetch(msgspec.Struct, frozen=True, tag="bytes"):
    """A fetch of the bytes that the peer has under a name, for example an image's embeddings under the image's hash.

    fetch_id: the same for all parts of the fetch
    """

    fetch_id: WireName
    name: WireName


Fetch: TypeAlias = PrefixFetch | BytesFetch


class WantedFetch(msgspec.Struct, frozen=True):
    """Worker -> scheduler: another engine fetches something that this engine may have.

    This engine answers as a producer without a request; the producer's ticket has the fetch's id, and this attempt and
    peer.

    num_ranks: how many ranks of this engine report the same fetch, each once
    """

    attempt: Count
    peer: EngineAddress
    fetch: Fetch
    num_ranks: PositiveCount = 1

    @property
    def answer_key(self) -> TransferKey:
        """The key of the transfer that answers this fetch."""
        is_prefix = isinstance(self.fetch, PrefixFetch)
        return TransferKey(TransferKind.PREFIX_ANSWER if is_prefix else TransferKind.BYTES_ANSWER, self.fetch.fetch_id)
