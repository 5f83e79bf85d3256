"""Defines the facts of a loaded model that an ingress needs for requests for vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.core.requests.sampling_params import Pooling

Activation = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFacts:
    """The facts that an ingress needs in order to accept a request for vectors.

    embedding_size:        how many numbers an embedding has; 0: the model gives no embeddings
    why_no_embeddings:     why the model gives no embeddings; "" if it gives them
    pooling, normalize:    the defaults for requests that do not set them
    matryoshka_dimensions: the sizes to which embeddings may be cut; empty: any size
    labels:                names of the classes of the model's classification head, in order; empty: it has no such head
    activation:            the function that turns the head's logits into scores
    """

    embedding_size: int = 0
    why_no_embeddings: str = ""
    pooling: Pooling = "last"
    normalize: bool = True
    matryoshka_dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    activation: Activation = "none"
