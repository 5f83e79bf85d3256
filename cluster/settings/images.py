"""The settings of images: how much of an ingress they may take."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ImageConfig(BaseModel):
    """Bounds on the images of requests, and on the processes that work on them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_images: int = Field(8, ge=0, le=1024, description="Number of images in a request.")
    max_image_kib: int = Field(8192, ge=1, description="Largest image as it is sent, in KiB.")
    max_pixels: int = Field(33_554_432, ge=1, description="Pixels of an image before it is made smaller.")
    formats: tuple[str, ...] = Field(("PNG", "JPEG", "WEBP"), description="Formats that are read, by Pillow's names.")
    max_image_tokens: int = Field(2048, ge=1, description="Tokens that one image may have in the prompt.")
    max_input_mib: int = Field(
        32,
        ge=1,
        le=56,
        description="Limit on the encoder's input for all images of one request, as it is sent to an engine.",
    )
    max_input_in_flight_mib: int = Field(
        1024,
        ge=1,
        description="Limit on the encoder's input of all requests in flight; more is answered RESOURCE_EXHAUSTED.",
    )
    num_processors: int = Field(
        1, ge=1, le=16, description="Processes that work on images; each starts when it is first needed, with 400 MB."
    )
    timeout_s: float = Field(10.0, gt=0, description="Seconds that the work on one image may take.")
    memory_mib: int = Field(1024, ge=64, description="Memory that the work on one image may take, in MiB.")
    wait_timeout_s: float = Field(
        30.0, gt=0, description="How long an image waits for its turn; then its request is answered RESOURCE_EXHAUSTED."
    )
    cache_mib: int = Field(
        256, ge=0, description="Memory for results that are kept for later requests with the same image, in MiB."
    )
