"""Service-level aims: of a request, else of its token, else of the cluster, and no tighter than the token allows.

Tests of cluster/access/aims.py, cluster/parameters/slo_rules.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.core.requests.slo import Slo
from cluster.access.aims import AIMS, NO_AIMS, Aims, SloConfig
from cluster.access.caller import ANYBODY, Caller
from cluster.access.tokens import Tokens, hash_token, make_token
from cluster.api.http.requests import SloBody
from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.client.options import Aims as ClientAims
from cluster.errors import InvalidConfig, PermissionDenied

OF_CLUSTER = Aims(ttft_ms=500, itl_ms=50)


@pytest.mark.parametrize(
    ("asked", "of_token", "expected"),
    [
        (NO_AIMS, NO_AIMS, Slo(ttft_s=0.5, itl_s=0.05)),
        (NO_AIMS, Aims(itl_ms=80), Slo(ttft_s=0.5, itl_s=0.08)),
        (Aims(ttft_ms=900), Aims(ttft_ms=700, itl_ms=80), Slo(ttft_s=0.9, itl_s=0.08)),
        (Aims(ttft_ms=9, itl_ms=9), Aims(itl_ms=80), Slo(ttft_s=0.009, itl_s=0.009)),
    ],
)
def test_each_aim_is_the_requests_or_else_the_tokens_or_else_the_clusters(
    asked: Aims, of_token: Aims, expected: Slo
) -> None:
    assert Caller("alice", slo=of_token).aims(asked, OF_CLUSTER) == expected


def test_without_any_aim_there_is_none() -> None:
    assert ANYBODY.aims(NO_AIMS, NO_AIMS) is None
    assert ANYBODY.aims(Aims(ttft_ms=1), NO_AIMS) == Slo(ttft_s=0.001)


def test_a_request_may_have_no_tighter_aim_than_its_token_allows() -> None:
    caller = Caller("alice", tightest_slo=Aims(ttft_ms=200, itl_ms=60))
    with pytest.raises(PermissionDenied, match=r"slo\.itl_ms is 59; token 'alice' may have 60 and above"):
        caller.aims(Aims(itl_ms=59), OF_CLUSTER)
    assert caller.aims(Aims(ttft_ms=200), OF_CLUSTER) == Slo(ttft_s=0.2, itl_s=0.06), "the cluster's is too tight here"


def test_an_aim_gives_no_priority() -> None:
    caller = Caller("alice", highest_priority=3, slo=Aims(ttft_ms=1))
    assert caller.priority(0) == 3


def test_a_token_file_has_aims_and_limits_of_aims(tmp_path: Path) -> None:
    token, file = make_token(), tmp_path / "tokens.yaml"
    entry = (
        f"tokens:\n  - {{name: alice, sha256: {hash_token(token)}, slo: {{itl_ms: 80}}, tightest_slo: {{ttft_ms: %s}}}}"
    )
    file.write_text(entry % 200)
    caller = Tokens(file).find(token)
    assert caller is not None
    assert (caller.slo, caller.tightest_slo) == (Aims(itl_ms=80), Aims(ttft_ms=200))
    file.write_text(entry % -1)
    with pytest.raises(InvalidConfig, match=r"tokens\.0\.tightest_slo\.ttft_ms"):
        Tokens(file)


def test_every_way_to_give_aims_has_those_that_are_declared() -> None:
    assert (
        set(AIMS) == SloConfig.model_fields.keys() == SloBody.model_fields.keys() == ClientAims.__annotations__.keys()
    )
    assert set(AIMS) == {field.name for field in generate_pb2.Slo.DESCRIPTOR.fields}
