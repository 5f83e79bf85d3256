"""One tensor-parallel rank: a model runner and the worker side of the connector around it."""

from __future__ import annotations

from actors.core.outputs.model_runner_output import ModelRunnerOutput
from actors.core.outputs.scheduler_output import SchedulerOutput
from actors.model.model_runner import ModelRunner
from kv_transfer.connector.interface import KVConnectorWorker
from kv_transfer.connector.steps import KVConnectorMetadata
from kv_transfer.links.link_compatibility import PairingFacts


class Worker:
    """Runs steps. Transfers begin before a forward and get its KV after it; a step never waits for a transfer."""

    def __init__(
        self,
        runner: ModelRunner,
        connector: KVConnectorWorker | None,
        kv_transport: str = "",
        pairing: PairingFacts | None = None,
    ) -> None:
        """connector: None if no KV is transferred; kv_transport, pairing: see ModelFacts."""
        self.runner = runner
        self.kv_transport = kv_transport
        self.pairing = pairing
        self._connector = connector

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; the output also has this rank's transfer reports and adapter loads since the last step."""
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
