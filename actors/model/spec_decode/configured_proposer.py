"""Chooses an engine's proposer by the settings."""

from __future__ import annotations

from actors.config import SchedulerConfig
from actors.model.input_batch import InputBatch
from actors.model.spec_decode.draft_model import DraftModel, DraftModelProposer
from actors.model.spec_decode.ngram import NgramProposer
from actors.model.spec_decode.proposer import Proposer


def make_proposer(config: SchedulerConfig, batch: InputBatch, draft_model: DraftModel | None) -> Proposer | None:
    """Make the proposer that the settings name; None if they name none. batch: of the target model"""
    speculative = config.speculative
    if speculative is None:
        return None
    if draft_model is not None:
        return DraftModelProposer(draft_model, batch, config.max_num_batched_tokens)
    return NgramProposer(
        batch.tokens, lookup_min=speculative.prompt_lookup_min, lookup_max=speculative.prompt_lookup_max
    )
