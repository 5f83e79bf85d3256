"""Tokens of simulated requests: counted, and never written down.

The scheduler and the router ask three things of a request's tokens: how many there are, what the hashes of their blocks
are, and whether the last one ends the request. So a list that knows its length and its prompt's hashes stands for the
tokens, and a hasher reads the hashes from it. A prompt of 100 000 tokens takes as much memory as one of 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Final, SupportsIndex, overload

import numpy as np

from actors.core.outputs.model_runner_output import NO_TOKEN
from actors.core.outputs.scheduler_output import StepBatch
from actors.core.requests.block_hash import PUBLIC_KEY, BlockHash, BlockHasher, ExtraKeys
from actors.core.requests.request import Request
from actors.costs.step_shape import Ints
from cluster.simulation.workloads.workload_request import HASHED_TOKENS

TOKEN: Final = 0
"""The token that every simulated step samples."""
_OWN: Final = 1 << 59
"""Marks the keys of blocks that no other request has. Indexes keep 60 bits of a key."""
_BLOCKS_BITS: Final = 22
_WHOLE: Final = bytes(8)
"""The second half of the hash of a whole block."""


class PromptIdentity:
    """The parts of a workload's request that decide the hashes of its blocks.

    number:       of the request in its workload
    block_hashes: see WorkloadRequest
    """

    __slots__ = ("_hashed_size", "_prompt_hashes", "block_hashes", "num_prompt_tokens", "number")

    def __init__(self, number: int, num_prompt_tokens: int, block_hashes: tuple[int, ...]) -> None:
        self.number = number
        self.num_prompt_tokens = num_prompt_tokens
        self.block_hashes = block_hashes
        self._hashed_size = 0
        self._prompt_hashes: list[BlockHash] = []

    def key(self, block: int, block_size: int) -> int:
        """Return the key of a block: the workload's if the whole block is in the prompt, else one of its own."""
        if block < len(self.block_hashes) and (block + 1) * block_size <= self.num_prompt_tokens:
            return self.block_hashes[block]
        return _OWN | self.number << _BLOCKS_BITS | block

    def prompt_hashes(self, block_size: int) -> list[BlockHash]:
        """Return the hashes of the prompt's full blocks, which are made once, for the router and all engines."""
        if self._hashed_size != block_size:
            self._hashed_size = block_size
            blocks = range(self.num_prompt_tokens // block_size)
            self._prompt_hashes = [self.key(block, block_size).to_bytes(8, "little") + _WHOLE for block in blocks]
        return self._prompt_hashes


class CountedTokens(list[int]):
    """A list of so many TOKENs, without the tokens."""

    __slots__ = ("_num_tokens", "identity")

    def __init__(self, num_tokens: int, identity: PromptIdentity) -> None:
        """identity: of the request whose first tokens these are"""
        super().__init__()
        self._num_tokens = num_tokens
        self.identity = identity

    def __len__(self) -> int:
        return self._num_tokens

    def __bool__(self) -> bool:
        return self._num_tokens > 0

    def __iter__(self) -> Iterator[int]:
        return repeat(TOKEN, self._num_tokens)

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | list[int]:
        """Return a token, or some; the first ones are counted, too."""
        if isinstance(index, slice):
            found = range(*index.indices(self._num_tokens))
            is_first = not found.start and found.step == 1
            return CountedTokens(len(found), self.identity) if is_first else [TOKEN] * len(found)
        if not -self._num_tokens <= index.__index__() < self._num_tokens:
            raise IndexError(f"token {index} of {self._num_tokens}")
        return TOKEN

    def __add__(self, other: list[int]) -> CountedTokens:  # type: ignore[override]  # a list of the same tokens
        return CountedTokens(self._num_tokens + len(other), self.identity)

    def append(self, token_id: int) -> None:
        """Count one more token."""
        self._num_tokens += 1

    def extend(self, token_ids: Iterable[int]) -> None:
        """Count more tokens."""
        self._num_tokens += sum(1 for _ in token_ids)

    def grow(self, num_tokens: int) -> None:
        """Count so many more tokens."""
        self._num_tokens += num_tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountedTokens) and len(self) == len(other) and self.identity is other.identity

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None


class WorkloadHasher(BlockHasher):
    """Gives the blocks of CountedTokens the hashes that their workload says. They are not keyed digests."""

    __slots__ = ()

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, PUBLIC_KEY)

    def extend(self, block_hashes: list[BlockHash], token_ids: Sequence[int], keys: ExtraKeys) -> None:
        """Append the hashes of the full blocks that block_hashes does not have yet."""
        assert isinstance(token_ids, CountedTokens), "a simulated request has counted tokens"
        identity, size = token_ids.identity, self.block_size
        first, last = len(block_hashes), len(token_ids) // size
        known = identity.prompt_hashes(size)
        block_hashes += known[first:last]
        block_hashes += [_hash_of(identity.key(block, size)) for block in range(max(first, len(known)), last)]

    def name_all(self, token_ids: Sequence[int], keys: ExtraKeys) -> BlockHash:
        """Return a hash of what the request is."""
        assert isinstance(token_ids, CountedTokens), "a simulated request has counted tokens"
        return _hash_of(_OWN | token_ids.identity.number)

    def name_tail(
        self, block_hashes: Sequence[BlockHash], token_ids: Sequence[int], keys: ExtraKeys
    ) -> BlockHash | None:
        """Return a hash of the tokens after the last full block; None if there are none, or nobody else has them."""
        assert isinstance(token_ids, CountedTokens), "a simulated request has counted tokens"
        num_full, num_left = divmod(len(token_ids), self.block_size)
        hashes = token_ids.identity.block_hashes
        if not num_left or num_full >= len(hashes):
            return None
        return _hash_of(hashes[num_full], num_left)


def sampled_tokens(batch: StepBatch, requests: Mapping[str, Request]) -> Ints:
    """Return a token for each request of a step all of whose tokens are computed, [num_requests, 1].

    requests: the engine's, by id; those of the step that are not among them have ended
    """
    tokens = np.full((len(batch), 1), TOKEN, dtype=np.int64)
    for index in range(batch.num_plain, len(batch)):
        request = requests.get(batch.req_ids[index])
        num_computed = int(batch.num_computed_tokens[index] + batch.num_new_tokens[index])
        if request is not None and num_computed < request.num_tokens:
            tokens[index] = NO_TOKEN
    return tokens


def check_block_size(block_size: int, *, has_hashes: bool) -> None:
    """Raise ValueError if a workload's hashes are not those of blocks of this size."""
    if has_hashes and block_size != HASHED_TOKENS:
        raise ValueError(
            f"the workload has hashes of blocks of {HASHED_TOKENS} tokens, and the engines' blocks have {block_size}: "
            f"set the engines' block_size to {HASHED_TOKENS}, or leave the hashes out"
        )


def _hash_of(key: int, detail: int = 0) -> BlockHash:
    return key.to_bytes(8, "little") + detail.to_bytes(8, "little")
