"""What a door asks of Serving.embed(), classify() and score(), and what it gets: the same for gRPC and HTTP.

Nothing here is validated: processing.py does that, and names the fields as they are named here. A prompt that the
client left out is None.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.access.caller import Caller, current_caller
from cluster.parameters.generation import Prompt, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorRequest:
    """What all of them have.

    model:         "" asks for the one that is served; the name of a LoRA adapter for that model with it
    model_version: only this one's vectors are wanted (those of two cannot be compared); 0: whichever serves
    truncate_prompt_tokens: leave out what is more than so many tokens of an input, at its end but for the tokenizer's
                   own special tokens, of a pair the longer one's; WHATEVER_FITS: more than the context; None: refuse it
    timeout_s:     how long the client will wait from now on, or None
    caller:        whose limits it counts against, and whose prompts it may share cached blocks with
    """

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    model: str = ""
    priority: int = 0
    model_version: int = 0
    cache_salt: str = ""
    truncate_prompt_tokens: int | None = None
    timeout_s: float | None = None
    caller: Caller = field(default_factory=current_caller)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest(VectorRequest):
    """A vector for each input.

    pooling:    "last", "mean" or "cls"; None: as the checkpoint was made for
    normalize:  to length 1; None: as the checkpoint was made for
    dimensions: keep so many of a vector's first numbers (before it is normalized); None: all
    """

    inputs: Sequence[Prompt | None]
    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyRequest(VectorRequest):
    """Scores of the model's classes for each input. activate: False for the head's logits"""

    inputs: Sequence[Prompt | None]
    activate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(VectorRequest):
    """How well each document answers the query.

    With a classification head of one class that is what it says of the pair; with embeddings their cosine.
    activate: False for the head's logit
    """

    query: Prompt | None
    documents: Sequence[Prompt | None]
    activate: bool = True


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """embeddings: one for each input, in their order. usage: of all of it; it has no output tokens"""

    embeddings: list[list[float]]
    usage: Usage
    model_version: int


@dataclass(frozen=True, slots=True)
class ClassifyResult:
    """scores: for each input, one for each of labels, in their order"""

    scores: list[list[float]]
    labels: tuple[str, ...]
    usage: Usage
    model_version: int


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """scores: one for each document, in their order"""

    scores: list[float]
    usage: Usage
    model_version: int
