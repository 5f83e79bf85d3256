"""Challenge and proof in both directions: the dialer and the acceptor show each other that they know the secret.

    dialer                                         acceptor
    Challenge(purpose, both parties, its nonce) ->
                                                <- Answer(its nonce, a proof under each secret that it accepts)
    Proof(under the secret that both know)      ->

The objects here are pure: bytes in, bytes out; the caller has the clock and the connection. A proof is HMAC-SHA256 (RFC
2104) over a label and the transcript. The transcript is a hash of the whole Challenge (protocol version, purpose, names
and incarnations of both ends, the dialer's nonce), of the acceptor's nonce, and of bytes that both ends know of their
connection. So a proof holds for one purpose, one pair of ends and one connection, and

- nobody can reflect a proof: each direction has a label of its own;
- nobody can replay a proof: both ends draw a fresh nonce for each connection;
- an acceptor that is not the one that was meant proves under a third label that it belongs to the cluster: only a
  dialer that knows the secret can tell;
- no fact about raypd but this protocol's version is told before a proof.

Every message of every version begins with a magic word and the version: older and newer ends refuse each other by
number. The version grows with every change of an internal message that an older raypd would misread.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec

from kv_transfer.errors import NotRaypd, OtherParty, OtherProtocol, Untrusted, WrongSecret
from kv_transfer.trust.secret import MAX_ACCEPTED, KeySource, Purpose, SessionKey

PROTOCOL_VERSION: Final = 3
MAX_MESSAGE_BYTES: Final = 4096
NUM_NONCE_BYTES: Final = 32
_NUM_PROOF_BYTES: Final = 32
_MAGIC: Final = b"raypd"
_NUM_HEADER_BYTES: Final = len(_MAGIC) + 2
_CHALLENGE, _ANSWER, _PROOF, _REFUSAL = range(1, 5)

_DIALER: Final = b"raypd handshake: dialer"
_ACCEPTOR: Final = b"raypd handshake: acceptor"
_OTHER_ACCEPTOR: Final = b"raypd handshake: acceptor, but another than was meant"
_EXPORT: Final = b"raypd handshake: exported key"

_T = TypeVar("_T")
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NUM_NONCE_BYTES, max_length=NUM_NONCE_BYTES)]
_Mac = Annotated[bytes, msgspec.Meta(min_length=_NUM_PROOF_BYTES, max_length=_NUM_PROOF_BYTES)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Incarnation = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Party(msgspec.Struct, frozen=True, array_like=True):
    """One end of a connection: the name of an engine, a rank or an ingress, and its incarnation."""

    name: _Name
    incarnation: _Incarnation

    def __str__(self) -> str:
        return f"{self.name}, incarnation {self.incarnation}"


class _Challenge(msgspec.Struct, frozen=True, array_like=True):
    purpose: Annotated[str, msgspec.Meta(max_length=64)]
    dialer: Party
    acceptor: Party
    nonce: _Nonce


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    nonce: _Nonce
    proofs: Annotated[tuple[_Mac, ...], msgspec.Meta(min_length=1, max_length=MAX_ACCEPTED)]


class _Proof(msgspec.Struct, frozen=True, array_like=True):
    proof: _Mac


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_challenge: Final = msgspec.msgpack.Decoder(_Challenge).decode
_decode_answer: Final = msgspec.msgpack.Decoder(_Answer).decode
_decode_proof: Final = msgspec.msgpack.Decoder(_Proof).decode


@dataclass(frozen=True, slots=True)
class Proven:
    """The result of a handshake: the two ends of a connection have proven themselves.

    session_key: known to these two ends alone, and different for each handshake
    """

    purpose: Purpose
    dialer: Party
    acceptor: Party
    session_key: SessionKey


class Dialer:
    """The end that opens the connection. An object serves one handshake."""

    def __init__(
        self,
        secrets_: KeySource,
        purpose: Purpose,
        own: Party,
        peer: Party,
        *,
        bound: bytes = b"",
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """own: this end; peer: the end that has to answer

        bound: bytes that both ends know of the connection, and that the proofs have to cover
        draw:  returns so many random bytes
        """
        self._keys = secrets_.keys(purpose)
        self._purpose, self._own, self._peer, self._bound = purpose, own, peer, bound
        challenge = _Challenge(purpose.value, own, peer, draw(NUM_NONCE_BYTES))
        self.challenge: Final = _frame(_CHALLENGE, _encode(challenge))
        """The first message."""

    def prove(self, answer: bytes) -> tuple[bytes, Proven]:
        """Check the acceptor's answer; return the last message, and what is proven.

        Raises WrongSecret, OtherParty, OtherProtocol or NotRaypd.
        """
        said = _read(answer, _ANSWER, _decode_answer)
        transcript = _transcript(self.challenge, said.nonce, self._bound)
        if (key := self._common_key(said.proofs, _ACCEPTOR, transcript)) is None:
            if self._common_key(said.proofs, _OTHER_ACCEPTOR, transcript) is not None:
                raise OtherParty(f"it belongs to this cluster, but is not {self._peer}")
            raise WrongSecret("it does not know the cluster's secret")
        proof = _frame(_PROOF, _encode(_Proof(_mac(key, _DIALER, transcript))))
        return proof, Proven(self._purpose, self._own, self._peer, _export(key, transcript))

    def _common_key(self, proofs: tuple[bytes, ...], label: bytes, transcript: bytes) -> bytes | None:
        for key in self._keys:
            expected = _mac(key, label, transcript)
            if any(hmac.compare_digest(expected, proof) for proof in proofs):
                return key
        return None


class Acceptor:
    """The end that was called. An object serves one handshake."""

    def __init__(
        self,
        secrets_: KeySource,
        purpose: Purpose,
        own: Party,
        *,
        bound: bytes = b"",
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """own: this end; bound, draw: as for the Dialer"""
        self._keys = secrets_.keys(purpose)
        self._purpose, self._own, self._bound = purpose, own, bound
        self.nonce = draw(NUM_NONCE_BYTES)
        self._challenge = b""
        self._asked: _Challenge | None = None

    def answer(self, challenge: bytes) -> bytes:
        """Return the answer to the dialer's first message. Raises OtherProtocol, NotRaypd or Untrusted."""
        transcript = self._hear(challenge)
        label = _ACCEPTOR if self._is_meant else _OTHER_ACCEPTOR
        proofs = tuple(_mac(key, label, transcript) for key in self._keys)
        return _frame(_ANSWER, _encode(_Answer(self.nonce, proofs)))

    def resume(self, challenge: bytes, nonce: bytes) -> None:
        """Take over from another Acceptor that has answered this challenge with this nonce. Raises as answer() does."""
        self.nonce = nonce
        self._hear(challenge)

    def verify(self, proof: bytes) -> Proven:
        """Check the dialer's last message; return what is proven.

        Raises WrongSecret, OtherParty, OtherProtocol or NotRaypd.
        """
        if (asked := self._asked) is None:
            raise NotRaypd("a proof came before a challenge")
        said = _read(proof, _PROOF, _decode_proof)
        if not self._is_meant:
            raise OtherParty(f"{asked.dialer} wants to reach {asked.acceptor}, and this process is {self._own}")
        transcript = _transcript(self._challenge, self.nonce, self._bound)
        for key in self._keys:
            if hmac.compare_digest(_mac(key, _DIALER, transcript), said.proof):
                return Proven(self._purpose, asked.dialer, self._own, _export(key, transcript))
        raise WrongSecret("its proof of the cluster's secret is wrong")

    @property
    def _is_meant(self) -> bool:
        return self._asked is not None and self._asked.acceptor == self._own

    def _hear(self, challenge: bytes) -> bytes:
        asked = _read(challenge, _CHALLENGE, _decode_challenge)
        if asked.purpose != self._purpose:
            raise Untrusted(f"it wants to use a {self._purpose} connection for something else")
        self._asked, self._challenge = asked, challenge
        return _transcript(challenge, self.nonce, self._bound)


def refusal() -> bytes:
    """Return the message by which an acceptor refuses: it tells this protocol's version, and nothing else."""
    return _frame(_REFUSAL, b"")


def _frame(kind: int, body: bytes) -> bytes:
    frame = _MAGIC + bytes((PROTOCOL_VERSION, kind)) + body
    assert len(frame) <= MAX_MESSAGE_BYTES, "every field of every message has a bound"
    return frame


def _read(frame: bytes, kind: int, decode: Callable[[bytes], _T]) -> _T:
    if len(frame) > MAX_MESSAGE_BYTES or len(frame) < _NUM_HEADER_BYTES or not frame.startswith(_MAGIC):
        raise NotRaypd("it does not speak raypd's handshake: it is an older raypd or another program")
    version, found = frame[len(_MAGIC)], frame[len(_MAGIC) + 1]
    if version != PROTOCOL_VERSION:
        age = "an older" if version < PROTOCOL_VERSION else "a newer"
        raise OtherProtocol(
            f"it speaks handshake protocol {version} and is {age} raypd: this process speaks {PROTOCOL_VERSION}"
        )
    if found == _REFUSAL:
        raise Untrusted("it refused the handshake")
    try:
        if found != kind:
            raise NotRaypd("its messages are not in the handshake's order")
        return decode(frame[_NUM_HEADER_BYTES:])
    except (msgspec.MsgspecError, ValueError) as error:
        raise NotRaypd(f"its message is not one of the handshake: {error}") from None


def _transcript(challenge: bytes, nonce: bytes, bound: bytes) -> bytes:
    """Hash the parts of a handshake that both ends have seen, each with its length in front."""
    digest = hashlib.sha256()
    for part in (challenge, nonce, bound):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def _mac(key: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, label + b"\0" + transcript, hashlib.sha256)


def _export(key: bytes, transcript: bytes) -> SessionKey:
    return SessionKey(_mac(key, _EXPORT, transcript))
