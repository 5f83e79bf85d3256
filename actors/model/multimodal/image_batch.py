"""The images of the requests that the worker knows: what to encode, the embeddings, and where these are inserted.

An image is encoded in the step that first touches one of its tokens, whole, and its embeddings are kept by its hash for
as long as the scheduler says: it counts them (encoder_cache_manager.py). What to encode is kept with its request until
that ends, since the request may lose its blocks, and the scheduler its embeddings, and then start over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.core.outputs.scheduler_output import NewRequestData, SchedulerOutput, StepBatch
from actors.core.requests.multimodal import EMBEDDINGS, EncoderInput, MultiModalFeature, PackedArray
from actors.errors import IntegrityError
from actors.model.input_batch import StepInputs
from actors.model.multimodal.positions import GridPositions
from actors.model.uploads import upload
from kv_transfer.device_kind import pin_for


@dataclass(frozen=True, slots=True)
class _Pictured:
    """A request with images. positions: None for a model that counts tokens one after the other."""

    features: tuple[MultiModalFeature, ...]
    inputs: dict[str, EncoderInput]
    positions: GridPositions | None


@dataclass(frozen=True, slots=True)
class _Span:
    """A request's tokens in a step, [start, stop) of the batch. first: the first token's index in the request."""

    start: int
    stop: int
    first: int
    request: _Pictured


class ImageBatch:
    """The worker's side of images. Requests without images cost nothing, and steps without images cost one check."""

    def __init__(self, model: PreTrainedModel, *, has_grid_positions: bool) -> None:
        """model: a vision-language model of a served family."""
        self._model = model
        self._has_grid_positions = has_grid_positions
        self._requests: dict[str, _Pictured] = {}
        self._embeddings: dict[str, Tensor] = {}
        self.num_encoded = 0
        """Images encoded so far."""

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Apply a step's changes to the known requests, and encode the images that the scheduler has chosen."""
        for mm_hash in scheduler_output.free_encoder_mm_hashes:
            self._embeddings.pop(mm_hash, None)
        if self._requests:
            for req_id in scheduler_output.finished_req_ids:
                self._requests.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            if new.mm_features:
                self._add(new)
        for req_id, input_ids in scheduler_output.scheduled_encoder_inputs.items():
            request = self._requests[req_id]
            for input_id in input_ids:
                self._encode(request.features[input_id], request.inputs)

    def put_into(self, inputs: StepInputs, batch: StepBatch) -> StepInputs:
        """Return a step's inputs with the positions and the image embeddings that the model needs."""
        spans = self._spans(batch) if self._requests else []
        if not spans:
            return inputs
        positions = inputs.positions
        if self._has_grid_positions:
            positions = np.repeat(positions[None], 3, axis=0)
            for span in spans:
                assert span.request.positions is not None
                span.request.positions.fill(positions[:, span.start : span.stop], span.first)
        return replace(inputs, positions=positions, embeds=self._embed(inputs.token_ids, spans))

    def _embed(self, token_ids: np.ndarray, spans: list[_Span]) -> Tensor | None:
        """Return the step's embeddings, [num_tokens, hidden_size]; None if the step has no token of an image."""
        embeds: Tensor | None = None
        for span in spans:
            for feature in span.request.features:
                begin, end = max(feature.offset, span.first), min(feature.end, span.first + span.stop - span.start)
                if begin >= end:
                    continue
                if embeds is None:
                    # The token ids have a batch dimension of 1 as in the model's own forward pass, where prompt
                    # embeddings are inserted too.
                    (input_ids,) = upload([token_ids], self._model.device)
                    embeds = self._model.get_input_embeddings()(input_ids[None])[0]
                image = self._embeddings[feature.encoder_key]
                where = slice(span.start + begin - span.first, span.start + end - span.first)
                embeds[where] = image[begin - feature.offset : end - feature.offset]
        return embeds

    def _spans(self, batch: StepBatch) -> list[_Span]:
        stops = np.cumsum(batch.num_new_tokens)
        return [
            _Span(int(stops[index] - batch.num_new_tokens[index]), int(stops[index]), int(first), request)
            for index, (req_id, first) in enumerate(zip(batch.req_ids, batch.num_computed_tokens, strict=True))
            if (request := self._requests.get(req_id)) is not None
        ]

    def _add(self, new: NewRequestData) -> None:
        positions = None
        if self._has_grid_positions:
            positions = GridPositions.of_prompt(new.mm_features, len(new.prompt_token_ids))
        inputs = {item.mm_hash: item for item in new.encoder_inputs}
        self._requests[new.req_id] = _Pictured(new.mm_features, inputs, positions)

    def _encode(self, feature: MultiModalFeature, inputs: dict[str, EncoderInput]) -> None:
        image = inputs[feature.mm_hash]
        embeddings = encode_image(self._model, image)
        if embeddings.shape[0] != feature.num_embeds:
            raise IntegrityError(
                f"the encoder made {embeddings.shape[0]} embeddings of an image that has {feature.num_embeds}"
            )
        self._embeddings[feature.encoder_key] = embeddings
        self.num_encoded += EMBEDDINGS not in image.arrays


def pack_embeddings(embeddings: Tensor) -> PackedArray:
    """Pack embeddings as they travel between processes. Names the dtype as torch does: numpy lacks bfloat16."""
    data = embeddings.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return PackedArray(str(embeddings.dtype).removeprefix("torch."), tuple(embeddings.shape), data)


def encode_image(model: PreTrainedModel, image: EncoderInput) -> Tensor:
    """Encode one image by itself, so that its embeddings do not depend on other images.

    Returns [num_embeds, hidden_size] in the model's dtype. Embeddings that another engine has computed are used as is.
    """
    arrays = {
        name: pin_for(model.device, _unpack(array)).to(model.device, non_blocking=True)
        for name, array in image.arrays.items()
    }
    if (made := arrays.get(EMBEDDINGS)) is not None:
        return made.to(model.dtype)
    parts: Sequence[Tensor] = model.get_image_features(**arrays).pooler_output  # type: ignore[operator]  # nn.Module's attributes are untyped
    return torch.cat(tuple(parts)).to(model.dtype)


def _unpack(array: PackedArray) -> Tensor:
    dtype: torch.dtype = getattr(torch, array.dtype)
    # A copy: the bytes are read-only, and torch has no tensors that are.
    return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(array.shape)
