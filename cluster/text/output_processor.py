"""Converts an engine's tokens to the answer that a client reads: text, stop strings, log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from actors.core.outputs.engine_core_outputs import EngineCoreOutput
from actors.core.outputs.model_runner_output import TokenLogprobs
from actors.core.requests.request import EngineCoreRequest, FinishReason
from cluster.errors import FieldViolation, InvalidRequest
from cluster.parameters.sampling_options import SamplingOptions
from cluster.text.detokenizer import Detokenizer
from cluster.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class ProcessedOutput:
    """The part of an answer that one output of an engine gives its client.

    token_ids:   the new tokens, up to the one that completed a stop string
    stop_reason: the stop string, or the EOS or stop token, if finish_reason is STOP
    """

    text: str
    token_ids: list[int]
    first_position: int
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: list[TokenLogprobs] | None = None


class OutputProcessor:
    """Converts the tokens of one request to text.

    The text that was returned after n tokens depends only on these tokens, not on the outputs in which they came. So a
    resumed request begins with the tokens that its client has, and its first new text follows the client's text.
    """

    def __init__(self, tokenizer: Tokenizer, request: EngineCoreRequest, sampling: SamplingOptions) -> None:
        """Begin after the output that the request has already. Raises InvalidRequest if a stop string has ended it."""
        context = request.prompt_token_ids if request.prompt_embeds is None else []
        self._detokenizer = Detokenizer(tokenizer, context, skip_special_tokens=sampling.skip_special_tokens)
        self._stop_strings = StopStrings(sampling.stop, include_in_text=sampling.include_stop_str_in_output)
        self._include_stop_token = sampling.include_stop_str_in_output
        self._min_tokens = request.sampling_params.min_tokens
        self.num_output_tokens = 0
        for token_id in request.output_token_ids:
            self._push(token_id)
        if self._stop_strings.matched is not None:
            value, allowed = f"output with the stop string {self._stop_strings.matched!r}", "output that goes on"
            raise InvalidRequest(FieldViolation("output_token_ids", value, allowed))

    def process(self, output: EngineCoreOutput) -> ProcessedOutput:
        """Take an output: the next tokens in order, each of them once."""
        texts: list[str] = []
        for index, token_id in enumerate(output.new_token_ids):
            is_last = index + 1 == len(output.new_token_ids)
            texts.append(self._push(token_id, is_hidden=is_last and self._is_hidden_stop(token_id, output)))
            if self._stop_strings.matched is not None:
                return self._processed(output, texts, index + 1, FinishReason.STOP, self._stop_strings.matched)
        if output.finish_reason is not None:
            texts.append(self._stop_strings.flush())
        num_tokens = len(output.new_token_ids)
        return self._processed(output, texts, num_tokens, output.finish_reason, output.stop_token_id)

    def _push(self, token_id: int, *, is_hidden: bool = False) -> str:
        self.num_output_tokens += 1
        if is_hidden:
            return ""
        text = self._detokenizer.step(token_id)
        return text if self.num_output_tokens < self._min_tokens else self._stop_strings.push(text)

    def _is_hidden_stop(self, token_id: int, output: EngineCoreOutput) -> bool:
        return token_id == output.stop_token_id and not self._include_stop_token

    def _processed(
        self,
        output: EngineCoreOutput,
        texts: list[str],
        num_tokens: int,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> ProcessedOutput:
        return ProcessedOutput(
            text="".join(texts),
            token_ids=output.new_token_ids[:num_tokens],
            first_position=output.first_position,
            logprobs=None if output.logprobs is None else output.logprobs[:num_tokens],
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
