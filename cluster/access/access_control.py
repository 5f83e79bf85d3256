"""Authentication of callers by bearer tokens, for gRPC and HTTP alike."""

from __future__ import annotations

from cluster.access.caller import ANYBODY, Caller
from cluster.access.tokens import Tokens
from cluster.errors import Unauthenticated


class AccessControl:
    """The access control of an ingress. gRPC and HTTP share it, so a token's limits hold for both together."""

    def __init__(self, tokens: Tokens | None = None) -> None:
        """tokens: the accepted tokens; with None no token is needed, and every caller may do everything"""
        self._tokens = tokens

    @property
    def asks_for_tokens(self) -> bool:
        """Whether calls need a token."""
        return self._tokens is not None

    def authenticate(self, authorization: str | bytes | None) -> Caller:
        """Return the caller. Raises Unauthenticated.

        authorization: the call's authorization header; None if the call has none
        """
        if self._tokens is None:
            return ANYBODY
        if authorization is None:
            raise Unauthenticated("no token was given; send the header `authorization: Bearer <token>`")
        text = authorization.decode(errors="surrogateescape") if isinstance(authorization, bytes) else authorization
        scheme, _, token = text.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("authorization has another scheme; send `authorization: Bearer <token>`")
        caller = self._tokens.find(token.strip())
        if caller is None:
            raise Unauthenticated("the token is not known here; ask the operator for a valid one")
        return caller
