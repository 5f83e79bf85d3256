"""Keeps embeddings that an engine has encoded for other engines, or fetched from them, by the image's hash.

Other engines fetch them from here. This engine uses them again when a later request has the same image, as the next
turn of a chat does.
"""

from __future__ import annotations

import threading
from typing import Final

from actors.core.requests.multimodal import PackedArray
from actors.process.sized_cache import SizedCache

_MAX_BYTES: Final = 256 << 20


class KeptEmbeddings:
    """Up to 256 MiB of embeddings; the least recently used are dropped first. Methods are safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: SizedCache[str, PackedArray] = SizedCache(_MAX_BYTES)

    def get(self, mm_hash: str) -> PackedArray | None:
        """Return an image's embeddings, [num_embeds, hidden_size], or None."""
        with self._lock:
            return self._made.get(mm_hash)

    def put(self, mm_hash: str, embeddings: PackedArray) -> None:
        """Keep an image's embeddings."""
        with self._lock:
            self._made.put(mm_hash, embeddings, len(embeddings.data))
