"""One tensor-parallel rank: a model runner and the worker side of the connector around it."""

from __future__ import annotations

from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.model.model_runner import ModelRunner
from kv_transfer.connector.interface import KVConnectorWorker
from kv_transfer.connector.steps import KVConnectorMetadata
from kv_transfer.links.link_compatibility import PairingFacts


class Worker:
    """Runs steps. Transfers are started before a forward and fed after it, never waited for."""

    def __init__(
        self,
        runner: ModelRunner,
        connector: KVConnectorWorker | None,
        kv_transport: str = "",
        pairing: PairingFacts | None = None,
    ) -> None:
        """kv_transport: how KV travels, for people; pairing: what decides with whom. None of it without a connector."""
        self.runner = runner
        self.kv_transport = kv_transport
        self.pairing = pairing
        self._connector = connector

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; the output carries what happened beside the steps on this rank since the last one."""
        adapters = self.runner.adapters
        if adapters is None:
            return self._execute(scheduler_output)
        if scheduler_output.adapter_commands is not None:
            adapters.obey(scheduler_output.adapter_commands)
        adapter_loads = adapters.take_results()
        output = self._execute(scheduler_output)
        output.adapter_loads = adapter_loads
        return output

    def _execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if self._connector is None:
            return self.runner.execute_model(scheduler_output)
        metadata = scheduler_output.kv_connector_metadata or KVConnectorMetadata()
        self._connector.start_step(metadata)
        output = self.runner.execute_model(scheduler_output)
        self._connector.finish_step(metadata)
        output.kv_connector_output = self._connector.take_output()
        return output

    def shutdown(self) -> None:
        """Close the connector's links and threads, and stop loading adapters."""
        if self.runner.adapters is not None:
            self.runner.adapters.shutdown()
        if self._connector is not None:
            self._connector.shutdown()
