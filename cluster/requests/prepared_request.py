"""Turns the outputs of a request's engines into what its client gets."""

from __future__ import annotations

from dataclasses import replace

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.requests.request import EngineCoreRequest
from cluster.parameters.generation import GenerateChunk, GenerateEnd, GenerateTimings, Usage
from cluster.requests.in_flight import InFlight
from cluster.requests.model_versions import EnginesOfVersion
from cluster.requests.recovery import Recovery
from cluster.requests.samples import SharedPrompt
from cluster.text.output_processor import OutputProcessor, ProcessedOutput


class PreparedRequest:
    """A request that is tokenized and charged for one model version; recovery.outputs() yields its outputs."""

    def __init__(
        self,
        engines: EnginesOfVersion,
        request: EngineCoreRequest,
        recovery: Recovery,
        output_processor: OutputProcessor,
        in_flight: InFlight,
        prompt: SharedPrompt | None,
    ) -> None:
        """prompt: the prompt that the request shares with other samples; None if it shares none"""
        self._engines = engines
        self._request = request
        self._output_processor = output_processor
        self._ledger, self._stopwatch = in_flight.ledger, in_flight.stopwatch
        self._prompt = prompt
        self._has_begun = False
        self.recovery = recovery

    def take(self, output: EngineCoreOutput) -> ProcessedOutput:
        """Detokenize an output, look for stop strings, and charge and time its tokens."""
        if self._prompt is not None:
            self._prompt.on_output(self.recovery.attempt)
        processed = self._output_processor.process(output)
        num_tokens = len(processed.token_ids)
        self._stopwatch.count(num_tokens)
        self._ledger.take_output(num_tokens)
        return processed

    def chunk(self, processed: ProcessedOutput, end: GenerateEnd | None = None) -> GenerateChunk:
        """Make the client's next chunk. The first chunk binds the request to its model version.

        The first chunk has what a client needs to resume the request: the seed, the model version and the adapter.
        """
        chunk = GenerateChunk(
            text=processed.text,
            token_ids=processed.token_ids,
            first_position=processed.first_position,
            logprobs=processed.logprobs,
            prompt_logprobs=processed.prompt_logprobs,
            end=end,
        )
        if self._has_begun:
            return chunk
        self._has_begun = self._engines.is_bound = True
        return replace(
            chunk,
            seed=self._request.sampling_params.seed,
            model_version=self._engines.model.version,
            lora_digest=None if self._request.lora is None else self._request.lora.digest,
            prompt_token_ids=self._request.prompt_token_ids,
        )

    def end(self, processed: ProcessedOutput) -> GenerateEnd:
        """Sum up the request after its last output: usage and times. The stopwatch counts its end."""
        assert processed.finish_reason is not None
        recovery, attempt = self.recovery, self.recovery.attempt
        assert attempt is not None, "a request that has ended has had an attempt"
        stopwatch = self._stopwatch
        end = GenerateEnd(
            finish_reason=processed.finish_reason,
            stop_reason=processed.stop_reason,
            usage=Usage(
                recovery.num_prompt_tokens, self._output_processor.num_output_tokens, recovery.num_cached_tokens
            ),
            timings=GenerateTimings(stopwatch.ttft_s, stopwatch.tpot_s, attempt.prefill_report, attempt.decode_report),
        )
        stopwatch.end(end)
        return end
