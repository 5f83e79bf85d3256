"""The messages of two engines on a link's control stream, in MessagePack.

The consumer dials and sends Hello, which the producer answers with Welcome or Refused. From then on the consumer sends
Ready and Cancel, the producer sends Chunk, ChunkSum and Finished, each about one transfer and one attempt. The stream
is ordered, and so are the bytes on the data link: the k-th Chunk announces the k-th run of bytes. Either end may send
Ping; the other end answers with Pong.

PROTOCOL_VERSION grows with each change that an older end would misread. An older end's Hello must still be read so that
it can be refused by number: a field that a later version adds to Hello has a default.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kv_transfer.connector.fetches import Fetch
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.layout import KVCacheLayout
from kv_transfer.message_ranges import Count, Digest64, Incarnation, Sentence, ShortBytes, TokenId, WireName, Word
from kv_transfer.params import TransferId

PROTOCOL_VERSION: Final = 8


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Consumer -> producer: the names of both ends, and the facts on which the two ends have to agree.

    engine_id, incarnation:           of the consumer
    peer_engine_id, peer_incarnation: of the producer that the consumer means to reach
    transport:                        as in KVTransferConfig.transport, but never auto
    layout:                           of the consumer's KV cache
    """

    protocol_version: Count
    engine_id: WireName
    incarnation: Incarnation
    peer_engine_id: WireName
    peer_incarnation: Incarnation
    transport: Word
    layout: KVCacheLayout
    checksum: bool = False
    is_on_gpu: bool = False


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Producer -> consumer: the two ends agree.

    rendezvous: where the data link is to be opened, in the transport's own form
    layout:     of the producer's KV cache
    """

    rendezvous: Sentence
    layout: KVCacheLayout


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Producer -> consumer: the two ends do not agree; the reason has both values of what differs."""

    reason: Sentence


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Consumer -> producer: blocks are reserved for the whole prompt; send KV from first_block on.

    first_block:  index in the prompt, in blocks of the consumer's size; chunks count pieces (layout.py)
    fetch:        asks for something in the producer's memory; None: for the KV of a request that the producer has
    content_hash: of the consumer's request; a handoff of another request's KV is refused. Empty: not compared
    """

    transfer_id: TransferId
    attempt: Count
    first_block: Count
    num_prompt_tokens: Count
    fetch: Fetch | None = None
    content_hash: ShortBytes = b""


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """Producer -> consumer: the next bytes on the data link are these blocks, or pieces where block sizes differ."""

    transfer_id: TransferId
    attempt: Count
    first_block: Count
    num_blocks: Count


class ChunkSum(msgspec.Struct, frozen=True, tag="chunk_sum"):
    """Producer -> consumer, if the link has checksums: the checksum of a chunk's bytes, sent once they have left.

    index:    of the chunk in its transfer
    checksum: xxh3_64 (links/checksum.py)
    """

    transfer_id: TransferId
    attempt: Count
    index: Count
    checksum: Digest64


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Producer -> consumer: the transfer's last chunk is queued.

    Sent a second time, with fewer chunks, if the consumer cancels before all of them are announced.

    num_chunks:     of the whole transfer, those included that are yet to be announced
    first_token_id: token 0, set iff end is HANDED_OVER
    reason:         why the producer gave the request up; empty otherwise
    """

    transfer_id: TransferId
    attempt: Count
    end: ProducerEnd
    num_chunks: Count
    first_token_id: TokenId | None
    reason: Sentence


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Consumer -> producer: announce nothing more for this transfer. What was announced is still received.

    The producer answers with Finished, unless it has sent Finished before and every chunk is announced already.
    """

    transfer_id: TransferId
    attempt: Count


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks whether the other end of an open link is still there, after a while without any message from it."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answers a Ping, at once."""


ControlMessage = Hello | Welcome | Refused | Ready | Chunk | ChunkSum | Finished | Cancel | Ping | Pong

encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder(ControlMessage).decode
