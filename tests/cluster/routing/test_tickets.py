from __future__ import annotations

from dataclasses import dataclass

from actors.core.requests.request import EngineCoreRequest
from actors.core.requests.sampling_params import SamplingParams
from cluster.routing.base import Route
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.routing.tickets import submission_alone, submission_with_ticket
from kv_transfer.params import EngineAddress, HandoffRanks, KVTransferParams, PrefixSource, TransferRole


@dataclass(frozen=True)
class Engine:
    descriptor: EngineDescriptor
    num_unfinished_requests: int = 0


PREFILL = Engine(EngineDescriptor("prefill-3", 5, EngineRole.PREFILL, "p:1"))
DECODE = Engine(EngineDescriptor("decode-4", 6, EngineRole.DECODE, "d:1"))
SOURCE = PrefixSource(EngineAddress("other", 1, "o:1"), 512)
REQUEST = EngineCoreRequest(request_id="r+2", attempt=2, prompt_token_ids=[1], sampling_params=SamplingParams())


def test_both_ends_of_a_handoff_get_one_transfer_and_each_other() -> None:
    route = Route(PREFILL, DECODE, SOURCE)
    ranks = HandoffRanks(PREFILL.descriptor.handoff_rank, DECODE.descriptor.handoff_rank)

    consumer = submission_with_ticket(REQUEST, route, TransferRole.CONSUMER)
    producer = submission_with_ticket(REQUEST, route, TransferRole.PRODUCER)

    assert consumer.kv_transfer_params == KVTransferParams(
        "r+2/2", 2, TransferRole.CONSUMER, PREFILL.descriptor.kv_address, ranks=ranks
    )
    assert producer.kv_transfer_params == KVTransferParams(
        "r+2/2", 2, TransferRole.PRODUCER, DECODE.descriptor.kv_address, ranks=ranks
    )
    # The producer fetches a prefix, and the consumer gets all of it from the producer.
    assert (consumer.prefix_source, producer.prefix_source) == (None, SOURCE)


def test_an_engine_alone_gets_the_source_of_the_prefix() -> None:
    submitted = submission_alone(REQUEST, Route(None, DECODE, SOURCE))

    assert (submitted.prefix_source, submitted.kv_transfer_params) == (SOURCE, None)
