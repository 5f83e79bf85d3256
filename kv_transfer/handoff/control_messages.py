"""What two engines say to each other on a link's control stream.

The consumer dials and speaks first: Hello, answered by Welcome or Refused. From then on the consumer says Ready and
Cancel, the producer says Chunk, ChunkSum and Finished, each about one transfer and one attempt. The stream is ordered,
and so are the bytes on the data link: the k-th Chunk is the k-th run of bytes. Either end may Ping, and is answered.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kv_transfer.connector.fetches import Fetch
from kv_transfer.connector.steps import ProducerEnd
from kv_transfer.layout import KVCacheLayout
from kv_transfer.ranges import Count, Digest64, Incarnation, Sentence, ShortBytes, TokenId, WireName, Word

PROTOCOL_VERSION: Final = 6


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Consumer: who I am, whom I mean, and what a block is to me."""

    protocol_version: Count
    engine_id: WireName
    incarnation: Incarnation
    peer_engine_id: WireName
    peer_incarnation: Incarnation
    transport: Word
    layout: KVCacheLayout
    checksum: bool = False
    is_on_gpu: bool = False
    """What a later version adds has a default: an earlier one's Hello must be read to be refused."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Producer: we agree, and this is what a block is to me.

    rendezvous: where the data link is to be opened, in the transport's own words
    """

    rendezvous: Sentence
    layout: KVCacheLayout


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Producer: we do not agree, and on what."""

    reason: Sentence


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Consumer: blocks are reserved; send those from first_block on (0 is the prompt's first).

    first_block counts the consumer's own blocks; chunks count pieces, see layout.py.
    fetch: no request of the producer's is meant, but something in its memory
    content_hash: of what the consumer's request is; a handoff of anything else is refused. Empty: not compared
    """

    transfer_id: WireName
    attempt: Count
    first_block: Count
    num_prompt_tokens: Count
    fetch: Fetch | None = None
    content_hash: ShortBytes = b""


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """Producer: the next bytes on the data link are these blocks, or pieces where block sizes differ."""

    transfer_id: WireName
    attempt: Count
    first_block: Count
    num_blocks: Count


class ChunkSum(msgspec.Struct, frozen=True, tag="chunk_sum"):
    """Producer, with checksums on: the xxh3_64 of a chunk's bytes, once they have left. index: in its transfer."""

    transfer_id: WireName
    attempt: Count
    index: Count
    checksum: Digest64


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Producer: it is over with num_chunks in all, those included that are yet to be announced.

    first_token_id is set iff end is HANDED_OVER. Said again, with fewer chunks, if the consumer cancels before all of
    them are announced.
    """

    transfer_id: WireName
    attempt: Count
    end: ProducerEnd
    num_chunks: Count
    first_token_id: TokenId | None
    reason: Sentence


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Consumer: announce nothing more. What was announced is still received; the answer is Finished, unless it was
    said and nothing of what it promised is left to announce.
    """

    transfer_id: WireName
    attempt: Count


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Either end of an open link, when it has heard nothing for a while: are you there?"""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer, at once."""


ControlMessage = Hello | Welcome | Refused | Ready | Chunk | ChunkSum | Finished | Cancel | Ping | Pong

encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder(ControlMessage).decode
