"""The controller gives out, beside the secret, the key of block hashes and the certificates of internal_tls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.pool.cluster_trust import ClusterTrust
from kv_transfer.errors import SecretUnusable, Untrusted
from kv_transfer.trust.authority import draw_tls_material
from kv_transfer.trust.membership import Trust, TrustMaterial
from kv_transfer.trust.tls import TlsFiles, TlsMaterial


def _makes(material: TlsMaterial | TlsFiles | None) -> Callable[[], TlsMaterial | TlsFiles | None]:
    return lambda: material


async def test_keys_and_certificates_outlive_the_controller_and_every_change_of_the_secret() -> None:
    tls = draw_tls_material()
    first = ClusterTrust(None, make_tls=_makes(tls))
    first.begin()
    given = await first.material()
    assert len(given.block_hash_key) == 32
    assert given.tls == tls

    later = ClusterTrust(None, make_tls=draw_tls_material)
    later.restore([None, given], given.generation)
    later.rotate()
    both = await later.material()
    assert (both.block_hash_key, both.tls, len(both.secrets)) == (given.block_hash_key, tls, 2)
    assert later.settle([both.generation])
    settled = await later.material()
    assert (settled.block_hash_key, settled.tls, len(settled.secrets)) == (given.block_hash_key, tls, 1)


async def test_they_outlive_the_controller_where_the_secret_is_in_a_file_too(tmp_path: Path) -> None:
    first, later = ClusterTrust(tmp_path / "secret"), ClusterTrust(tmp_path / "secret")
    first.begin()
    given = await first.material()
    assert given.secret_file
    assert len(given.block_hash_key) == 32
    later.restore([given], 0)
    assert await later.material() == given


async def test_two_clusters_have_different_keys() -> None:
    one, other = ClusterTrust(None), ClusterTrust(None)
    one.begin()
    other.begin()
    assert (await one.material()).block_hash_key != (await other.material()).block_hash_key


async def test_a_key_in_a_file_is_named_and_not_given_out(tmp_path: Path) -> None:
    file = tmp_path / "block-hashes"
    trust = ClusterTrust(None, block_hash_key_file=file)
    trust.begin()
    material = await trust.material()
    assert (material.block_hash_key, material.block_hash_key_file) == (b"", str(file))
    with pytest.raises(SecretUnusable, match="cannot be read"):
        Trust(material)

    file.write_text("ab" * 32)
    file.chmod(0o600)
    assert Trust(material).block_hash_key == bytes.fromhex("ab" * 32)


def test_a_process_keeps_the_key_and_the_certificates_that_it_got_first() -> None:
    first, second = (
        TrustMaterial(1, (b"s" * 32,), block_hash_key=b"a" * 32, tls=draw_tls_material()),
        TrustMaterial.draw(),
    )
    trust = Trust(first)
    tls = trust.tls
    assert tls is not None
    trust.use(second)
    assert trust.generation == second.generation
    assert (trust.block_hash_key, trust.tls) == (b"a" * 32, tls)


def test_a_process_that_was_given_nothing_has_no_key() -> None:
    with pytest.raises(Untrusted, match="not been given"):
        assert Trust().block_hash_key


def test_nothing_secret_is_shown() -> None:
    material = TrustMaterial(1, (b"s" * 32,), block_hash_key=b"k" * 32, tls=draw_tls_material())
    assert not any(secret in repr(material) for secret in ("ssss", "kkkk", "PRIVATE"))


@pytest.mark.parametrize("value", [True, False, {"ca": "/ca.crt", "certificate": "/tls.crt", "key": "/tls.key"}])
def test_internal_tls_is_a_switch_or_files(value: object) -> None:
    ClusterConfig.model_validate({"internal_tls": value})
