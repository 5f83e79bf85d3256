"""`raypd embed`: print embeddings as JSON, for other programs to read."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from cluster.client import BlockingClient
from cluster.client.vector_options import EmbedOptions


def print_embeddings(client: BlockingClient, texts: Sequence[str], options: EmbedOptions) -> None:
    """Print one line of JSON for each text: the list of numbers of its embedding. Raises ClusterError."""
    for embedding in client.embed(texts, **options).embeddings:
        # Nine significant digits are the fewest that give back every float32.
        numbers = [float(f"{value:.9g}") for value in embedding.values]
        sys.stdout.write(json.dumps(numbers) + "\n")
