"""The service raypd.v1.GenerateService, on Serving.generate() and generate_many()."""

from __future__ import annotations

import uuid
from contextlib import aclosing

import grpc.aio

from cluster.access.caller import current_caller
from cluster.api.grpc.conversions.batch import batch_from_proto, sample_to_proto
from cluster.api.grpc.conversions.generate import request_from_proto, response_to_proto
from cluster.api.grpc.list_lengths import check_batch, check_generate
from cluster.api.protos.raypd.v1 import generate_pb2, generate_pb2_grpc
from cluster.api.shared.explainer import Explainer
from cluster.requests.serving import Serving

_Context = grpc.aio.ServicerContext[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]
_ExplainContext = grpc.aio.ServicerContext[generate_pb2.ExplainRequest, generate_pb2.ExplainResponse]
_BatchContext = grpc.aio.ServicerContext[generate_pb2.GenerateBatchRequest, generate_pb2.GenerateBatchResponse]


class ExplainService(generate_pb2_grpc.GenerateServiceServicer):
    """The method that explains where requests went, alone: operators' port has no other one of this service."""

    def __init__(self, explainer: Explainer) -> None:
        self._explainer = explainer

    async def Explain(  # noqa: N802
        self, request: generate_pb2.ExplainRequest, context: _ExplainContext
    ) -> generate_pb2.ExplainResponse:
        """Return the records of a request."""
        del context
        tenant = request.tenant if request.HasField("tenant") else None
        if request.last and not request.request_id:
            found = await self._explainer.explain_last(request.last, tenant, current_caller())
        else:
            found = await self._explainer.explain(request.request_id, tenant, current_caller())
        return generate_pb2.ExplainResponse(
            records=[record.to_json().decode() for record in found.records],
            unanswered=[
                generate_pb2.UnansweredIngress(ingress=one.ingress, reason=one.reason) for one in found.unanswered
            ],
            left_out=found.num_left_out,
        )


class GenerateService(ExplainService):
    """The methods that generate output, and that explain where requests went. Errors become statuses in interceptor.py.

    A client that cancels, dies or runs out of time cancels the task of its call, which aborts the request.
    """

    def __init__(self, serving: Serving, explainer: Explainer) -> None:
        super().__init__(explainer)
        self._serving = serving

    async def Generate(self, request: generate_pb2.GenerateRequest, context: _Context) -> None:  # noqa: N802
        """Stream a request's output."""
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
        request_id = request.request_id
        processor = self._serving.newest_model().input_processor
        await check_generate(request, processor.limits, processor.model.max_model_len)
        generate_request = await request_from_proto(request_id, request, context.time_remaining())
        # Closing the generator aborts the request: the garbage collector would do so too late.
        async with aclosing(self._serving.generate(generate_request)) as chunks:
            async for chunk in chunks:
                await context.write(response_to_proto(request_id, chunk))

    async def GenerateBatch(  # noqa: N802
        self, request: generate_pb2.GenerateBatchRequest, context: _BatchContext
    ) -> None:
        """Stream the samples of several prompts."""
        if not request.each.request_id:
            request.each.request_id = uuid.uuid4().hex
        request_id = request.each.request_id
        processor = self._serving.newest_model().input_processor
        await check_batch(request, processor.limits, processor.model.max_model_len)
        batch = await batch_from_proto(request_id, request, context.time_remaining())
        async with aclosing(self._serving.generate_many(batch)) as samples:
            async for sample in samples:
                await context.write(sample_to_proto(request_id, sample))
