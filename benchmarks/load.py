"""An open-loop load over gRPC and what its clients saw.

Requests leave at the times of a Poisson process, whether or not earlier ones have been answered: a slow server cannot
slow its own load down. Latencies are the client's own; the definitions are the field's: TTFT from sending to the first
token, TPOT the mean gap after the first token per request, ITL every gap.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.api.protos.raypd.v1 import generate_pb2
from cluster.bench.estimates import percentile
from cluster.client import GenerateClient
from cluster.commands.demo import exposed_transfer_s
from cluster.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Load:
    """The requests that are offered. Prompts are random token ids, so that nothing hits a prefix cache."""

    requests_per_s: float
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    vocab_size: int
    seed: int = 0


@dataclass(slots=True)
class RequestResult:
    """One request as its client saw it. Times are monotonic seconds."""

    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    last: generate_pb2.GenerateResponse | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Until the first token."""
        return self.token_times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens."""
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


async def offer(address: str, load: Load) -> list[RequestResult]:
    """Send the whole load and wait for every answer."""
    rng = random.Random(load.seed)
    results: list[RequestResult] = []
    # What is refused counts as failed.
    async with GenerateClient(address, overload_timeout_s=0) as client, asyncio.TaskGroup() as tasks:
        for _ in range(load.num_requests):
            prompt = [rng.randrange(3, load.vocab_size) for _ in range(load.num_prompt_tokens)]
            result = RequestResult(time.monotonic())
            results.append(result)
            tasks.create_task(_send(client, prompt, load.num_output_tokens, result))
            await asyncio.sleep(rng.expovariate(load.requests_per_s))
    return results


async def _send(client: GenerateClient, prompt: Sequence[int], num_tokens: int, result: RequestResult) -> None:
    try:
        async for response in client.generate(list(prompt), max_tokens=num_tokens, temperature=0.0, ignore_eos=True):
            now_s = time.monotonic()
            result.token_times_s.extend([now_s] * len(response.token_ids))
            result.last = response
    except ClusterError as error:
        result.error = str(error)


@dataclass(frozen=True, slots=True)
class Summary:
    """A load's figures, milliseconds unless the name says otherwise."""

    num_completed: int
    num_failed: int
    output_tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    itl_p50: float
    itl_p99: float
    kv_mb: float
    transfer_p50: float
    exposed_p50: float
    exposed_p99: float


def summarise(results: Sequence[RequestResult]) -> Summary:
    """Figures over the completed requests; failed ones are counted apart."""
    done = [result for result in results if result.error is None and result.last is not None]
    tokens = sum(len(result.token_times_s) for result in done)
    span_s = max(result.token_times_s[-1] for result in done) - min(result.sent_s for result in done)
    timings = [result.last.timings for result in done if result.last is not None]
    transfers = [timing.transfer for timing in timings if timing.HasField("transfer")]
    exposed = [exposed for timing in timings if (exposed := exposed_transfer_s(timing)) is not None]
    ttft = [result.ttft_s for result in done]
    tpot = [float(np.mean(result.gaps_s)) for result in done if result.gaps_s]
    itl = [gap for result in done for gap in result.gaps_s]
    return Summary(
        num_completed=len(done),
        num_failed=len(results) - len(done),
        output_tokens_per_s=tokens / span_s,
        ttft_p50=_ms(ttft, 50),
        ttft_p99=_ms(ttft, 99),
        tpot_p50=_ms(tpot, 50),
        tpot_p99=_ms(tpot, 99),
        itl_p50=_ms(itl, 50),
        itl_p99=_ms(itl, 99),
        kv_mb=sum(transfer.kv_bytes for transfer in transfers) / 1e6,
        transfer_p50=_ms([transfer.transfer_s for transfer in transfers], 50),
        exposed_p50=_ms(exposed, 50),
        exposed_p99=_ms(exposed, 99),
    )


def _ms(seconds: Sequence[float], percent: float) -> float:
    return percentile(seconds, percent) * 1e3
