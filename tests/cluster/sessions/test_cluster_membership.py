from dataclasses import replace

from actors.core.requests.adapter import Adapter
from actors.model_facts import ModelFacts
from cluster.routing.engine_connection import EngineDescriptor, EngineRole
from cluster.sessions.cluster_membership import Membership, ServedModel
from tests.kv_transfer.connected_workers import LAYOUT


def engine(engine_id: str, incarnation: int = 1, model_version: int = 1) -> EngineDescriptor:
    return EngineDescriptor(engine_id, incarnation, EngineRole.BOTH, "127.0.0.1:1", model_version=model_version)


def model(version: int, max_model_len: int = 64) -> ServedModel:
    return ServedModel(version, f"checkpoint-{version}", ModelFacts(max_model_len, 257, (256,), LAYOUT))


def test_every_change_is_a_new_version() -> None:
    first = Membership(0, ()).with_engine(engine("a"))
    second = first.with_engine(engine("b"))
    assert (first.version, second.version) == (1, 2)
    assert second.engines == (engine("a"), engine("b"))


def test_a_new_incarnation_takes_the_old_ones_place() -> None:
    members = Membership(0, ()).with_engine(engine("a", 1)).with_engine(engine("a", 2))
    assert members.engines == (engine("a", 2),)


def test_removing_an_old_incarnation_leaves_the_new_one_and_the_version_alone() -> None:
    members = Membership(0, ()).with_engine(engine("a", 2))
    assert members.without_engine("a", 1) is members
    assert members.without_engine("a", 2) == Membership(2, ())


def test_an_engine_that_drains_stays_a_member() -> None:
    members = Membership(0, ()).with_engine(engine("a")).with_engine(engine("b"))
    draining = members.with_draining("a", 1)
    assert draining.draining == {("a", 1)}
    assert draining.engines == members.engines
    assert draining.with_draining("a", 1) is draining
    assert members.with_draining("a", 9) is members
    assert draining.without_engine("a", 1).draining == frozenset()
    assert draining.with_engine(engine("a", 2)).draining == frozenset(), "its next incarnation does not drain"


def test_an_engine_changes_its_role_in_place() -> None:
    members = Membership(0, ()).with_engine(engine("a"))
    changed = members.with_role("a", 1, EngineRole.DECODE)
    assert changed.engines[0].role is EngineRole.DECODE
    assert changed.version == 2
    assert changed.with_role("a", 1, EngineRole.DECODE) is changed
    assert members.with_role("a", 2, EngineRole.DECODE) is members


def test_a_model_is_known_before_its_first_engine_comes() -> None:
    first = Membership(0, ()).with_model(model(1)).with_engine(engine("a"))
    second = first.with_model(model(2))
    assert (second.version, second.models) == (3, (model(1), model(2)))
    assert second.with_model(model(2)) is second
    assert second.with_draining("a", 1).with_role("a", 1, EngineRole.DECODE).models == second.models


def test_a_model_without_engines_leaves_once_engines_of_a_newer_one_serve() -> None:
    members = Membership(0, ()).with_model(model(1)).with_engine(engine("a")).with_model(model(2))
    assert members.without_engine("a", 1).models == (model(1), model(2)), "its engine may come back, as yet"
    both = members.with_engine(engine("b", 1, 2))
    assert both.models == (model(1), model(2))
    assert both.without_engine("b", 1).models == (model(1), model(2)), "the newer one is still wanted"
    assert both.without_engine("a", 1).models == (model(2),)
    assert both.with_engine(engine("a", 2, 2)).models == (model(2),), "its next incarnation may serve the newer one"


def test_an_engine_of_an_older_model_may_come_late() -> None:
    newer = Membership(0, ()).with_model(model(2)).with_engine(engine("b", 1, 2))
    both = newer.with_model(model(1)).with_engine(engine("a"))
    assert both.models == (model(1), model(2))


def test_what_is_known_of_a_model_may_change() -> None:
    members = Membership(0, ()).with_model(model(2)).with_model(model(1))
    assert members.with_model(model(2, max_model_len=32)).models == (model(1), model(2, max_model_len=32))


def test_without_engines_nothing_is_forgotten() -> None:
    members = Membership(0, ()).with_model(model(1)).with_engine(engine("a"))
    assert members.without_engine("a", 1).models == (model(1),)


def test_adapters_stay_whatever_becomes_of_engines() -> None:
    adapters = (Adapter("sql", "/adapters/sql", "1"), Adapter("chat", "/adapters/chat", "2"))
    members = Membership(0, ()).with_adapters(adapters).with_engine(engine("a")).with_draining("a", 1)
    assert members.without_engine("a", 1).with_model(model(1)).adapters == adapters
    assert members.with_adapters(adapters[:1]) == replace(members, version=4, adapters=adapters[:1])
