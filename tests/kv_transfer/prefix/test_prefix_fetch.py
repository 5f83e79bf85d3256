from __future__ import annotations

from kv_transfer.connector.fetches import PrefixFetch, WantedFetch
from kv_transfer.connector.keys import TransferKey, TransferKind
from kv_transfer.connector.steps import KVConnectorMetadata, ProducerEnd
from kv_transfer.params import EngineAddress, PrefixSource, TransferRole
from kv_transfer.prefix.prefix_fetch import PrefixFetches
from kv_transfer.prefix.prefix_sources import PrefixSources
from kv_transfer.stores.host_blocks import HostMemoryScheduler
from kv_transfer.stores.store_set import StoreSet

PEER = EngineAddress("decode-0", 3, "host:1")
HASHES = [bytes([number]) * 16 for number in range(6)]


def make_fetches(max_fetches: int = 4) -> PrefixFetches:
    return PrefixFetches("prefill-0/1", 16, max_fetches=max_fetches, clock=lambda: 0.0)


def test_a_fetch_asks_its_source_for_the_blocks_that_it_has_beyond_those_here() -> None:
    fetches = make_fetches()
    assert fetches.reserve("r", HASHES, PrefixSource(PEER, 100), 2, 0) == 4, "6 blocks, of which 2 are here"
    assert fetches.start("r", [10, 11, 12, 13])
    [reservation] = fetches.add_to(KVConnectorMetadata()).reservations
    assert isinstance(reservation.fetch, PrefixFetch)
    assert reservation.fetch.fetch_id == reservation.params.transfer_id
    assert reservation.fetch.block_hashes == tuple(HASHES[:4])
    assert reservation.block_ids == (10, 11, 12, 13)
    assert reservation.num_prompt_tokens == 64
    assert reservation.params.peer == PEER
    assert reservation.params.role is TransferRole.CONSUMER
    assert reservation.key == TransferKey(TransferKind.PREFIX_FETCH, "r")
    assert fetches.add_to(KVConnectorMetadata()) == KVConnectorMetadata()


def test_no_more_is_fetched_at_once_than_allowed() -> None:
    fetches = make_fetches(max_fetches=1)
    source = PrefixSource(PEER, 1000)
    assert fetches.reserve("a", HASHES, source, 0, 0)
    assert not fetches.reserve("b", HASHES, source, 0, 0)
    assert fetches.end("a", 0)
    assert fetches.reserve("b", HASHES, source, 0, 0)
    assert not make_fetches(max_fetches=0).reserve("c", HASHES, source, 0, 0)


def test_what_a_store_has_is_not_fetched() -> None:
    store = HostMemoryScheduler(10)
    stores = StoreSet([store])
    sources = PrefixSources(stores, make_fetches())
    for number, block_hash in enumerate(HASHES):
        stores.on_block_evicted(block_hash, number)
    assert sources.reserve("r", HASHES, PrefixSource(PEER, 1000)) == 6
    sources.start("r", range(6))
    metadata = sources.add_to(KVConnectorMetadata())
    assert metadata.stores is not None
    assert len(metadata.stores.loads) == 1
    assert not metadata.reservations


def test_of_two_that_have_some_the_one_that_has_more_is_asked() -> None:
    stores = StoreSet([HostMemoryScheduler(10)])
    sources = PrefixSources(stores, make_fetches())
    stores.on_block_evicted(HASHES[0], 0)
    assert sources.reserve("r", HASHES, PrefixSource(PEER, 1000)) == 6
    assert stores.num_reserved == 0
    assert sources.reserve("s", HASHES, PrefixSource(PEER, 16)) == 1
    assert stores.num_reserved == 1


def test_an_answer_is_a_producer_that_ends_at_once() -> None:
    fetches = make_fetches()
    want = WantedFetch(0, PEER, PrefixFetch("fetch-1", tuple(HASHES)))
    fetches.answer(want, [4, 5])
    metadata = fetches.add_to(KVConnectorMetadata())
    [(key, ticket, num_tokens)] = metadata.new_producers
    assert (key, ticket.transfer_id, num_tokens) == (want.answer_key, want.fetch.fetch_id, 32)
    assert metadata.progress[0].num_computed_tokens_before == 32
    assert [finish.end for finish in metadata.producer_finishes] == [ProducerEnd.PREFIX_SENT]
    assert want.answer_key == TransferKey(TransferKind.PREFIX_ANSWER, "fetch-1")


def test_a_cancel_is_for_the_fetch_and_not_for_a_handoff() -> None:
    fetches = make_fetches()
    assert not fetches.cancel("r")
    fetches.reserve("r", HASHES, PrefixSource(PEER, 1000), 0, 0)
    assert fetches.cancel("r")
    assert fetches.add_to(KVConnectorMetadata()).consumer_cancels == (TransferKey(TransferKind.PREFIX_FETCH, "r"),)
