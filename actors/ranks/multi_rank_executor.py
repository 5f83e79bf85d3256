"""Runs each step on all tensor-parallel ranks of an engine.

Rank 0 sends a step to the further ranks, and computes the step as they do. In the forward pass the ranks exchange
tensors through their process group. Every rank samples: the logits are gathered from all ranks, so every rank has the
same bits, and sampling depends on logits, seed and position only. So no rank has to send its tokens before the next
step. The executor compares the ranks' tokens when it collects their answers; if they differ, the engine ends.
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
    """Runs steps on rank 0's executor and on all further ranks. Implements Executor.

    At most two steps are under way, and their results are taken in order.
    """

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
        """The loaded model's facts: rank 0's, with the addresses of the further ranks."""
        return self._facts

    def start(self, scheduler_output: SchedulerOutput) -> RunningStep:
        """Start a step on every rank. Raises RankLost."""
        self._hub.broadcast(scheduler_output)
        try:
            return _RunningStep(self, self._local.start(scheduler_output))
        except RankLost as error:
            raise self._hub.explain(error) from error

    def finish(self, step: RunningStep) -> ModelRunnerOutput:
        """Wait until every rank has computed the step, and return its output.

        Raises RankLost, RanksDisagree, or the error that rank 0's worker raised.
        """
        try:
            output = step.result()
        except RankLost as error:
            raise self._hub.explain(error) from error
        others = self._hub.collect_steps()
        for rank, other in enumerate(others, 1):
            if not np.array_equal(other.token_ids, output.token_ids):
                raise RanksDisagree(f"rank {rank} and rank 0 sampled different tokens in the same step")
        if output.kv_connector_output is not None:
            further = [other.kv_connector_output for other in others]
            output.kv_connector_output = self._merge([output.kv_connector_output, *further])
        output.adapter_loads = self._adapter_loads.add([output, *others])
        return output

    def encode(self, image: EncoderInput) -> PackedArray:
        """Raise UnsupportedModel: models with images run on one rank."""
        return self._local.encode(image)

    def take_other_pages(self) -> None:
        """Begin to take the memory of rank 0's KV cache; each further rank does so once it has loaded."""
        self._local.take_other_pages()

    def shutdown(self) -> None:
        """End every rank, and kill the ranks that do not end within 10 s."""
        self._hub.close()
        self._local.shutdown()
        # A further rank that waits for rank 0 in a forward pass gets an error now.
        self._group.group.close()
        self._group.ranks.stop(_STOP_TIMEOUT_S)

    def _merge(self, outputs: list[KVConnectorOutput | None]) -> KVConnectorOutput:
        """Return the events that all ranks have reported, and the sums of the ranks' counters."""
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
    """Merges the ranks' results of loading adapters.

    A load is over when every rank has reported its result; the load has failed if it failed on any rank.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._parts: dict[str, list[str | None]] = {}

    def add(self, steps: Sequence[ModelRunnerOutput | RankStep]) -> dict[str, str | None]:
        """Add the results that all ranks reported in one step.

        Returns the loads that are over, by the adapter's key, each with its failure or None.
        """
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
