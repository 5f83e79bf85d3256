"""The settings of images in prompts: limits on their size, number and processing."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ImageConfig(BaseModel):
    """Limits on the images of requests, and on the processes that prepare them for the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_images: int = Field(8, ge=0, le=1024, description="Limit on the number of images in a request.")
    max_image_kib: int = Field(8192, ge=1, description="Limit on the size of an image as it is sent, in KiB.")
    max_pixels: int = Field(
        33_554_432, ge=1, description="Limit on the pixels of an image as it is sent, before it is scaled down."
    )
    formats: tuple[str, ...] = Field(
        ("PNG", "JPEG", "WEBP"), description="Image formats that are accepted, by their names in Pillow."
    )
    max_image_tokens: int = Field(
        2048, ge=1, description="Limit on the number of tokens that one image takes in the prompt."
    )
    max_input_mib: int = Field(
        32,
        ge=1,
        le=56,
        description="Limit on the encoder's input for all images of one request, as it is sent to an engine, in MiB.",
    )
    max_input_in_flight_mib: int = Field(
        1024,
        ge=1,
        description="Limit on the encoder's input of all requests in flight, in MiB; further requests get "
        "RESOURCE_EXHAUSTED.",
    )
    num_processors: int = Field(
        1,
        ge=1,
        le=16,
        description="Number of processes that prepare images. Each starts when it is first needed, and takes 400 MB.",
    )
    timeout_s: float = Field(10.0, gt=0, description="Seconds that the preparation of one image may take.")
    memory_mib: int = Field(1024, ge=64, description="Memory that the preparation of one image may take, in MiB.")
    wait_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Seconds that an image waits for a free process; after that its request gets RESOURCE_EXHAUSTED.",
    )
    cache_mib: int = Field(
        256, ge=0, description="Memory for prepared images, which later requests with the same image reuse, in MiB."
    )
