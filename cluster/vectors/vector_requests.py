"""Defines the requests and results of Serving.embed(), classify() and score(), the same for gRPC and HTTP.

Nothing here is validated: vector_processing.py does that, and names the fields as they are named here. A prompt that
the client left out is None.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.access.caller import Caller, current_caller
from cluster.access.trace_context import TraceContext, current_trace_context
from cluster.parameters.generation import Prompt, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorRequest:
    """The fields that all requests for vectors have.

    model:         the served model's name or "", or the name of a LoRA adapter, which is then applied to the model
    model_version: the version of the model whose vectors the client wants, since vectors of two versions cannot be
                   compared; 0: any
    truncate_prompt_tokens: cut each input to this many tokens, at its end but before the tokenizer's closing special
                   tokens; of a pair the longer part is cut. WHATEVER_FITS: cut to the context; None: cut nothing, and
                   refuse an input that is longer than the context
    timeout_s:     how many seconds the client will wait from now on; None: as long as it takes
    caller:        the client; its limits apply, and its requests may share cached blocks
    trace:         the client's span to which the request's trace belongs; None if the client has none
    """

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    model: str = ""
    priority: int = 0
    model_version: int = 0
    cache_salt: str = ""
    truncate_prompt_tokens: int | None = None
    timeout_s: float | None = None
    caller: Caller = field(default_factory=current_caller)
    trace: TraceContext | None = field(default_factory=current_trace_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest(VectorRequest):
    """Asks for an embedding of each input.

    pooling:    "last", "mean" or "cls"; None: the checkpoint's own
    normalize:  whether vectors are scaled to length 1; None: as the checkpoint says
    dimensions: how many of a vector's first numbers are kept, before it is normalized; None: all
    """

    inputs: Sequence[Prompt | None]
    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyRequest(VectorRequest):
    """Asks for the scores of the model's classes for each input.

    activate: whether the scores are probabilities; False: they are the classification head's logits
    """

    inputs: Sequence[Prompt | None]
    activate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest(VectorRequest):
    """Asks how well each document answers the query.

    A model with a classification head of one class reads the query and a document together, and the head's output is
    the score. For a model that gives embeddings the score is the cosine of the two embeddings.
    activate: whether the head's activation is applied; False: the score is the head's logit
    """

    query: Prompt | None
    documents: Sequence[Prompt | None]
    activate: bool = True


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """The answer to an EmbedRequest.

    embeddings: one for each input, in the inputs' order
    usage:      the tokens of all inputs together; there are no output tokens
    """

    embeddings: list[list[float]]
    usage: Usage
    model_version: int


@dataclass(frozen=True, slots=True)
class ClassifyResult:
    """The answer to a ClassifyRequest.

    scores: for each input, in the inputs' order, a score for each label, in the labels' order
    labels: the names of the model's classes
    usage:  the tokens of all inputs together; there are no output tokens
    """

    scores: list[list[float]]
    labels: tuple[str, ...]
    usage: Usage
    model_version: int


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """The answer to a ScoreRequest.

    scores: one for each document, in the documents' order
    usage:  the tokens of all prompts together; there are no output tokens
    """

    scores: list[float]
    usage: Usage
    model_version: int
