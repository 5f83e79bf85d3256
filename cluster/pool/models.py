"""The model versions of a cluster: a rolling update adds a new version while the old one is still served."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.config import ClusterConfig


class Models:
    """The checkpoint of each model version. The configuration's own model is version 1."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self.directories: dict[int, str] = {1: config.model.model}

    @property
    def newest(self) -> int:
        """The version that new engines serve."""
        return max(self.directories)

    def add(self, directory: str) -> int:
        """Add a version. Returns its number."""
        self.directories[self.newest + 1] = directory
        return self.newest

    def restore(self, directories: Mapping[int, str]) -> None:
        """Take over the versions of an earlier controller."""
        self.directories = dict(directories)

    def config(self, version: int) -> ClusterConfig:
        """Return the cluster's configuration with the model of a version."""
        model = self._config.model.model_copy(update={"model": self.directories[version]})
        return self._config.model_copy(update={"model": model})
