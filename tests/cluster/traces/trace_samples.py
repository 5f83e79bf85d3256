"""Traces for tests, in every form."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster.traces.request_trace import BlockHashes, TraceHeader, TraceLine, encode_line

MOONCAKE = """{"timestamp": 0, "input_length": 6, "output_length": 3}
{"timestamp": 3000, "input_length": 700, "output_length": 500, "hash_ids": [0, 14]}

{"timestamp": 4500, "input_length": 20, "output_length": 0}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799600,110,27"""
HEADER = TraceHeader(began_at_s=1.7e9, ingress="ingress-0", part=1, block_hashes=BlockHashes.PER_FILE)


def trace_file(folder: Path, content: str | bytes) -> Path:
    """Write a trace."""
    path = folder / "trace"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def line(number: int, arrival_s: float, **fields: Any) -> TraceLine:
    """Make a request of raypd's form with a prompt of 600 tokens."""
    given: dict[str, Any] = {
        "request_id": f"r-{number}",
        "outcome": "stop",
        "num_prompt_tokens": 600,
        "num_output_tokens": 5,
    }
    return TraceLine(number=number, arrival_s=arrival_s, **(given | fields))


def own_form(lines: Iterable[TraceLine], header: TraceHeader = HEADER) -> bytes:
    """Return a file of raypd's form."""
    return encode_line(header) + b"".join(map(encode_line, lines))
