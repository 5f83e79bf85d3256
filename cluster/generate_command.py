"""`raypd generate`: stream one answer to the terminal."""

from __future__ import annotations

import sys
from typing import Any

from cluster.client import GenerateClient


async def stream_answer(addresses: str, prompt: str, sampling: dict[str, Any], *, chat: bool) -> None:
    """Print the answer as it comes. addresses: host:port each, with commas between them. Raises ClusterError."""
    async with GenerateClient(addresses) as client:
        question: Any = [("user", prompt)] if chat else prompt
        async for response in client.generate(question, **sampling):
            sys.stdout.write(response.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
