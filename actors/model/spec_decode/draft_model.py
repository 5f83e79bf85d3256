"""Drafts tokens by a smaller model: any checkpoint with the target's vocabulary, with a KV cache of its own.

It samples as the target does, with the same parameters and the same uniform number at each position. So where the two
agree on the distribution they agree on the token, and a sampled request's drafts are right almost as often as a greedy
one's (docs/decisions/0017).

A sequence that loses its blocks in this cache is computed again, a chunk at a time, and has no drafts until all of it
is computed. No decision of the scheduler depends on the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from actors.config import ModelConfig, SchedulerConfig
from actors.model.attention.backend import AttentionBackend, AttentionNeeds
from actors.model.attention.batch_attention import BatchShape
from actors.model.attention.choice import choose_backend, fastest_key_order
from actors.model.cache.kv_cache import make_layout
from actors.model.config.config_rules import NO_DRAFTS_WITH_STATES
from actors.model.errors import UnsupportedModel
from actors.model.input_batch import InputBatch
from actors.model.loader import LoadedModel, load_model
from actors.model.sampling.sampler import sample
from actors.model.uploads import upload
from kv_transfer.layout import KeyOrder

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The smaller model and its cache. num_blocks: of the cache"""

    loaded: LoadedModel
    attention: AttentionBackend
    num_blocks: int


def load_draft_model(
    model_config: ModelConfig, scheduler_config: SchedulerConfig, target: LoadedModel
) -> DraftModel | None:
    """Load the model that the settings name, on the target's device; None if they name none.

    Raises what load_model does, and UnsupportedModel if its vocabulary is not the target's.
    """
    speculative = scheduler_config.speculative
    if speculative is None or speculative.model is None:
        return None
    loaded = load_model(model_config.model_copy(update={"model": speculative.model, "max_model_len": None}))
    if loaded.geometry.state is not None:
        raise UnsupportedModel(loaded.architecture, NO_DRAFTS_WITH_STATES)
    if loaded.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            loaded.architecture,
            f"a draft model needs the target model's {target.vocab_size} tokens, and this one has {loaded.vocab_size}",
        )
    geometry = loaded.geometry
    num_blocks = -(-speculative.cache_tokens // _BLOCK_SIZE)
    layout = make_layout(
        geometry, num_blocks=num_blocks, block_size=_BLOCK_SIZE, dtype=loaded.dtype, model_fingerprint=""
    )
    kv_cache = torch.zeros(layout.shape, dtype=loaded.dtype, device=loaded.device)
    needs = AttentionNeeds(loaded.device, loaded.dtype, geometry, _BLOCK_SIZE, KeyOrder.PLAIN)
    # No other engine reads this cache, so its keys may have the order that suits the backend.
    needs = replace(needs, key_order=fastest_key_order("auto", needs))
    return DraftModel(loaded, choose_backend("auto", needs).kind.open(kv_cache, needs), num_blocks)


@dataclass(slots=True)
class _Sequence:
    """The KV that the smaller model holds for a row.

    Invariant: KV is in place for the first num_valid tokens of the row, as long as the row's tokens from first_draft on
    are the drafts.
    """

    epoch: int
    num_valid: int = 0
    block_ids: list[int] = field(default_factory=list)
    first_draft: int = 0
    drafts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A row in one call of propose().

    num_tokens: how many tokens the row has
    num_wanted: how many drafts to make for it
    stop:       how many of its tokens have KV after the first forward
    """

    row: int
    sequence: _Sequence
    num_tokens: int
    num_wanted: int
    stop: int


class DraftModelProposer:
    """Drafts for all rows together, one forward for each further token. Implements Proposer."""

    def __init__(self, model: DraftModel, batch: InputBatch, max_step_tokens: int) -> None:
        """Draft for the target model's batch.

        max_step_tokens: the most tokens of all rows together that the first forward of a call may compute
        """
        self._model = model
        self._batch = batch
        self._tokens = batch.tokens
        self._max_step_tokens = max_step_tokens
        self._max_len = min(model.loaded.max_model_len, self._tokens.token_ids.shape[1])
        self._free = list(range(model.num_blocks))
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()
        """The sequences by row, in the order of their last drafts; the most recent is at the end."""

    def propose(self, rows: np.ndarray, epochs: np.ndarray, num_wanted: np.ndarray) -> list[list[int]]:
        """See Proposer."""
        drafts: dict[int, list[int]] = {row: [] for row in rows.tolist()}
        turns = self._begin(rows, epochs, num_wanted)
        if turns:
            logits = self._forward(turns, [(turn.sequence.num_valid, turn.stop) for turn in turns])
            for turn in turns:
                turn.sequence.num_valid = turn.stop
            is_through = np.flatnonzero([turn.stop == turn.num_tokens for turn in turns])
            through = [turns[index] for index in is_through.tolist()]
            [chosen] = upload([is_through], logits.device)
            self._draft_on(through, logits[chosen])
            drafts.update({turn.row: list(turn.sequence.drafts) for turn in through})
        return list(drafts.values())

    def _draft_on(self, turns: list[_Turn], logits: Tensor) -> None:
        """Draft token after token. logits: [len(turns), vocab_size], after each row's last token"""
        num_drafted = 0
        while turns:
            rows = np.array([turn.row for turn in turns])
            sampled = sample(logits, self._batch.sampling_batch(rows, np.full(len(turns), num_drafted)))
            for turn, token_id in zip(turns, sampled.token_ids, strict=True):
                # The draft goes behind the row's tokens, where only penalties and the next forward read it.
                self._tokens.token_ids[turn.row, turn.num_tokens + num_drafted] = token_id
                turn.sequence.drafts.append(token_id)
            num_drafted += 1
            turns = [turn for turn in turns if turn.num_wanted > num_drafted]
            if turns:
                spans = [(turn.num_tokens + num_drafted - 1, turn.num_tokens + num_drafted) for turn in turns]
                logits = self._forward(turns, spans)
                for turn in turns:
                    turn.sequence.num_valid += 1

    def _begin(self, rows: np.ndarray, epochs: np.ndarray, num_wanted: np.ndarray) -> list[_Turn]:
        """Find each row's tokens without KV, and allocate blocks for them. Rows that get no blocks are left out."""
        budget, turns, taking_part = self._max_step_tokens, [], set(rows.tolist())
        for row, epoch, wanted in zip(rows.tolist(), epochs.tolist(), num_wanted.tolist(), strict=True):
            sequence = self._sequence_of(row, epoch)
            num_tokens = int(self._tokens.num_tokens[row])
            num_possible = min(wanted, self._max_len - num_tokens)
            stop = min(num_tokens, sequence.num_valid + budget)
            if num_possible <= 0 or stop <= sequence.num_valid:
                continue
            if not self._make_room(sequence, num_tokens + num_possible, taking_part):
                continue
            budget -= stop - sequence.num_valid
            turns.append(_Turn(row, sequence, num_tokens, num_possible, stop))
        return turns

    def _sequence_of(self, row: int, epoch: int) -> _Sequence:
        """Return the row's sequence, cut at its first wrong draft; a new sequence for a new request."""
        sequence = self._sequences.get(row)
        if sequence is None or sequence.epoch != epoch:
            self._let_go(row)
            sequence = self._sequences[row] = _Sequence(epoch)
        self._sequences.move_to_end(row)
        num_tokens = int(self._tokens.num_tokens[row])
        now = self._tokens.token_ids[row, sequence.first_draft : num_tokens].tolist()
        num_right = 0
        while num_right < min(len(now), len(sequence.drafts)) and now[num_right] == sequence.drafts[num_right]:
            num_right += 1
        if sequence.drafts:
            sequence.num_valid = min(sequence.num_valid, sequence.first_draft + num_right)
        # The last token is computed again even if it has KV, since its logits are needed.
        sequence.num_valid = min(sequence.num_valid, num_tokens - 1)
        sequence.first_draft, sequence.drafts = num_tokens, []
        return sequence

    def _make_room(self, sequence: _Sequence, num_tokens: int, taking_part: set[int]) -> bool:
        """Allocate a sequence's blocks for so many tokens; returns False if too few are free.

        Sequences that do not take part now lose their blocks if need be, the least recently used first.
        """
        num_missing = -(-num_tokens // _BLOCK_SIZE) - len(sequence.block_ids)
        for row in [row for row in self._sequences if row not in taking_part]:
            if len(self._free) >= num_missing:
                break
            self._let_go(row)
        if len(self._free) < num_missing:
            return False
        sequence.block_ids += [self._free.pop() for _ in range(num_missing)]
        return True

    def _let_go(self, row: int) -> None:
        if (sequence := self._sequences.pop(row, None)) is not None:
            self._free += sequence.block_ids

    def _forward(self, turns: list[_Turn], spans: list[tuple[int, int]]) -> Tensor:
        """Compute a span of each row's tokens, [first, stop); returns the logits after it, [len(turns), vocab_size]."""
        starts, stops = np.array(spans, dtype=np.int64).T
        lengths = stops - starts
        query_starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], lengths)
        token_ids = self._tokens.token_ids[np.repeat([turn.row for turn in turns], lengths), positions]
        block_tables = np.zeros((len(turns), max(len(turn.sequence.block_ids) for turn in turns)), dtype=np.int64)
        for table, turn in zip(block_tables, turns, strict=True):
            table[: len(turn.sequence.block_ids)] = turn.sequence.block_ids
        loaded = self._model.loaded
        arrays = (token_ids.astype(np.int64), positions, query_starts[1:] - 1)
        input_ids, position_ids, indices = upload(arrays, loaded.device)
        batch = self._model.attention.prepare(BatchShape(query_starts, starts, block_tables))
        return loaded.forward(input_ids, position_ids, batch, indices)
