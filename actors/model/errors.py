"""The errors of loading a model and of computing with it.

ModelError
|-- CheckpointError    the checkpoint is missing, incomplete or unreadable
|-- LoadFailed         transformers failed in an unforeseen way
|-- UnsupportedModel   this engine cannot serve the architecture
|   `-- SelfCheckFailed  the engine's forward pass does not compute transformers' logits
|-- DeviceUnavailable  the configured device is not on this machine
|-- AttentionBackendUnavailable  the configured attention backend cannot serve this model on this machine
|-- KVCacheTooSmall    the memory budget does not hold a usable KV cache
|-- KVCacheTooLarge    the device has less memory free than the configured KV cache needs
|-- RankLost           another tensor-parallel rank of this engine is gone, or did not answer in time
`-- RanksDisagree      a bug in raypd: two ranks of an engine sampled different tokens
"""

from actors.errors import TravellingError


class ModelError(TravellingError):
    """The root of the errors of model execution."""


class CheckpointError(ModelError):
    """The checkpoint directory is missing, incomplete or unreadable; the message says which file and why."""


class LoadFailed(ModelError):
    """Loading the model failed in an unforeseen way; the message is that of the original error."""


class UnsupportedModel(ModelError):
    """The engine would compute this architecture wrongly, so it refuses the model."""

    def __init__(self, architecture: str, reason: str) -> None:
        super().__init__(f"{architecture} cannot be served: {reason}")
        self.architecture = architecture
        self.reason = reason


class SelfCheckFailed(UnsupportedModel):
    """The engine's forward pass does not compute what transformers' own does."""


class DeviceUnavailable(ModelError):
    """The configured device is not on this machine."""


class AttentionBackendUnavailable(ModelError):
    """The configured attention backend cannot serve this model on this machine; the message says why."""


class KVCacheTooSmall(ModelError):
    """The memory budget holds fewer blocks than an engine needs; the message says how many it holds."""


class KVCacheTooLarge(ModelError):
    """The device has less memory free than the configured KV cache needs; the message has both figures."""


class RankLost(ModelError):
    """A tensor-parallel rank is gone, or did not answer in time. The engine has to end: it needs all its ranks."""


class RanksDisagree(ModelError):
    """Two ranks sampled different tokens, which is a bug in raypd: all ranks have the same logits."""
