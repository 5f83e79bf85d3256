"""Count how much of a trace's input a router's prefix index sees as cached.

Each request of the trace is looked up in the index, and then added to it for one engine of the pool, in turns, without
any engine: what the index sees is what its size lets it see. "There" is an index without a bound. Blocks have 16
tokens. The trace is in Mooncake's form, whose hash_ids stand for 512 tokens each.

    python -m benchmarks.prefix_hits conversation_trace.jsonl
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from actors.core.requests.block_hash import BlockHash
from cluster.bench.traces import read_trace
from cluster.routing.prefixes.prefix_index import DEFAULT_BYTES, PrefixIndex
from cluster.traces.trace_request import BLOCK_TOKENS

_BLOCK_SIZE = 16
_ENGINE_BLOCKS = 33_000
"""The KV cache of an 8B model beside its weights on a GPU of 96 GB."""
_UNBOUNDED = 1 << 34


def hit_share(requests: list[list[BlockHash]], index: PrefixIndex, num_engines: int) -> float:
    """Return the part of all blocks that the index knew when their request came, at any engine."""
    num_hits = num_blocks = 0
    for number, hashes in enumerate(requests):
        num_hits += max(index.find(hashes).values(), default=0)
        num_blocks += len(hashes)
        index.add([(f"engine-{number % num_engines}", 1)], hashes)
    return num_hits / num_blocks


def index_for(num_engines: int, num_engine_blocks: int, max_bytes: int) -> PrefixIndex:
    """Return an empty index for a pool of such engines."""
    index = PrefixIndex(max_bytes)
    for number in range(num_engines):
        index.note_engine((f"engine-{number}", 1), num_engine_blocks)
    return index


def main(
    trace: Annotated[Path, typer.Argument(help="Trace in Mooncake's form.")],
    num_requests: Annotated[int | None, typer.Option(help="Number of requests to read; default: all.")] = None,
) -> None:
    """Print the part of the input that is seen as cached, for indexes of several sizes."""
    requests = [_hashes(planned.num_input_tokens, planned.blocks) for planned in read_trace(trace, num_requests)]
    pools = [
        ("200 000 blocks", index_for(1, 160_000, DEFAULT_BYTES), 1),
        ("8 engines", index_for(8, _ENGINE_BLOCKS, DEFAULT_BYTES), 8),
        ("64 engines", index_for(64, _ENGINE_BLOCKS, DEFAULT_BYTES), 64),
        ("64 engines, 32 MiB", index_for(64, _ENGINE_BLOCKS, 32 << 20), 64),
        ("there", index_for(64, 1 << 20, _UNBOUNDED), 1),
    ]
    table = Table("index", "hits, % of input", "blocks known", "MiB", "every k-th block")
    for name, index, num_engines in pools:
        share = hit_share(requests, index, num_engines)
        size = index.size
        table.add_row(name, f"{share:.1%}", str(size.num_blocks), f"{size.size_bytes / 2**20:.0f}", str(size.stride))
    Console().print(table)


def _hashes(num_tokens: int, ids: tuple[int, ...]) -> list[BlockHash]:
    per_id = BLOCK_TOKENS // _BLOCK_SIZE
    hashes = (blake2b(b"%d %d" % (number, part), digest_size=16).digest() for number in ids for part in range(per_id))
    return list(islice(hashes, num_tokens // _BLOCK_SIZE))


if __name__ == "__main__":
    typer.run(main)
