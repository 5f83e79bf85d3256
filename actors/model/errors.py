"""The errors of loading a model and of computing with it.

ModelError
|-- CheckpointError    the checkpoint is missing, incomplete or unreadable
|-- LoadFailed         transformers failed in a way that nobody foresaw
|-- UnsupportedModel   the architecture cannot be served by this engine, and why
|   `-- SelfCheckFailed  the paged forward does not give the stock model's logits
|-- DeviceUnavailable  the configured device is not on this machine
|-- KVCacheTooSmall    the memory budget does not hold a usable KV cache
|-- KVCacheTooLarge    the device has less memory free than the configured KV cache needs
|-- RankLost           another tensor-parallel rank of this engine is gone, or too late
`-- RanksDisagree      a bug of ours: two ranks of an engine sampled different tokens
"""

from actors.errors import TravellingError


class ModelError(TravellingError):
    """The root of the errors of model execution."""


class CheckpointError(ModelError):
    """The checkpoint directory is missing, incomplete or unreadable; the message says which file and why."""


class LoadFailed(ModelError):
    """Something else went wrong while the model was loaded; the message is that of the error behind it."""


class UnsupportedModel(ModelError):
    """This architecture would be served wrongly, so it is not served at all."""

    def __init__(self, architecture: str, reason: str) -> None:
        super().__init__(f"{architecture} cannot be served: {reason}")
        self.architecture = architecture
        self.reason = reason


class SelfCheckFailed(UnsupportedModel):
    """The engine's own forward disagrees with the stock model's."""


class DeviceUnavailable(ModelError):
    """The configured device is not on this machine."""


class KVCacheTooSmall(ModelError):
    """The memory budget gives fewer blocks than an engine needs; the message says how much is there."""


class KVCacheTooLarge(ModelError):
    """The device has less memory free than the configured KV cache needs; the message has both figures."""


class RankLost(ModelError):
    """A tensor-parallel rank is gone, or too late. The engine cannot go on: its ranks are no longer in step."""


class RanksDisagree(ModelError):
    """A bug of ours: ranks compute the same logits and must sample the same tokens."""
