"""`raypd embed`: vectors of texts, for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from cluster.client import BlockingClient
from cluster.client.vector_options import EmbedOptions


def print_embeddings(client: BlockingClient, texts: Sequence[str], options: EmbedOptions) -> None:
    """Print a line of JSON for each text, a list of its embedding's numbers. Raises ClusterError."""
    for embedding in client.embed(texts, **options).embeddings:
        # As short as a float32 can be said.
        numbers = [float(f"{value:.9g}") for value in embedding.values]
        sys.stdout.write(json.dumps(numbers) + "\n")
