"""Everything that can go wrong on this floor.

KVTransferError
|-- HandshakeRefused   the two ends do not agree (model, dtype, layout, block size, protocol version)
|-- LinkLost           the link's data or control stream is gone; every transfer on it fails
|   `-- ChunkTimeout   an announced chunk did not arrive, or leave, before its deadline
|-- ProtocolViolation  a peer said something that its state does not allow; its link is closed
|-- TransportUnavailable  the configured transport cannot run here (no GPU, missing package)
|-- StoreUnavailable  a configured KV store is not installed, does not load, or refuses its options
`-- TransportWedged    a transport cannot say whether it still touches blocks: the engine has to end
"""


class KVTransferError(Exception):
    """The root of this floor's errors."""


class HandshakeRefused(KVTransferError):
    """Both ends of a link must agree on what a block is; these two do not."""


class LinkLost(KVTransferError):
    """The link is gone. Its transfers fail into recovery; the link is rebuilt on next use."""


class ChunkTimeout(LinkLost):
    """A chunk that was announced stalled past its deadline, which kills the link."""


class ProtocolViolation(KVTransferError):
    """A peer's message does not fit the state of its transfer."""


class TransportUnavailable(KVTransferError):
    """The configured transport cannot run on this machine; the message says what is missing."""


class StoreUnavailable(KVTransferError):
    """A configured KV store cannot be used; the message says which and why."""


class TransportWedged(KVTransferError):
    """A link could not be aborted, so the device may still write into blocks. Only the end of the process stops it."""
