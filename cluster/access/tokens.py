"""The token file: the hash of each bearer token, and what the token allows.

A token has 256 random bits, so its plain SHA-256 cannot be inverted; slow hashes are for passwords that people make up.
Tokens are looked up by a hash that is keyed with a random key of this process, and compared in constant time, so that
response times reveal nothing about how close a guess is.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from cluster.access.aims import SloConfig
from cluster.access.allowance import BURST_S, Allowance, AllowanceLimits
from cluster.access.caller import Caller
from cluster.errors import InvalidConfig
from kv_transfer.trust.watched_file import WatchedFiles

logger = logging.getLogger(__name__)

TOKEN_PREFIX: Final = "raypd-"
"""The prefix of every token, by which secret scanners and people recognize a leaked one."""
_NUM_SECRET_BYTES: Final = 32
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TokenEntry(_Settings):
    """The entry of one bearer token in the token file. The limits hold at each ingress."""

    name: _Name = Field(description="Name of the token in logs and errors.")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of the token, as `raypd token` prints it.")
    tenant: _Name | None = Field(
        None,
        description="Tenant that the token belongs to; default: the token's name. Tenants share no cached prompts.",
    )
    admin: bool = Field(False, description="Whether the token may use AdminService.")
    requests_per_s: float | None = Field(None, gt=0, description="Limit on requests per second; default: no limit.")
    tokens_per_s: float | None = Field(
        None, gt=0, description="Limit on prompt and output tokens per second; default: no limit."
    )
    concurrent: int | None = Field(None, ge=1, description="Limit on concurrent requests; default: no limit.")
    burst_s: float = Field(BURST_S, gt=0, description="Seconds of unused requests and tokens that can be saved up.")
    highest_priority: int = Field(
        0, description="Lowest number that the priority of requests may have; lower numbers go first."
    )
    adapters: frozenset[str] | None = Field(None, description="LoRA adapters that requests may use; default: any.")

    slo: SloConfig = Field(SloConfig(), description="Aims of requests that give none; default: the cluster's aims.")
    tightest_slo: SloConfig = Field(
        SloConfig(), description="Smallest aims that requests may give; default: any. No aim gives priority."
    )

    @property
    def limits(self) -> AllowanceLimits:
        """The limits of the token's Allowance."""
        return AllowanceLimits(self.requests_per_s, self.tokens_per_s, self.concurrent, self.burst_s)


class TokenFile(_Settings):
    """The content of the token file."""

    tokens: tuple[TokenEntry, ...]

    @model_validator(mode="after")
    def _are_distinct(self) -> Self:
        for values in ([entry.name for entry in self.tokens], [entry.sha256 for entry in self.tokens]):
            if len(set(values)) < len(values):
                raise ValueError(f"{next(value for value in values if values.count(value) > 1)!r} is there twice")
        return self


def make_token() -> str:
    """Return a new random token."""
    return TOKEN_PREFIX + secrets.token_urlsafe(_NUM_SECRET_BYTES)


def hash_token(token: str) -> str:
    """Return the SHA-256 of a token in hexadecimal digits, as in the token file."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


def read_token_file(path: Path) -> TokenFile:
    """Read and check a token file. Raises InvalidConfig."""
    try:
        return TokenFile.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise InvalidConfig(str(path), [f"cannot be read: {error.strerror}"]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(str(path), [f"is not YAML: {error}"]) from error
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, mistake['loc'])) or 'file'}: {mistake['msg']}" for mistake in error.errors()]
        raise InvalidConfig(str(path), mistakes) from error


class Tokens:
    """The tokens of a token file. Changes of the file take effect within a second.

    If the changed file has a mistake, the log shows it, and the tokens before the change stay valid.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file. Raises InvalidConfig."""
        self._path = path
        self._clock = clock
        self._file = WatchedFiles([path], clock)
        self._key = secrets.token_bytes(_NUM_SECRET_BYTES)
        self._allowances: dict[str, tuple[AllowanceLimits, Allowance]] = {}
        self._callers: dict[bytes, tuple[bytes, Caller]] = {}
        self._file.have_changed()
        self._use(read_token_file(path))

    def find(self, token: str) -> Caller | None:
        """Return the caller with this token; None if the token is not known."""
        self._follow()
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        known = self._callers.get(self._index(digest))
        if known is None or not hmac.compare_digest(known[0], digest):
            return None
        return known[1]

    def _follow(self) -> None:
        if not self._file.have_changed():
            return
        try:
            self._use(read_token_file(self._path))
        except InvalidConfig as error:
            logger.error(
                "cannot read the token file: the earlier tokens stay valid",
                extra={"path": str(self._path), "error": str(error)},
            )
        else:
            logger.info("tokens were read", extra={"path": str(self._path), "num_tokens": len(self._callers)})

    def _use(self, file: TokenFile) -> None:
        callers = {}
        for entry in file.tokens:
            digest = bytes.fromhex(entry.sha256)
            callers[self._index(digest)] = digest, self._caller(entry)
        self._callers = callers

    def _caller(self, entry: TokenEntry) -> Caller:
        limits, allowance = self._allowances.get(entry.name, (None, None))
        if allowance is None:
            allowance = Allowance(entry.name, entry.limits, self._clock)
        elif limits != entry.limits:
            allowance.set_limits(entry.limits)
        # The allowance stays the same object, so that running requests go on counting.
        self._allowances[entry.name] = entry.limits, allowance
        return Caller(
            name=entry.name,
            tenant=entry.tenant or entry.name,
            may_administer=entry.admin,
            highest_priority=entry.highest_priority,
            adapters=entry.adapters,
            slo=entry.slo.aims,
            tightest_slo=entry.tightest_slo.aims,
            allowance=allowance,
        )

    def _index(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._key, digest_size=16).digest()
