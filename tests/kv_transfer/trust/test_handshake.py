"""Challenge and proof as pure machines: who proves what to whom, and what does not pass for a proof."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import NotRaypd, OtherParty, OtherProtocol, Untrusted, WrongSecret
from kv_transfer.trust.handshake import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, Acceptor, Dialer, Party, Proven, refusal
from kv_transfer.trust.secret import ClusterSecret, ClusterSecrets, KeySource, Purpose

SECRETS = ClusterSecrets.draw()
INGRESS, DECODE = Party("ingress-0", 3), Party("decode-0", 7)


def new_dialer(secrets: KeySource = SECRETS, peer: Party = DECODE, bound: bytes = b"") -> Dialer:
    return Dialer(secrets, Purpose.SESSION, INGRESS, peer, bound=bound)


def new_acceptor(secrets: KeySource = SECRETS, own: Party = DECODE, bound: bytes = b"") -> Acceptor:
    return Acceptor(secrets, Purpose.SESSION, own, bound=bound)


def shake(dialer: Dialer, acceptor: Acceptor) -> tuple[Proven, Proven]:
    proof, at_dialer = dialer.prove(acceptor.answer(dialer.challenge))
    return at_dialer, acceptor.verify(proof)


def test_two_ends_that_know_the_secret_know_each_other_and_have_a_key_of_their_own() -> None:
    at_dialer, at_acceptor = shake(new_dialer(), new_acceptor())
    for proven in (at_dialer, at_acceptor):
        assert (proven.purpose, proven.dialer, proven.acceptor) == (Purpose.SESSION, INGRESS, DECODE)
    keys = at_dialer.session_key.keys(Purpose.DATA_LINK)
    assert keys == at_acceptor.session_key.keys(Purpose.DATA_LINK)
    other, _ = shake(new_dialer(), new_acceptor())
    assert other.session_key.keys(Purpose.DATA_LINK) != keys


def test_a_key_that_a_handshake_has_exported_proves_what_belongs_to_it() -> None:
    at_dialer, at_acceptor = shake(new_dialer(), new_acceptor())
    shake(new_dialer(at_dialer.session_key), new_acceptor(at_acceptor.session_key))
    with pytest.raises(WrongSecret):
        shake(new_dialer(at_dialer.session_key), new_acceptor(shake(new_dialer(), new_acceptor())[1].session_key))


def test_a_dialer_without_the_secret_learns_nothing_and_is_refused() -> None:
    dialer, acceptor = new_dialer(ClusterSecrets.draw()), new_acceptor()
    answer = acceptor.answer(dialer.challenge)
    assert b"decode" not in answer
    with pytest.raises(WrongSecret, match="does not know the cluster's secret"):
        dialer.prove(answer)


def test_a_proof_under_another_secret_is_refused() -> None:
    stranger = ClusterSecrets.draw()
    dialer, acceptor = new_dialer(stranger), new_acceptor()
    acceptor.answer(dialer.challenge)
    # The stranger answers itself, to get a proof by its own secret.
    accomplice = Acceptor(stranger, Purpose.SESSION, DECODE, draw=lambda _: acceptor.nonce)
    proof, _ = dialer.prove(accomplice.answer(dialer.challenge))
    with pytest.raises(WrongSecret, match="proof of the cluster's secret is wrong"):
        acceptor.verify(proof)


def test_an_acceptor_without_the_secret_gets_no_proof() -> None:
    with pytest.raises(WrongSecret):
        shake(new_dialer(), new_acceptor(ClusterSecrets.draw()))


def test_another_incarnation_is_told_from_another_cluster_but_only_to_who_knows_the_secret() -> None:
    with pytest.raises(OtherParty, match="not decode-0, incarnation 6"):
        shake(new_dialer(peer=Party("decode-0", 6)), new_acceptor())
    with pytest.raises(WrongSecret):
        shake(new_dialer(ClusterSecrets.draw(), peer=Party("decode-0", 6)), new_acceptor())


def test_an_acceptor_that_was_not_meant_takes_no_proof_either() -> None:
    dialer, acceptor = new_dialer(peer=Party("decode-0", 6)), new_acceptor()
    acceptor.answer(dialer.challenge)
    meant = Acceptor(SECRETS, Purpose.SESSION, Party("decode-0", 6), draw=lambda _: acceptor.nonce)
    proof, _ = dialer.prove(meant.answer(dialer.challenge))
    with pytest.raises(OtherParty):
        acceptor.verify(proof)


def test_a_proof_for_one_purpose_is_none_for_another() -> None:
    dialer = Dialer(SECRETS, Purpose.CONTROL, INGRESS, DECODE)
    with pytest.raises(Untrusted, match="session connection for something else"):
        new_acceptor().answer(dialer.challenge)


def test_a_replayed_proof_is_refused_because_the_nonce_is_another_one() -> None:
    dialer, acceptor = new_dialer(), new_acceptor()
    proof, _ = dialer.prove(acceptor.answer(dialer.challenge))
    acceptor.verify(proof)
    later = new_acceptor()
    later.answer(dialer.challenge)
    with pytest.raises(WrongSecret):
        later.verify(proof)


def test_an_acceptors_own_proof_reflected_is_refused() -> None:
    dialer, acceptor = new_dialer(ClusterSecrets.draw()), new_acceptor()
    answer = acceptor.answer(dialer.challenge)
    mac = answer[-32:]
    reflected = refusal()[:6] + b"\x03" + b"\x91\xc4\x20" + mac
    with pytest.raises(WrongSecret):
        acceptor.verify(reflected)


def test_what_the_two_ends_bind_in_must_be_the_same() -> None:
    shake(new_dialer(bound=b"stream 1"), new_acceptor(bound=b"stream 1"))
    with pytest.raises(WrongSecret):
        shake(new_dialer(bound=b"stream 1"), new_acceptor(bound=b"stream 2"))


@pytest.mark.parametrize("known", [(0,), (1,), (0, 1), (1, 0)])
def test_while_a_secret_is_replaced_ends_with_one_in_common_agree(known: tuple[int, ...]) -> None:
    drawn = [ClusterSecret.draw(), ClusterSecret.draw()]
    both, some = ClusterSecrets(drawn), ClusterSecrets([drawn[index] for index in known])
    for one, other in ((both, some), (some, both)):
        at_dialer, at_acceptor = shake(new_dialer(one), new_acceptor(other))
        assert at_dialer.session_key.tag(b"") == at_acceptor.session_key.tag(b"")


@pytest.mark.parametrize(
    ("version", "age"), [(PROTOCOL_VERSION - 1, "an older raypd"), (PROTOCOL_VERSION + 1, "a newer raypd")]
)
def test_another_version_is_refused_by_its_number_not_as_a_wrong_secret(version: int, age: str) -> None:
    dialer, acceptor = new_dialer(), new_acceptor()
    answer = acceptor.answer(dialer.challenge)
    for message, read in ((dialer.challenge, new_acceptor().answer), (answer, dialer.prove), (refusal(), dialer.prove)):
        of_version = message[:5] + bytes([version]) + message[6:]
        with pytest.raises(
            OtherProtocol,
            match=f"speaks handshake protocol {version} and is {age}: this process speaks {PROTOCOL_VERSION}",
        ):
            read(of_version)


def test_a_refusal_says_nothing_but_the_version() -> None:
    assert len(refusal()) == 7
    with pytest.raises(Untrusted, match="refused the handshake"):
        new_dialer().prove(refusal())


def test_messages_out_of_order_are_refused() -> None:
    dialer, acceptor = new_dialer(), new_acceptor()
    with pytest.raises(NotRaypd, match="before a challenge"):
        acceptor.verify(dialer.challenge)
    with pytest.raises(NotRaypd, match="in the handshake's order"):
        dialer.prove(dialer.challenge)


@given(st.binary(max_size=MAX_MESSAGE_BYTES + 10))
def test_whatever_comes_instead_of_a_message_is_refused_as_no_handshake(noise: bytes) -> None:
    dialer, acceptor = new_dialer(), new_acceptor()
    for read in (acceptor.answer, dialer.prove):
        with pytest.raises(Untrusted):
            read(noise)
    acceptor.answer(dialer.challenge)
    with pytest.raises(Untrusted):
        acceptor.verify(noise)


@given(st.data())
def test_a_message_with_any_byte_changed_proves_nothing(data: st.DataObject) -> None:
    dialer, acceptor = new_dialer(), new_acceptor()
    changed = data.draw(st.integers(0, 2))

    def passed_on(index: int, message: bytes) -> bytes:
        if index != changed:
            return message
        place, by = data.draw(st.integers(0, len(message) - 1)), data.draw(st.integers(1, 255))
        return message[:place] + bytes([message[place] ^ by]) + message[place + 1 :]

    def shake_through() -> None:
        answer = acceptor.answer(passed_on(0, dialer.challenge))
        proof, _ = dialer.prove(passed_on(1, answer))
        acceptor.verify(passed_on(2, proof))

    with pytest.raises(Untrusted):
        shake_through()
