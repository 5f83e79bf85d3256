"""Authentication: the first question of gRPC and HTTP alike is who calls."""

from __future__ import annotations

from cluster.access.caller import ANYBODY, Caller
from cluster.access.tokens import Tokens
from cluster.errors import Unauthenticated


class AccessControl:
    """The access control of an ingress, for gRPC and HTTP together: what a token has used counts for both."""

    def __init__(self, tokens: Tokens | None = None) -> None:
        """tokens: None asks for none, and everybody may do everything."""
        self._tokens = tokens

    @property
    def asks_for_tokens(self) -> bool:
        """Whether calls need one."""
        return self._tokens is not None

    def authenticate(self, authorization: str | bytes | None) -> Caller:
        """Return the caller. authorization: the call's header of that name. Raises Unauthenticated."""
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
