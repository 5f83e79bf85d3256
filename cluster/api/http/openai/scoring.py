"""The requests and answers of /classify, /score and /rerank, as in vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from msgspec import UNSET

from cluster.api.http.openai.answers import AnswerHead
from cluster.api.http.openai.completions import prompts_from
from cluster.api.http.openai.embeddings import envelope
from cluster.api.http.requests import ActivatedBody, ClassifyBody, RerankBody, ScoreBody
from cluster.api.http.responses import (
    Classified,
    ClassifiedList,
    EmbeddingUsage,
    RankedDocument,
    RerankedList,
    Scored,
    ScoreList,
    TextDocument,
)
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.generation import TextPrompt
from cluster.requests.serving import Serving
from cluster.vectors.all_together import all_together
from cluster.vectors.vector_requests import ClassifyRequest, ClassifyResult, ScoreRequest, ScoreResult

_FIELD: Final = re.compile(r"(\w+)(\[(\d+)\])?(.*)")


def classify_request(head: AnswerHead, body: ClassifyBody, timeout_s: float | None) -> ClassifyRequest:
    """Return a call's request to Serving. Raises InvalidRequest."""
    return ClassifyRequest(
        inputs=prompts_from(body.input), activate=_is_activated(body), **envelope(head, body, timeout_s)
    )


def classified_list(head: AnswerHead, result: ClassifyResult) -> ClassifiedList:
    """Return the answer to a client of /classify."""
    return ClassifiedList(
        id=head.id,
        created=head.created,
        model=head.model,
        data=[
            Classified(index, result.labels[scores.index(max(scores))], scores, len(scores))
            for index, scores in enumerate(result.scores)
        ],
        usage=_usage(result.usage.num_prompt_tokens),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of queries with documents: of one query with each document, or of pairs.

    each: the request to Serving of the first query with all documents; pairs take everything else from it
    """

    queries: Sequence[str]
    documents: Sequence[str]
    each: ScoreRequest

    async def scores(self, serving: Serving) -> tuple[list[float], EmbeddingUsage]:
        """Return a score for each document, in their order. Raises what Serving.score() raises; all pairs then end."""
        if len(self.queries) == 1:
            result = await serving.score(self.each)
            return result.scores, _usage(result.usage.num_prompt_tokens)
        results = await all_together(
            self._score_pair(serving, index, *pair)
            for index, pair in enumerate(zip(self.queries, self.documents, strict=True))
        )
        num_tokens = sum(result.usage.num_prompt_tokens for result in results)
        return [result.scores[0] for result in results], _usage(num_tokens)

    async def _score_pair(self, serving: Serving, index: int, query: str, document: str) -> ScoreResult:
        pair = replace(
            self.each,
            request_id=f"{self.each.request_id}.{index}",
            query=TextPrompt(query),
            documents=[TextPrompt(document)],
        )
        try:
            return await serving.score(pair)
        except InvalidRequest as error:
            names = {"query": f"query[{index}]", "documents": "documents"}
            raise renamed_inputs(error, names, first_index=index) from error


def comparison_of(head: AnswerHead, body: ScoreBody | RerankBody, timeout_s: float | None) -> Comparison:
    """Return the comparison that a call asks for. Raises InvalidRequest."""
    match body:
        case ScoreBody(text_1=queries, text_2=documents):
            queries, documents = ([one] if isinstance(one, str) else one for one in (queries, documents))
            if not queries or len(queries) not in (1, len(documents)):
                allowed = f"one text, or as many as text_2 has, which are {len(documents)}"
                raise InvalidRequest(FieldViolation("text_1", f"{len(queries)} of them", allowed))
        case RerankBody(query=query, documents=documents):
            queries = [query]
    each = ScoreRequest(
        query=TextPrompt(queries[0]),
        documents=[TextPrompt(document) for document in documents],
        activate=_is_activated(body),
        **envelope(head, body, timeout_s),
    )
    return Comparison(queries, documents, each)


def score_list(head: AnswerHead, scores: Sequence[float], usage: EmbeddingUsage) -> ScoreList:
    """Return the answer to a client of /score."""
    data = [Scored(index, score) for index, score in enumerate(scores)]
    return ScoreList(id=head.id, created=head.created, model=head.model, data=data, usage=usage)


def reranked_list(head: AnswerHead, body: RerankBody, scores: Sequence[float], usage: EmbeddingUsage) -> RerankedList:
    """Return the answer to a client of /rerank: the best document first, equal ones in their order."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    has_documents = body.return_documents is not False
    results = [
        RankedDocument(index, scores[index], TextDocument(body.documents[index]) if has_documents else UNSET)
        for index in order[: body.top_n or None]
    ]
    return RerankedList(id=head.id, model=head.model, results=results, usage=usage)


def renamed_inputs(error: InvalidRequest, names: Mapping[str, str], first_index: int = 0) -> InvalidRequest:
    """Return the same error with the inputs' names over HTTP.

    names:       from Serving's names
    first_index: the index, in the call, of the input that is Serving's first
    """

    def rename(violation: FieldViolation) -> FieldViolation:
        found = _FIELD.fullmatch(violation.field)
        assert found is not None, "fields are named"
        name, index, rest = found[1], found[3], found[4]
        place = "" if index is None else f"[{int(index) + first_index}]"
        return FieldViolation(f"{names.get(name, name)}{place}{rest}", violation.value, violation.allowed)

    return InvalidRequest(*map(rename, error.violations))


def _is_activated(body: ActivatedBody) -> bool:
    """Whether scores are asked for instead of logits, by either of vLLM's parameters. Raises InvalidRequest."""
    given = {one for one in (body.activation, body.use_activation) if one is not None}
    if len(given) > 1:
        raise InvalidRequest(FieldViolation("use_activation", "given too", "the same as activation, or one of both"))
    return given != {False}


def _usage(num_tokens: int) -> EmbeddingUsage:
    return EmbeddingUsage(num_tokens, num_tokens)
