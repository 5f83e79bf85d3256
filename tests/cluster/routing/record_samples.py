"""Records of requests for tests, with what was predicted and what came true."""

from __future__ import annotations

from cluster.routing.decision import Decision, Reason, RouteTerms, RoutingMode, Way
from cluster.routing.request_record import AttemptRecord, EngineTimes, RequestRecord

SPLIT = RouteTerms(
    Way.PREFILL_DECODE,
    "prefill-0",
    "decode-0",
    prefill_wait_s=0.2,
    prefill_s=0.4,
    transfer_s=0.01,
    total_s=2.0,
    ttft_s=0.5,
    itl_s=0.02,
)
ALONE = RouteTerms(Way.DECODE_ALONE, None, "decode-1", prefill_s=0.5, inflicted_s=2.0, total_s=2.5, ttft_s=0.6)


def decision(chosen: RouteTerms | None = SPLIT, without_roles_s: float = 2.5) -> Decision:
    return Decision("r-0", RoutingMode.COST, Reason.COST, chosen, (ALONE,), ALONE, without_roles_s)


def attempt(began_s: float = 0.0, failure: str = "", why: Decision | None = None) -> AttemptRecord:
    return AttemptRecord(
        began_s,
        ("decode-0",),
        "prefill-0",
        decision() if why is None else why,
        num_new_tokens=3,
        failure=failure,
        prefill=EngineTimes(0.3, 0.8, num_prompt_tokens_computed=100),
        decode=EngineTimes(0.1, 0.0, transfer_s=0.05, exposed_transfer_s=0.02, num_transferred_bytes=4096),
    )


def record(*attempts: AttemptRecord, request_id: str = "r", tenant: str = "", ttft_s: float = 1.0) -> RequestRecord:
    return RequestRecord(
        request_id,
        tenant,
        "ingress-0",
        1000.0,
        outcome="length",
        model_version=1,
        num_prompt_tokens=100,
        num_output_tokens=3,
        attempts=attempts or (attempt(),),
        ttft_s=ttft_s,
        itl_p50_s=0.03,
        itl_max_s=0.1,
        duration_s=1.5,
    )
