"""Each family with everything at once on the simulated GPU; test_simulated_gpu.py starts it in processes of their own.

Two engines serve requests that are greedy or sampled, have token rules, a grammar or an adapter. First they are handed
over, in several chunks, to an engine that verifies drafts; then the first engine answers them alone, one step ahead of
their tokens. Both engines replay decode steps from graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from actors.config import EngineConfig, SchedulerConfig
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.adapter import Adapter
from actors.core.requests.sampling_params import SamplingParams
from actors.engine_core import EngineCore
from actors.executor import InProcessExecutor
from actors.lora_config import LoraConfig
from actors.model import loaded_runner
from actors.model.input_batch import InputBatch
from actors.model.launched_step import LaunchedStep
from actors.model.model_runner import ModelRunner
from tests.actors.speculation import EAGER, KnowingProposer
from tests.adapters import adapted_tokens, adapter_of, make_adapter
from tests.checkpoints import EOS_TOKEN_ID
from tests.engine_pair import EnginePair, engine_config
from tests.integration.test_sample_draws import distance_to_draw
from tests.reference import greedy_tokens, random_prompt
from tests.simulated_gpu.device import install
from tests.simulated_gpu.graph import SimulatedGraph
from tests.simulated_gpu.tensors import SIMULATION
from tests.structured import KINDS, compiling_in_process, constrained_tokens
from tests.token_rules import ALLOWED, ruled_tokens

CheckpointOf = Callable[[str], Path]
DEVICE = install()
WITH_GRAPHS: Final = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt2", "opt"),
    *("granite_swa", "nemotron", "stablelm", "falcon", "falcon_40b", "falcon_mha"),
    *("gemma3n", "gemma4", "llama4"),
)
"""The families whose decode steps graphs replay in float32."""
WITHOUT_GRAPHS: Final = ("minicpm3", "youtu")
"""Their layers cache latents, which the torch backend serves."""
WAITS: Final = {"actors/model/sampling/transfers.py:wait", "actors/model/launched_step.py:result"}
"""A step waits for what the sampler has computed, or for its end if it samples nothing."""
LINEAR_LAYERS: Final[dict[str, Any]] = {
    "target_modules": "all-linear",
    "exclude_modules": ["router", "kv_b_proj"],
}
"""An adapter's settings for all layers that it may change."""
NUM_OUTPUT_TOKENS: Final = 12
MAX_FORM_TOKENS: Final = 40
NUM_DRAFTED_TOKENS: Final = 6
"""Only a request's first tokens are drafted: later steps verify nothing, so graphs replay them."""
GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
SAMPLED: Final = replace(GREEDY, temperature=0.8, seed=5, logprobs=2)
FILTERED: Final = replace(
    SAMPLED,
    top_k=40,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    frequency_penalty=0.5,
    logit_bias={5: 2.0},
    bad_words=((9,),),
)
FORMED: Final = replace(GREEDY, max_tokens=MAX_FORM_TOKENS, structured_output=KINDS["regex"], ignore_eos=False)
ROUNDING: Final = 1e-5
"""How far the sum of a token's probability and those before it may be from the sum in float64."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. tokens: what it has to say; None where nothing but the other engine's answer is known"""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int] | None = None
    lora: Adapter | None = None


def requests_of(directory: Path, adapter: Path) -> dict[str, Asked]:
    """Return the requests, with the answers of transformers and PEFT."""
    prompts = [random_prompt(length, seed=length) for length in (45, 33, 50, 7, 40, 27)]
    plain, adapted, sampled, ruled, formed, filtered = prompts
    bad_words = ((greedy_tokens(directory, tuple(ruled), NUM_OUTPUT_TOKENS)[1],), (7, 8))
    lora = adapter_of(adapter)
    return {
        "plain": Asked(plain, GREEDY, greedy_tokens(directory, tuple(plain), NUM_OUTPUT_TOKENS)),
        "adapted": Asked(adapted, GREEDY, adapted_tokens(directory, adapter, adapted, NUM_OUTPUT_TOKENS), lora),
        "sampled": Asked(sampled, SAMPLED),
        "ruled": Asked(
            ruled,
            replace(GREEDY, allowed_token_ids=ALLOWED, bad_words=bad_words),
            ruled_tokens(directory, ruled, NUM_OUTPUT_TOKENS, ALLOWED, bad_words),
        ),
        "formed": Asked(formed, FORMED, constrained_tokens(directory, formed, KINDS["regex"], MAX_FORM_TOKENS)),
        "filtered": Asked(
            filtered,
            FILTERED,
            lora=lora,
        ),
    }


class FirstTokensProposer(KnowingProposer):
    """Drafts the first tokens of each known answer, and nothing for other requests."""

    def propose(self, rows: np.ndarray, epochs: np.ndarray, num_wanted: np.ndarray) -> list[list[int]]:
        drafts = super().propose(rows, epochs, num_wanted)
        return [draft[: self._num_left(row)] for row, draft in zip(rows.tolist(), drafts, strict=True)]

    def _num_left(self, row: int) -> int:
        known = self.tokens.token_ids[row, : self.tokens.num_tokens[row]].tolist()
        lengths = [len(prompt) for prompt in self.continuations if tuple(known[: len(prompt)]) == prompt]
        return max(0, lengths[0] + NUM_DRAFTED_TOKENS - len(known)) if lengths else 0


@contextmanager
def drafting(continuations: Mapping[tuple[int, ...], Sequence[int]]) -> Iterator[None]:
    """Let engines that verify drafts get those of known answers; every third one is wrong."""
    num_drafts = iter(range(1 << 30))

    def make(config: SchedulerConfig, batch: InputBatch, draft: object) -> FirstTokensProposer | None:
        if config.speculative is None:
            return None
        return FirstTokensProposer(batch.tokens, continuations, lambda: next(num_drafts) % 3 < 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded_runner, "make_proposer", make)
        yield


@contextmanager
def counting_steps() -> Iterator[list[int]]:
    """Collect the number of tokens of each step that computes any."""
    steps: list[int] = []
    launch = ModelRunner._launch

    def count(runner: ModelRunner, output: SchedulerOutput) -> LaunchedStep:
        if output.total_num_scheduled_tokens:
            steps.append(output.total_num_scheduled_tokens)
        return launch(runner, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "_launch", count)
        yield steps


def config_of(directory: Path, adapter: Path) -> EngineConfig:
    """Return the settings of an engine that computes most prompts in several chunks, beside other requests."""
    config = engine_config(directory, block_size=8, max_num_batched_tokens=24, max_num_seqs=8, overlap=True)
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"cuda_graph_sizes": (2, 8), "step_cost_warm_up_s": 0.0}),
            "lora": LoraConfig(allowed_directories=(str(adapter.parent),), max_lora_rank=8),
        }
    )


def num_replays(engine: EngineCore) -> dict[bool, int]:
    """Return how often an engine has replayed graphs, by whether their rows may have adapters."""
    assert isinstance(engine.executor, InProcessExecutor)
    graphs = engine.executor._worker.runner._graphs
    replays = {False: 0, True: 0}
    for kind, graph in graphs._graphs.items() if graphs is not None else ():
        assert isinstance(graph, SimulatedGraph)
        replays[kind.has_adapters] += graph.num_replays
    return replays


@pytest.fixture(autouse=True)
def _no_processes() -> Iterator[None]:
    with compiling_in_process():
        yield


@contextmanager
def pair_of(directory: Path, adapter: Path, asked: Mapping[str, Asked]) -> Iterator[EnginePair]:
    """Make two engines; the second verifies drafts of the answers that are known."""
    config = config_of(directory, adapter)
    drafts = config.scheduler.model_copy(update={"speculative": EAGER})
    known = {tuple(one.prompt): one.tokens for one in asked.values() if one.tokens is not None}
    with drafting(known), EnginePair(config, config.model_copy(update={"scheduler": drafts})) as pair:
        yield pair


def answer_all(pair: EnginePair, asked: Mapping[str, Asked]) -> None:
    """Let the second engine answer what the first one hands over; then the first one answers alone."""
    for name, one in asked.items():
        pair.hand_over(name, one.prompt, one.params, one.lora)
    pair.run()
    for name, one in asked.items():
        pair.submit("prefill", f"{name} alone", one.prompt, one.params, lora=one.lora)
    pair.run()


@pytest.mark.parametrize("family", [*WITH_GRAPHS, *WITHOUT_GRAPHS])
def test_everything_at_once_gives_the_right_tokens_and_each_step_waits_once(
    family: str, checkpoint: CheckpointOf, tmp_path: Path
) -> None:
    directory = checkpoint(family)
    adapter = make_adapter(directory, tmp_path / "adapter", seed=7, **LINEAR_LAYERS)
    asked = requests_of(directory, adapter)
    with pair_of(directory, adapter, asked) as pair:
        SIMULATION.take_waits()
        with counting_steps() as steps:
            answer_all(pair, asked)
        waits = SIMULATION.take_waits()
        answers = {name: answer.token_ids for name, answer in pair.answers.items()}
        for name, one in asked.items():
            assert answers[name] == (one.tokens or answers[f"{name} alone"]), name
            assert answers[f"{name} alone"] == answers[name], name
        assert answers["formed"][-1] == EOS_TOKEN_ID, "the form is complete"
        distance = distance_to_draw(
            directory, asked["sampled"].prompt, answers["sampled"], SAMPLED.seed or 0, SAMPLED.temperature
        )
        assert distance < ROUNDING
        assert set(waits) == WAITS
        assert sum(waits.values()) == len(steps)
        stats = pair.engines["decode"].make_stats().spec_decoding_stats
        assert stats is not None
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        transfers = pair.engines["prefill"].make_stats().transfer_stats
        assert transfers is not None
        assert transfers.num_sent_chunks > len(asked), "prompts are handed over in several chunks"
        for engine in pair.engines.values():
            replays = num_replays(engine)
            assert all(replays.values()) if family in WITH_GRAPHS else not any(replays.values()), replays
        pair.assert_whole()
