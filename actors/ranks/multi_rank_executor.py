"""Runs each step on all tensor-parallel ranks of an engine.

A step is sent to the further ranks, then computed here as on every other rank; inside the forward the ranks meet in
their process group. Every rank samples: the logits are gathered from all ranks, so they have the same bits everywhere,
and sampling is a function of logits, seed and position. That spares a broadcast in every step; that the tokens agree is
checked when the answers are collected, and an engine whose ranks do not agree ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.core.requests.multimodal import EncoderInput, PackedArray
from actors.executor import Executor, RunningStep
from actors.model.errors import RankLost, RanksDisagree
from actors.model_facts import ModelFacts
from actors.ranks.rank_group import RankGroup
from actors.ranks.rank_messages import RankStep
from kv_transfer.connector.reports import KVConnectorOutput
from kv_transfer.sides.part_reports import PartReports, add_stats
from kv_transfer.transfer_stats import TransferStats

_STOP_TIMEOUT_S = 10.0


class MultiRankExecutor:
    """An Executor around that of rank 0. At most two steps are under way; their results are taken in order."""

    def __init__(self, local: Executor, group: RankGroup) -> None:
        self._local = local
        self._group = group
        self._hub = group.hub
        self._facts = replace(local.facts, further_rank_addresses=group.further_rank_addresses)
        tp_size = local.facts.layout.tp_size
        self._reports = PartReports(lambda request_id: tp_size)
        self._stats = [TransferStats() for _ in range(tp_size)]
        self._adapter_loads = AdapterLoads(tp_size)

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's facts, with rank 0's layout."""
        return self._facts

    def start(self, scheduler_output: SchedulerOutput) -> RunningStep:
        """Give a step to every rank. Raises RankLost."""
        self._hub.broadcast(scheduler_output)
        try:
            return _RunningStep(self, self._local.start(scheduler_output))
        except RankLost as error:
            raise self._hub.explain(error) from error

    def finish(self, step: RunningStep) -> ModelRunnerOutput:
        """Wait for every rank. Raises RankLost, RanksDisagree or what rank 0's worker raised."""
        try:
            output = step.result()
        except RankLost as error:
            raise self._hub.explain(error) from error
        others = self._hub.collect_steps()
        for rank, other in enumerate(others, 1):
            if not np.array_equal(other.token_ids, output.token_ids):
                raise RanksDisagree(f"rank {rank} sampled other tokens than rank 0 in one step")
        if output.kv_connector_output is not None:
            further = [other.kv_connector_output for other in others]
            output.kv_connector_output = self._merge([output.kv_connector_output, *further])
        output.adapter_loads = self._adapter_loads.add([output, *others])
        return output

    def encode(self, image: EncoderInput) -> PackedArray:
        """Raises UnsupportedModel: models with images run on one rank."""
        return self._local.encode(image)

    def shutdown(self) -> None:
        """End every rank; those that do not end in time are killed."""
        self._hub.close()
        self._local.shutdown()
        # Whoever waits inside a forward that this rank did not finish fails now.
        self._group.group.close()
        self._group.ranks.stop(_STOP_TIMEOUT_S)

    def _merge(self, outputs: list[KVConnectorOutput | None]) -> KVConnectorOutput:
        """What is true of requests on all ranks."""
        merged = KVConnectorOutput()
        for rank, output in enumerate(outputs):
            if output is not None:
                for report in output.reports:
                    merged.reports += self._reports.add(report)
                self._stats[rank] = output.stats or self._stats[rank]
        merged.stats = add_stats(self._stats)
        merged.store_stats = outputs[0].store_stats if outputs[0] is not None else None
        return merged


class AdapterLoads:
    """An adapter is loaded when every rank has it, and a load is over when every rank has said something."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._parts: dict[str, list[str | None]] = {}

    def add(self, steps: Sequence[ModelRunnerOutput | RankStep]) -> dict[str, str | None]:
        """Take in what all ranks say; returns what is over, with the first failure of any rank."""
        over: dict[str, str | None] = {}
        for step in steps:
            for key, failure in step.adapter_loads.items():
                parts = self._parts.setdefault(key, [])
                parts.append(failure)
                if len(parts) == self._num_ranks:
                    over[key] = next((part for part in self._parts.pop(key) if part is not None), None)
        return over


@dataclass(frozen=True, slots=True)
class _RunningStep:
    executor: MultiRankExecutor
    local: RunningStep

    def result(self) -> ModelRunnerOutput:
        return self.executor.finish(self.local)
