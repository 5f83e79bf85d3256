"""Requests while a cluster goes from one model to the next."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.errors import EngineFailed, InvalidRequest, ModelVersionLeft, NoEngineAvailable
from cluster.parameters.generation import GenerateChunk, TokenPrompt
from cluster.parameters.sampling_options import SamplingOptions
from cluster.requests.model_versions import EnginesOfVersion, ModelVersions
from cluster.requests.recovery_decisions import RecoveryPolicy
from cluster.requests.serving import Serving
from cluster.routing.engine_connection import EngineConnection, EngineRole
from tests.cluster.serving_setup import HELLO, MODEL, collect, make_serving, make_version, text_of
from tests.fakes import FakeEngine, FakePool

P, D, BOTH = EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH
LENGTH = FinishReason.LENGTH


def engine(name: str, role: EngineRole, version: int) -> FakeEngine:
    return FakeEngine(name, role, version)


# -- which version a request gets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engines", "in_flight", "expected"),
    [
        ([], [], 2),
        ([engine("b", BOTH, 1)], [1, 1, 1], 1),
        ([engine("b", BOTH, 1), engine("c", BOTH, 2)], [], 2),
        ([engine("b", BOTH, 1), engine("c", BOTH, 2)], [2], 1),
        ([engine("b", BOTH, 1), engine("c", BOTH, 1), engine("d", BOTH, 2)], [1, 1, 2], 2),
        ([engine("b", BOTH, 1), engine("c", BOTH, 1), engine("d", BOTH, 2)], [1, 2], 1),
        ([engine("p", P, 1), engine("d", D, 1), engine("e", D, 2)], [1, 1, 2], 2),
        ([engine("p", P, 2), engine("d", D, 1)], [1, 1, 1], 1),
        ([engine("p", P, 2), engine("q", P, 1)], [2], 1),
        ([engine("b", BOTH, 3), engine("c", BOTH, 1)], [1], 1),
    ],
    ids=[
        "without engines the newest",
        "the one that has any",
        "the newer one of equals",
        "the one with fewer requests",
        "two engines take twice as many (the one has its share)",
        "two engines take twice as many (the two have not)",
        "only engines that decode count",
        "prefill engines wait for their decode engines",
        "a last resort on either side",
        "one that is not loaded gets nothing",
    ],
)
def test_a_request_gets_the_version_with_the_fewest_requests_per_decoding_engine(
    engines: list[EngineConnection], in_flight: list[int], expected: int
) -> None:
    versions = ModelVersions(make_version(1), make_version(2))
    assert versions.choose(engines, in_flight).version == expected


def test_the_newest_version_that_serves_is_the_one_to_describe() -> None:
    versions = ModelVersions(make_version(1), make_version(2))
    assert versions.newest([]).version == 2
    assert versions.newest([engine("b", BOTH, 1), engine("c", BOTH, 3)]).version == 1


def test_versions_that_have_left_are_forgotten_but_one_always_stays() -> None:
    versions = ModelVersions(make_version(1), make_version(2))
    versions.keep({2, 3})
    assert (1 in versions, 2 in versions) == (False, True)
    versions.keep({3})
    assert 2 in versions
    versions.put(make_version(3))
    versions.keep({3})
    assert 2 not in versions


def test_engines_of_other_versions_are_not_shown() -> None:
    old, new = engine("old", BOTH, 1), engine("new", BOTH, 2)
    versions = ModelVersions(make_version(1), make_version(2))
    assert EnginesOfVersion(FakePool(old, new), versions, make_version(1), is_bound=True).snapshot() == [old]
    assert EnginesOfVersion(FakePool(old, new), versions, make_version(2), is_bound=False).snapshot() == [new]


@pytest.mark.parametrize(
    ("is_known", "is_bound", "others", "has_left"),
    [
        (True, True, [engine("new", BOTH, 2)], False),
        (True, False, [engine("new", BOTH, 2)], True),
        (True, False, [engine("newer", BOTH, 3)], False),
        (True, False, [], False),
        (False, True, [engine("new", BOTH, 2)], True),
        (False, True, [], True),
    ],
    ids=[
        "engines of it may come back",
        "why wait, if another one serves",
        "but not for one that is not loaded",
        "or for none",
        "none will come",
        "none will come, of whatever version",
    ],
)
def test_when_a_version_has_left(
    is_known: bool, is_bound: bool, others: list[EngineConnection], has_left: bool
) -> None:
    versions = ModelVersions(make_version(1), make_version(2)) if is_known else ModelVersions(make_version(2))
    pool = EnginesOfVersion(FakePool(*others), versions, make_version(1), is_bound=is_bound)
    if has_left:
        with pytest.raises(ModelVersionLeft, match="model version 1 has left the cluster"):
            pool.snapshot()
    else:
        assert pool.snapshot() == []


# -- requests --------------------------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """Engines by name; "old" ones serve version 1, "new" ones version 2."""

    engines: dict[str, FakeEngine]
    versions: ModelVersions = field(default_factory=lambda: ModelVersions(make_version(1), make_version(2)))

    def __post_init__(self) -> None:
        self.pool = FakePool(*self.engines.values())
        policy = RecoveryPolicy(max_attempts=4, engine_timeout_s=30.0)
        self.serving: Serving = make_serving(pool=self.pool, recovery_policy=policy, versions=self.versions)

    def __getitem__(self, name: str) -> FakeEngine:
        return self.engines[name]

    def begin(self, request_id: str = "r") -> asyncio.Task[list[GenerateChunk]]:
        return asyncio.create_task(collect(self.serving.generate(replace(HELLO, request_id=request_id))))

    def leave(self, name: str, *, forget: int | None = None) -> None:
        """An engine leaves, and with it a version if it was the last one: as in one snapshot of the membership."""
        if forget is not None:
            self.versions.keep({1, 2} - {forget})
        self.pool.replace(*(engine for engine in self.pool.engines if engine is not self[name]))
        self[name].lose()


def make_cluster(**roles: EngineRole) -> Cluster:
    return Cluster({name: engine(name, role, 2 if name.startswith("new") else 1) for name, role in roles.items()})


async def settle() -> None:
    """Let what was sent be read."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_load_follows_the_engines_from_one_version_to_the_next() -> None:
    cluster = make_cluster(old_a=BOTH, old_b=BOTH, new_a=BOTH)
    answers = [cluster.begin(str(number)) for number in range(9)]
    await settle()
    assert [len(cluster[name].submitted) for name in ("old_a", "old_b", "new_a")] == [3, 3, 3]
    for name in cluster.engines:
        for request in cluster[name].submitted:
            cluster[name].send(request, 0, name, finish_reason=LENGTH)
    assert sorted(text_of(chunks) for chunks in await asyncio.gather(*answers)) == sorted(list(cluster.engines) * 3)


async def test_prefill_and_decode_of_a_request_are_of_one_version() -> None:
    cluster = make_cluster(old_p=P, old_d=D, new_p=P, new_d=D)
    answers = [cluster.begin(str(number)) for number in range(4)]
    await settle()
    for prefill, decode in (("old_p", "old_d"), ("new_p", "new_d")):
        assert len(cluster[prefill].submitted) == 2
        for producer, consumer in zip(cluster[prefill].submitted, cluster[decode].submitted, strict=True):
            assert producer.kv_transfer_params is not None
            assert producer.kv_transfer_params.peer.engine_id == decode
            assert producer.request_id == consumer.request_id
    for answer in answers:
        answer.cancel()
    await asyncio.gather(*answers, return_exceptions=True)


async def begin_on_old(cluster: Cluster, text: str) -> tuple[asyncio.Task[list[GenerateChunk]], EngineCoreRequest]:
    """A request that old_a works on, and has said so much of."""
    new = [one for one in cluster.pool.engines if one.descriptor.model_version == 2]
    cluster.pool.engines = [one for one in cluster.pool.engines if one not in new]
    answer = cluster.begin()
    request = await cluster["old_a"].next_request()
    cluster.pool.engines += new
    if text:
        cluster["old_a"].send(request, 0, text)
    await settle()
    return answer, request


async def test_a_request_goes_on_at_another_engine_of_its_version() -> None:
    cluster = make_cluster(old_a=BOTH, old_b=BOTH, new_a=BOTH)
    cluster["old_b"].num_other_requests = 1
    answer, _ = await begin_on_old(cluster, "ab")
    cluster.leave("old_a")
    resumed = await cluster["old_b"].next_request()
    assert resumed.output_token_ids == list(b"ab")
    cluster["old_b"].send(resumed, 2, "c", finish_reason=LENGTH)
    assert text_of(await answer) == "abc"
    assert cluster["new_a"].submitted == []


async def test_a_request_with_tokens_waits_for_engines_of_its_version_that_may_come_back() -> None:
    cluster = make_cluster(old_a=BOTH, new_a=BOTH)
    answer, _ = await begin_on_old(cluster, "ab")
    cluster.leave("old_a")
    await asyncio.wait_for(cluster.pool.is_watched.wait(), timeout=60)
    again = FakeEngine("old_a", BOTH)
    cluster.pool.replace(cluster["new_a"], again)
    resumed = await again.next_request()
    again.send(resumed, 2, "c", finish_reason=LENGTH)
    assert text_of(await answer) == "abc"


async def test_a_request_with_tokens_ends_when_its_version_has_left() -> None:
    cluster = make_cluster(old_a=BOTH, new_a=BOTH)
    answer, _ = await begin_on_old(cluster, "ab")
    cluster.leave("old_a", forget=1)
    with pytest.raises(EngineFailed, match=r"^r: its model version 1 has left the cluster$") as raised:
        await answer
    assert (raised.value.can_resume, raised.value.num_new_tokens) == (False, 2)
    assert cluster["new_a"].submitted == []
    assert cluster.serving.num_requests_in_flight == 0


async def test_a_request_that_waits_ends_when_its_version_leaves_meanwhile() -> None:
    cluster = make_cluster(old_a=BOTH, new_a=BOTH)
    answer, _ = await begin_on_old(cluster, "ab")
    cluster.leave("old_a")
    await asyncio.wait_for(cluster.pool.is_watched.wait(), timeout=60)
    await settle()
    assert not answer.done()
    cluster.versions.keep({2})
    cluster.pool.replace(cluster["new_a"])
    with pytest.raises(EngineFailed, match="its model version 1 has left the cluster"):
        await answer


@pytest.mark.parametrize("forget", [1, None], ids=["its version has left", "engines of it may come back"])
async def test_a_request_without_tokens_starts_over_with_the_other_versions_tokenizer(forget: int | None) -> None:
    cluster = make_cluster(old_a=BOTH, new_a=BOTH)
    longer = replace(MODEL, max_model_len=2 * MODEL.max_model_len, eos_token_ids=(7,))
    cluster.versions.put(make_version(2, longer))
    answer, first = await begin_on_old(cluster, "")
    cluster.leave("old_a", forget=forget)
    again = await cluster["new_a"].next_request()
    assert (first.eos_token_ids, again.eos_token_ids) == (MODEL.eos_token_ids, (7,))
    assert again.sampling_params.max_tokens == longer.max_model_len - len(again.prompt_token_ids)
    assert (again.attempt, again.output_token_ids) == (0, [])
    assert again.request_id != first.request_id
    cluster["new_a"].send(again, 0, "xyz", finish_reason=LENGTH)
    [chunk] = await answer
    assert (chunk.text, chunk.seed) == ("xyz", HELLO.sampling.seed)
    assert cluster.serving.num_requests_in_flight == 0


async def test_what_has_passed_of_a_deadline_stays_passed() -> None:
    cluster = make_cluster(old_a=BOTH, new_a=BOTH)
    new = cluster.pool.engines.pop()
    request = replace(HELLO, timeout_s=60.0)
    answer = asyncio.create_task(collect(cluster.serving.generate(request)))
    first = await cluster["old_a"].next_request()
    cluster.pool.engines.append(new)
    cluster.leave("old_a", forget=1)
    again = await cluster["new_a"].next_request()
    assert first.deadline_s == 1060.0
    assert again.deadline_s is not None
    assert again.deadline_s < first.deadline_s, "the wall clock stands still here: what is left of 60 s is less"
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)


async def test_a_prompt_that_the_newer_model_does_not_know_is_refused_when_it_starts_over() -> None:
    cluster = make_cluster(old_a=BOTH, new_a=BOTH)
    cluster.versions.put(make_version(2, replace(MODEL, vocab_size=100)))
    new = cluster.pool.engines.pop()
    request = replace(HELLO, prompt=TokenPrompt([200]), sampling=SamplingOptions(seed=3))
    answer = asyncio.create_task(collect(cluster.serving.generate(request)))
    await cluster["old_a"].next_request()
    cluster.pool.engines.append(new)
    cluster.leave("old_a", forget=1)
    with pytest.raises(InvalidRequest, match="token ids from 0 to 99"):
        await answer


async def test_a_resumed_request_is_never_continued_by_another_version_than_it_was_given_to() -> None:
    cluster = make_cluster(old_a=BOTH, new_a=BOTH)
    new = cluster.pool.engines.pop()
    request = replace(HELLO, output_token_ids=(97,))
    answer = asyncio.create_task(collect(cluster.serving.generate(request)))
    await cluster["old_a"].next_request()
    cluster.pool.engines.append(new)
    cluster.leave("old_a", forget=1)
    with pytest.raises(EngineFailed, match="has left the cluster") as raised:
        await answer
    assert (raised.value.can_resume, raised.value.num_new_tokens) == (False, 0)
    assert cluster["new_a"].submitted == []


async def test_the_first_chunk_says_which_version_answers() -> None:
    cluster = make_cluster(new_a=BOTH)
    answer = cluster.begin()
    request = await cluster["new_a"].next_request()
    cluster["new_a"].send(request, 0, "a")
    await settle()
    cluster["new_a"].send(request, 1, "b", finish_reason=LENGTH)
    assert [(chunk.seed, chunk.model_version) for chunk in await answer] == [(3, 2), (None, None)]


async def test_a_resumed_request_goes_to_the_version_that_it_began_on() -> None:
    cluster = make_cluster(old_a=BOTH, new_a=BOTH)
    for version, name in ((1, "old_a"), (2, "new_a")):
        request = replace(HELLO, output_token_ids=(97,), model_version=version)
        answer = asyncio.create_task(collect(cluster.serving.generate(request)))
        resumed = await cluster[name].next_request()
        cluster[name].send(resumed, 1, "b", finish_reason=LENGTH)
        assert (await answer)[0].model_version == version


async def test_a_resumed_request_is_not_begun_on_another_version() -> None:
    cluster = make_cluster(new_a=BOTH)
    cluster.versions.keep({2})
    request = replace(HELLO, output_token_ids=(97,), model_version=1)
    with pytest.raises(EngineFailed, match="its model version 1 has left the cluster") as raised:
        await collect(cluster.serving.generate(request))
    assert not raised.value.can_resume
    with pytest.raises(EngineFailed, match="model version 3 is not loaded yet") as raised:
        await collect(cluster.serving.generate(replace(request, model_version=3)))
    assert raised.value.can_resume, "another ingress may have heard of it before"
    assert cluster["new_a"].submitted == []
    assert cluster.serving.num_requests_in_flight == 0


async def test_without_engines_of_any_version_a_request_does_not_wait() -> None:
    cluster = make_cluster()
    with pytest.raises(NoEngineAvailable):
        await cluster.begin()


async def test_a_client_that_leaves_between_two_versions_leaves_nothing_behind() -> None:
    cluster = make_cluster(old_a=BOTH, new_a=BOTH)
    answer, _ = await begin_on_old(cluster, "")
    cluster.leave("old_a", forget=1)
    again = await cluster["new_a"].next_request()
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    assert cluster["new_a"].aborted == [again.request_id]
    assert cluster.serving.num_requests_in_flight == 0
