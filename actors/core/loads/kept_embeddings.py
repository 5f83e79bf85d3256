"""Embeddings that an engine has encoded for others, or fetched from others, by the hash of the image.

They are kept for those who fetch them, now or later, and for the image's next request: the next turn of a chat shows it
again.
"""

from __future__ import annotations

import threading
from typing import Final

from actors.core.requests.multimodal import PackedArray
from actors.process.sized_cache import SizedCache

_MAX_BYTES: Final = 256 << 20


class KeptEmbeddings:
    """Bounded; what was not used for longest goes first. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: SizedCache[str, PackedArray] = SizedCache(_MAX_BYTES)

    def get(self, mm_hash: str) -> PackedArray | None:
        """An image's embeddings, [num_embeds, hidden_size]."""
        with self._lock:
            return self._made.get(mm_hash)

    def put(self, mm_hash: str, embeddings: PackedArray) -> None:
        """Keep an image's embeddings."""
        with self._lock:
            self._made.put(mm_hash, embeddings, len(embeddings.data))
