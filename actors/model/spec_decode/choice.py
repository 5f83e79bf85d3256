"""Which proposer an engine has."""

from __future__ import annotations

from actors.config import SchedulerConfig
from actors.model.input_batch import TokenRows
from actors.model.spec_decode.ngram import NgramProposer
from actors.model.spec_decode.proposer import Proposer


def make_proposer(config: SchedulerConfig, tokens: TokenRows) -> Proposer | None:
    """Make what the settings name; None if nothing is guessed. tokens: of the persistent batch."""
    speculative = config.speculative
    if speculative is None:
        return None
    return NgramProposer(tokens, lookup_min=speculative.prompt_lookup_min, lookup_max=speculative.prompt_lookup_max)
