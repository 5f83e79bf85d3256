from cluster.engine_connection import EngineDescriptor, EngineRole
from cluster.pool.membership import Membership


def engine(engine_id: str, incarnation: int = 1) -> EngineDescriptor:
    return EngineDescriptor(engine_id, incarnation, EngineRole.BOTH, "127.0.0.1:1")


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
    assert draining.with_engine(engine("a", 2)).draining == frozenset(), "its next life does not drain"


def test_an_engine_changes_its_role_in_place() -> None:
    members = Membership(0, ()).with_engine(engine("a"))
    changed = members.with_role("a", 1, EngineRole.DECODE)
    assert changed.engines[0].role is EngineRole.DECODE
    assert changed.version == 2
    assert changed.with_role("a", 1, EngineRole.DECODE) is changed
    assert members.with_role("a", 2, EngineRole.DECODE) is members
