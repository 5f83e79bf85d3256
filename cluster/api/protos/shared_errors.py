"""The errors that the client shares with the cluster, and how an error's details travel between them.

cluster/errors.py and cluster/client/errors.py draw the trees of the errors below ClusterError.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Final

STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"
"""The metadata key of a serialized google.rpc.Status, by gRPC's convention for richer errors."""


class ClusterError(Exception):
    """The root of the errors of cluster/. An error can be pickled whatever arguments its __init__ takes."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
        # The other process makes the error without calling __init__.
        new_object = copyreg.__newobj__  # type: ignore[attr-defined]  # pickle's protocol names it, typeshed does not
        return new_object, (type(self), *self.args), self.__dict__


class InvalidConfig(ClusterError):
    """The cluster's or a client's settings cannot be used; nothing was started."""

    def __init__(self, source: str, mistakes: list[str]) -> None:
        super().__init__("\n".join(f"{source}: {mistake}" for mistake in mistakes))
        self.mistakes = mistakes
