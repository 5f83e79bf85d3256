"""The cluster's secret of one test process, and who proves it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from actors.model.tensor_parallel.rank_calls import RankTrust
from kv_transfer.trust.authority import draw_tls_material
from kv_transfer.trust.handshake import Party
from kv_transfer.trust.membership import Member, Trust, TrustMaterial

TRUST: Final = Trust(TrustMaterial.draw())
"""For everything that a test builds in this process."""

RANK_TRUST: Final = RankTrust(TRUST, Party("engine-0", 1))
"""For the ranks of an engine that are threads of a test."""


def with_tls(trust: Trust = TRUST) -> Trust:
    """The same secrets, with new certificates for TLS."""
    assert trust.material is not None
    return Trust(replace(trust.material, tls=draw_tls_material()))


def member(name: str = "ingress-0", incarnation: int = 1, trust: Trust = TRUST) -> Member:
    """One that belongs to the cluster, unless its trust is another one."""
    return Member(Party(name, incarnation), trust)


def material() -> TrustMaterial:
    """Return what another process of the cluster is given."""
    assert TRUST.material is not None
    return TRUST.material
