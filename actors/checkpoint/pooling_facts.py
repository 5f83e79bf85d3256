"""The facts of a loaded model that gives vectors in place of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.core.requests.sampling_params import Pooling

Activation = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFacts:
    """The facts that an ingress needs in order to accept a pooling request.

    embedding_size:        numbers of an embedding; 0: the model gives none
    why_no_embeddings:     if so
    pooling, normalize:    of a request that does not say
    matryoshka_dimensions: to which embeddings may be cut; empty: to any number
    labels:                names of the classification head's classes, in its order; empty: it has no such head
    activation:            makes scores of the head's logits
    """

    embedding_size: int = 0
    why_no_embeddings: str = ""
    pooling: Pooling = "last"
    normalize: bool = True
    matryoshka_dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    activation: Activation = "none"
