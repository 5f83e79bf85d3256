"""Loads what an ingress needs for requests of the model versions that its cluster serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

from actors.checkpoint.generation_defaults import (
    NO_DEFAULTS,
    GenerationDefaults,
    InvalidGenerationConfig,
    read_generation_file,
)
from actors.core.requests.block_hash import BlockHashKey
from cluster.config import ClusterConfig
from cluster.errors import TokenizerUnusable
from cluster.images.image_support import open_prompt_images
from cluster.requests.model_versions import ModelVersion, ModelVersions
from cluster.routing.base import Router
from cluster.routing.cost_router import CostRouter
from cluster.routing.load_book import LoadBook
from cluster.routing.prefix_aware import PrefixAwarePair
from cluster.routing.prefixes.prefix_indexes import PrefixIndexes
from cluster.routing.recording.recorded_routing import RoutingRecorder
from cluster.sessions.cluster_membership import ServedModel
from cluster.settings.routing import RoutingMode
from cluster.text.adapters import AdapterDirectory
from cluster.text.input_processor import InputProcessor
from cluster.text.model_description import ModelDescription
from cluster.text.model_tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)


class ModelLoader:
    """Loads tokenizers and other files of model versions, in threads beside the ingress's event loop."""

    def __init__(
        self,
        config: ClusterConfig,
        versions: ModelVersions,
        adapters: AdapterDirectory | None = None,
        *,
        hash_key: BlockHashKey,
        load_book: LoadBook | None = None,
        indexes: PrefixIndexes | None = None,
        recorder: RoutingRecorder | None = None,
    ) -> None:
        """Begin with nothing loaded.

        versions: gets each version that is loaded
        adapters: the adapters of all versions
        hash_key: the cluster's key of block hashes
        load_book: the engines' work, by which requests are routed; None: a book of its own, which gets no reports
        indexes:  the prefix indexes that the routers read
        recorder: records what routers choose; the book and the indexes have to be its own
        """
        self._recorder = recorder
        self._load_book = LoadBook() if load_book is None else load_book
        self._indexes = indexes or PrefixIndexes()
        self._config = config
        self._hash_key = hash_key
        self._versions = versions
        self._adapters = adapters
        self._loaded: dict[int, ServedModel] = {}
        self.errors: dict[int, str] = {}
        """For each version that could not be loaded the error of the last try."""
        self._lock = asyncio.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether no version was loaded yet."""
        return not self._loaded

    async def load(self, model: ServedModel) -> None:
        """Load what requests of this version need, unless it is loaded already. Raises TokenizerUnusable."""
        async with self._lock:
            known, loaded = self._loaded.get(model.version), self._versions.get(model.version)
            if known == model and loaded is not None:
                return
            self.errors.pop(model.version, None)
            if known is not None and loaded is not None and known.directory == model.directory:
                tokenizer, images = loaded.input_processor.tokenizer, loaded.input_processor.images
                router = loaded.router
            else:
                tokenizer = await asyncio.to_thread(self._load_tokenizer, model)
                limits = self._config.ingress.images
                images = await asyncio.to_thread(open_prompt_images, Path(model.directory), limits)
                router = self._make_router(model)
            defaults = await asyncio.to_thread(self._read_defaults, model)
            description = ModelDescription.of(self._config.model_name, model.facts, defaults)
            processor = InputProcessor(
                description,
                tokenizer,
                self._config.ingress.limits,
                adapters=self._adapters,
                images=images,
                slo=self._config.slo.aims,
            )
            self._versions.put(ModelVersion(model.version, processor, router))
            self._loaded[model.version] = model

    async def load_all(self, models: Iterable[ServedModel]) -> None:
        """Load all versions. One that cannot be loaded gets no requests, and its error is kept."""
        for model in models:
            try:
                await self.load(model)
            except TokenizerUnusable as error:
                self.errors[model.version] = str(error)
                logger.error(
                    "a model version cannot be loaded, so it gets no requests",
                    extra={"version": model.version, "error": str(error)},
                )

    def _read_defaults(self, model: ServedModel) -> GenerationDefaults:
        if self._config.model.generation_config == "ignore":
            return NO_DEFAULTS
        try:
            return read_generation_file(Path(model.directory)).defaults
        except InvalidGenerationConfig as error:
            raise TokenizerUnusable(str(error)) from error

    def _load_tokenizer(self, model: ServedModel) -> ModelTokenizer:
        use_fastokens = self._config.ingress.use_fastokens
        tokenizer = ModelTokenizer.from_directory(Path(model.directory), use_fastokens=use_fastokens)
        if use_fastokens and tokenizer.why_not_fast:
            logger.info(
                "prompts are encoded by Hugging Face's tokenizers",
                extra={"version": model.version, "reason": tokenizer.why_not_fast},
            )
        return tokenizer

    def _make_router(self, model: ServedModel) -> Router:
        is_aggregated = self._config.routing.mode is RoutingMode.AGGREGATE
        block_size = model.facts.layout.block_size
        index = self._indexes.make(model.version, block_size)
        pairs = PrefixAwarePair(block_size, index, hash_key=self._hash_key, is_aggregated=is_aggregated)
        mode = self._config.routing.mode
        router = CostRouter(pairs, self._load_book, mode)
        if self._recorder is None:
            return router
        return self._recorder.make_router(router, index, block_size, mode, is_aggregated=is_aggregated)
