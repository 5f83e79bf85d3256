"""The spans of a request have its phases below its attempts, the conventions' names, and nothing of its texts."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from cluster.observability.tracing.span_tree import MAX_SPANS, SpanNode, make_span_tree
from cluster.routing.request_record import AttemptRecord, RequestRecord
from tests.cluster.observability.stories.story_samples import ALONE, CONSUMER, HANDOFF, ended, preempted

replace = msgspec.structs.replace
ARRIVED_NS = 1000 * 10**9


def tree(record: RequestRecord, request: EngineCoreRequest | None = None) -> SpanNode:
    return make_span_tree(record, "chat", request)


def spans(node: SpanNode, depth: int = 0) -> Iterator[tuple[int, str, float, float]]:
    yield depth, node.name, round(node.began_ns / 1e9 - 1000, 3), round(node.ended_ns / 1e9 - 1000, 3)
    for child in node.children:
        yield from spans(child, depth + 1)


def every(node: SpanNode) -> Iterator[SpanNode]:
    yield node
    for child in node.children:
        yield from every(child)


def test_a_handoff_is_a_tree_of_admission_route_prefill_transfer_and_decode() -> None:
    assert list(spans(tree(ended()))) == [
        (0, "chat tiny", 0.0, 6.2),
        (1, "admission", 0.0, 0.1),
        (1, "attempt", 0.1, 6.2),
        (2, "route", 0.1, 0.1),
        (2, "transfer", 1.0, 2.0),
        (2, "queue", 0.1, 0.6),
        (2, "reservation", 0.1, 0.3),
        (2, "prefill", 0.6, 1.6),
        (2, "transfer_exposed", 1.6, 2.0),
        (2, "batch", 2.0, 2.1),
        (2, "decode", 2.1, 6.1),
    ]


def test_the_spans_carry_engines_tokens_bytes_and_the_terms_of_the_route() -> None:
    found = {node.name: node for node in every(tree(ended()))}
    assert found["prefill"].attributes == {
        "raypd.engine": "prefill-0",
        "raypd.computed_tokens": 90,
        "raypd.cached_tokens": 10,
    }
    assert found["transfer"].attributes == {
        "raypd.engine": "decode-0",
        "raypd.producer": "prefill-0",
        "raypd.bytes": 12_000_000,
        "raypd.transfer_s": 1.0,
        "raypd.exposed_s": 0.4,
    }
    route = found["route"].attributes
    assert (route["raypd.route.way"], route["raypd.route.total_s"]) == ("prefill_decode", 2.0)
    assert (route["raypd.route.mode"], route["raypd.route.reason"]) == ("cost", "cost")
    (other,) = found["route"].events
    assert (other.name, other.attributes["raypd.route.way"]) == ("not_chosen", "decode_alone")
    assert found["attempt"].attributes["raypd.engines"] == ("prefill-0", "decode-0")


def test_the_request_has_the_conventions_attributes() -> None:
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[104, 101],
        sampling_params=SamplingParams(temperature=0.5, top_k=7, seed=2**63, max_tokens=30),
    )
    attributes = tree(ended(), request).attributes
    assert {name: value for name, value in attributes.items() if name.startswith("gen_ai")} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "raypd",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 30,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.response.id": "r",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.time_to_first_chunk": 1.6,
        "gen_ai.output.type": "text",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 10,
    }
    assert attributes["raypd.tenant"] == "alice"


def test_a_further_attempt_links_to_the_one_that_it_continues() -> None:
    lost = replace(HANDOFF, decode=None, failure="engine decode-0 is lost", ended_s=3.0)
    again = replace(ALONE, began_s=3.5, first_token_s=5.0)
    made = tree(ended(lost, again, duration_s=6.5))
    first, second = made.children[1:]
    assert (first.error, first.follows, second.error, second.follows) == ("engine decode-0 is lost", None, "", 1)
    assert [event.name for event in first.events] == ["failed"]
    assert made.error == ""


def test_preemptions_and_moves_are_events_of_their_attempt() -> None:
    attempt = replace(HANDOFF, decode=preempted(CONSUMER, (3.0, 3.5)))
    assert [event.name for event in tree(ended(attempt)).children[1].events] == ["preempted"]
    moved = replace(HANDOFF, decode_engine_ids=("decode-0", "decode-1"), decode=None, moved_s=(4.0,))
    (event,) = tree(ended(moved)).children[1].events
    assert (event.name, event.at_ns, event.attributes["raypd.what"]) == (
        "moved",
        ARRIVED_NS + 4 * 10**9,
        "migrated from decode-0 to decode-1",
    )


def test_only_failures_of_the_cluster_are_errors() -> None:
    refused = RequestRecord("r", "", "i", 1000.0, outcome="overloaded", duration_s=0.1)
    assert tree(refused).error
    assert tree(refused).attributes["error.type"] == "overloaded"
    for outcome in ("cancelled", "invalid"):
        one = tree(replace(refused, outcome=outcome))
        assert (one.error, one.attributes["error.type"]) == ("", outcome)
    assert "error.type" not in tree(replace(refused, outcome="done")).attributes


def test_spans_and_texts_are_bounded() -> None:
    failed = [
        replace(HANDOFF, began_s=float(n), ended_s=n + 0.9, failure="x" * 300, decode_engine_ids=("d" * 4096,))
        for n in range(16)
    ]
    made = tree(ended(*failed, duration_s=20.0, model="m" * 4096))
    nodes = list(every(made))
    assert len(nodes) <= MAX_SPANS
    assert max(len(node.name) for node in nodes) <= 256
    for node in nodes:
        assert len(node.error) <= 256
        for attributes in (node.attributes, *(event.attributes for event in node.events)):
            assert all(len(value) <= 256 for value in attributes.values() if isinstance(value, str))


def test_no_stop_string_and_no_token_is_in_any_attribute() -> None:
    params = SamplingParams(stop_token_ids=(424_242,), bad_words=((515_151,),), allowed_token_ids=(616_161,))
    request = EngineCoreRequest(request_id="r", prompt_token_ids=[313_131], sampling_params=params)
    text = repr(list(every(tree(ended(), request))))
    assert not [number for number in ("424242", "515151", "616161", "313131") if number in text]


def test_an_attempt_that_ended_before_it_began_has_no_negative_length() -> None:
    odd = AttemptRecord(5.0, ("decode-0",), ended_s=1.0, failure="odd")
    assert all(node.began_ns <= node.ended_ns for node in every(tree(ended(odd))))
