"""The handshake in front of a gRPC call, in the metadata, which gRPC bounds: no message is read before the proof.

handshake.py has the handshake itself. The dialer gets the acceptor's answer by a call of its own (CHALLENGE_METHOD: the
Challenge is in the call's metadata, the answer and a ticket are in its trailing metadata, no message goes in either
direction). Then the dialer makes the call that it needs, with Challenge, ticket and Proof in the metadata. The acceptor
checks these before it reads a message, and shows in its initial metadata that it has the handshake's key. The dialer
sends no message before it has seen that: another process may listen there by now.

The acceptor keeps no state for a stranger. The ticket holds all that the acceptor has to know of its own answer, its
time and its nonce, under a key that the acceptor draws at its start. The nonces of valid proofs are kept until their
tickets expire, so that each proof counts once.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from kv_transfer.errors import NotRaypd, OtherProtocol, Untrusted
from kv_transfer.trust.handshake import (
    MAX_MESSAGE_BYTES,
    NUM_NONCE_BYTES,
    PROTOCOL_VERSION,
    Acceptor,
    Dialer,
    Party,
    Proven,
)
from kv_transfer.trust.membership import Member
from kv_transfer.trust.refusals import Refusals
from kv_transfer.trust.secret import KeySource, Purpose

CHALLENGE_METHOD: Final = "/raypd.trust.v1.Trust/Challenge"
METADATA_LIMITS: Final = (
    ("grpc.max_metadata_size", MAX_MESSAGE_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_MESSAGE_BYTES),
)
"""Options of servers and channels that bound the metadata, which comes before a proof."""

_PURPOSE: Final = "raypd-purpose"
_CHALLENGE: Final = "raypd-challenge-bin"
_ANSWER: Final = "raypd-answer-bin"
_TICKET: Final = "raypd-ticket-bin"
_PROOF: Final = "raypd-proof-bin"
_CONFIRMATION: Final = "raypd-confirmation-bin"
_CONFIRMED: Final = b"acceptor of a gRPC call"
_TICKET_LIFETIME_S: Final = 10.0
_MAX_USED: Final = 100_000
_TIME: Final = struct.Struct("!d")
_NUM_TICKET_BYTES: Final = _TIME.size + NUM_NONCE_BYTES + hashlib.sha256().digest_size


class GrpcAcceptor:
    """The accepting end of all calls of one server. The object belongs to one event loop."""

    def __init__(
        self, secrets_: KeySource, refusals: Refusals | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._secrets = secrets_
        self.refusals: Final = refusals or Refusals()
        self._clock = clock
        self._parties: dict[Purpose, Party] = {}
        self._ticket_key = secrets.token_bytes(32)
        self._used: dict[bytes, float] = {}
        """The nonces of valid proofs, and when their tickets expire; the oldest first."""

    def register(self, purpose: Purpose, own: Party) -> None:
        """Answer challenges for this purpose, as this party."""
        self._parties[purpose] = own

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handler for challenges, for the server whose other calls check() protects."""
        service, method = CHALLENGE_METHOD.strip("/").split("/")
        # A stream from which nothing is read: gRPC would receive a unary call's message before this handler runs.
        serve: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._answer)
        return grpc.method_handlers_generic_handler(service, {method: serve})

    async def check(self, context: grpc.aio.ServicerContext[Any, Any], purpose: Purpose) -> Proven:
        """Check the proof of a call, and confirm it to the dialer; return what is proven.

        If the proof is not valid, the call is aborted, and its abort is raised.
        """
        try:
            proven = self._verify(_fields(context.invocation_metadata()), purpose)
        except Untrusted as error:
            await self._refuse(context, purpose, error)
        await context.send_initial_metadata(((_CONFIRMATION, proven.session_key.tag(_CONFIRMED)),))
        return proven

    async def _answer(self, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        fields = _fields(context.invocation_metadata())
        try:
            purpose = _purpose(fields)
            challenge = _bytes(fields, _CHALLENGE)
            acceptor = self._acceptor(purpose)
            answer = acceptor.answer(challenge)
        except Untrusted as error:
            await self._refuse(context, "a challenge", error)
        ticket = self._make_ticket(challenge, acceptor.nonce, self._clock())
        # Trailing metadata, because grpc.aio loses the initial metadata if the call's end arrives together with them.
        context.set_trailing_metadata(((_ANSWER, answer), (_TICKET, ticket)))

    def _acceptor(self, purpose: Purpose) -> Acceptor:
        if (own := self._parties.get(purpose)) is None:
            raise Untrusted("this server accepts no connection for that purpose")
        return Acceptor(self._secrets, purpose, own)

    def _verify(self, fields: dict[str, str | bytes], purpose: Purpose) -> Proven:
        if _PROOF not in fields:
            raise NotRaypd(f"it sent no proof of the cluster's secret (handshake protocol {PROTOCOL_VERSION})")
        challenge, ticket, proof = (_bytes(fields, name) for name in (_CHALLENGE, _TICKET, _PROOF))
        now_s = self._clock()
        if len(ticket) != _NUM_TICKET_BYTES:
            raise NotRaypd(f"its ticket has {len(ticket)} bytes, not {_NUM_TICKET_BYTES}")
        (made_s,) = _TIME.unpack_from(ticket)
        nonce = ticket[_TIME.size : _TIME.size + NUM_NONCE_BYTES]
        if not hmac.compare_digest(self._make_ticket(challenge, nonce, made_s), ticket):
            raise NotRaypd("its ticket was not made by this process, or not for this challenge")
        if now_s > made_s + _TICKET_LIFETIME_S:
            raise NotRaypd("its proof came too late")
        acceptor = self._acceptor(purpose)
        acceptor.resume(challenge, nonce)
        proven = acceptor.verify(proof)
        self._use(nonce, made_s + _TICKET_LIFETIME_S, now_s)
        return proven

    def _use(self, nonce: bytes, expires_s: float, now_s: float) -> None:
        """Note that a valid proof was used. Raises NotRaypd if it was used before."""
        while self._used and next(iter(self._used.values())) < now_s:
            del self._used[next(iter(self._used))]
        if nonce in self._used:
            raise NotRaypd("its proof has been used before")
        if len(self._used) >= _MAX_USED:
            raise Untrusted("too many connections were made within a short time")
        self._used[nonce] = expires_s

    def _make_ticket(self, challenge: bytes, nonce: bytes, made_s: float) -> bytes:
        stated = _TIME.pack(made_s) + nonce
        return stated + hmac.digest(self._ticket_key, stated + challenge, hashlib.sha256)

    async def _refuse(self, context: grpc.aio.ServicerContext[Any, Any], purpose: str, error: Untrusted) -> NoReturn:
        self.refusals.add(purpose, context.peer(), error)
        code = grpc.StatusCode.UNAUTHENTICATED
        if isinstance(error, OtherProtocol):
            code = grpc.StatusCode.FAILED_PRECONDITION
        await context.abort(code, f"refused by raypd, handshake protocol {PROTOCOL_VERSION}: {error}")
        raise AssertionError("abort() raises")


class GrpcProof:
    """The dialling end's proof for one call: the call's metadata, and the check of the acceptor's confirmation."""

    def __init__(self, metadata: Sequence[tuple[str, str | bytes]], proven: Proven) -> None:
        self.metadata: Final = tuple(metadata)
        self.proven: Final = proven

    async def confirm(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> Proven:
        """Wait until the call's acceptor has confirmed the proof; send no message before. Returns what is proven.

        Raises Untrusted, or AioRpcError if the call fails for another reason.
        """
        metadata = _fields(await call.initial_metadata())
        tag = metadata.get(_CONFIRMATION)
        if isinstance(tag, bytes) and hmac.compare_digest(tag, self.proven.session_key.tag(_CONFIRMED)):
            return self.proven
        return await _raise_refusal(call)


async def prove(
    channel: grpc.aio.Channel,
    member: Member,
    purpose: Purpose,
    peer: Party,
    timeout_s: float,
    *,
    wait_for_ready: bool = True,
) -> GrpcProof:
    """Challenge the channel's other end and check its answer; return the proof with which to make a call.

    peer:           the process that has to answer
    wait_for_ready: whether to wait until a server listens there
    Raises Untrusted, or AioRpcError if the call fails for another reason.
    """
    dialer = Dialer(member.trust, purpose, member.party, peer)
    challenge: tuple[tuple[str, str | bytes], ...] = ((_PURPOSE, purpose.name), (_CHALLENGE, dialer.challenge))
    method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(CHALLENGE_METHOD)
    call = method(metadata=challenge, timeout=timeout_s, wait_for_ready=wait_for_ready)
    try:
        if await call.code() is not grpc.StatusCode.OK:
            await _raise_refusal(call)
        fields = _fields(await call.trailing_metadata())
        proof, proven = dialer.prove(_bytes(fields, _ANSWER))
        return GrpcProof((*challenge, (_TICKET, _bytes(fields, _TICKET)), (_PROOF, proof)), proven)
    finally:
        call.cancel()


async def _raise_refusal(call: grpc.aio.StreamStreamCall[Any, Any]) -> NoReturn:
    """Raise the end of a call as an Untrusted if the other end refused it or is no raypd, otherwise as AioRpcError."""
    if not call.done():
        raise NotRaypd("it does not speak raypd's handshake: it is an older raypd or another program")
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.UNIMPLEMENTED:
        raise NotRaypd("it has no method for raypd's handshake: it is an older raypd or another program")
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        raise OtherProtocol(details or "it speaks another protocol")
    if code in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK}:
        raise Untrusted(details or "it did not prove itself")
    raise grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata(), details=details)


def _fields(metadata: Any) -> dict[str, str | bytes]:
    return dict(metadata or ())


def _purpose(fields: dict[str, str | bytes]) -> Purpose:
    try:
        return Purpose[str(fields[_PURPOSE])]
    except KeyError:
        raise NotRaypd("its metadata names no known purpose") from None


def _bytes(fields: dict[str, str | bytes], name: str) -> bytes:
    value = fields.get(name)
    if not isinstance(value, bytes):
        raise NotRaypd(f"its metadata lacks {name}")
    return value
