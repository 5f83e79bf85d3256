"""The errors of kv_transfer.

KVTransferError
|-- HandshakeRefused   the two ends of a link do not agree (model, dtype, layout, block size, protocol version)
|-- LinkLost           the link's data or control stream is gone; every transfer on it fails
|   `-- ChunkTimeout   an announced chunk did not arrive, or leave, before its deadline
|-- ProtocolViolation  a peer sent something that the state of its transfer or link does not allow; the link is closed
|-- TlsUnusable        the certificates of internal_tls cannot be used
|-- TransportUnavailable  the configured transport cannot run here (no GPU, missing package)
|-- Untrusted          the other end has not proven that it belongs to this cluster
|   |-- WrongSecret    the other end does not know the cluster's secret
|   |-- OtherParty     the other end knows it, but is another engine, or incarnation, than the one that was meant
|   |-- OtherUser      the other end runs on this host as another user than this process
|   |-- OtherProtocol  the other end has another version of the handshake
|   `-- NotRaypd       the other end sent something that is no handshake, or sent nothing in time
|       `-- HungUp     the other end closed the connection before the proof: it may have too many callers
|-- SecretUnusable     the file of the cluster's secrets cannot be used
|-- StoreUnavailable   a configured KV store is not installed, does not load, or refuses its options
`-- TransportWedged    a transport cannot say whether it still touches blocks: the engine has to end
"""


class KVTransferError(Exception):
    """The root of kv_transfer's errors."""


class HandshakeRefused(KVTransferError):
    """The two ends of a link do not agree on what a block is."""


class LinkLost(KVTransferError):
    """A link is gone. Its transfers fail, and their requests are recovered; the link's next use opens it again."""


class ChunkTimeout(LinkLost):
    """An announced chunk did not move before its deadline, so the link is closed."""


class ProtocolViolation(KVTransferError):
    """A peer's message does not fit the state of its transfer or link."""


class TransportUnavailable(KVTransferError):
    """The configured transport cannot run on this machine; the message says what is missing."""


class Untrusted(KVTransferError):
    """A connection's other end has not proven that it belongs to this cluster. Nothing but the handshake was read."""


class WrongSecret(Untrusted):
    """The other end does not know the cluster's secret."""


class OtherParty(Untrusted):
    """The other end belongs to the cluster, but is another process or incarnation than the one that was meant."""


class OtherUser(Untrusted):
    """The other end is a process of this host that runs as another user."""


class OtherProtocol(Untrusted):
    """The other end has another version of the handshake: it is an older or a newer raypd."""


class NotRaypd(Untrusted):
    """The other end sent something that is no handshake, or sent nothing in time."""


class HungUp(NotRaypd):
    """The other end closed the connection before both ends were proven. Another attempt to connect may succeed."""


class SecretUnusable(KVTransferError):
    """The file of the cluster's secrets cannot be read, is open to other users, or holds no valid secret."""


class TlsUnusable(KVTransferError):
    """The authority, certificate and key of internal_tls cannot be read, or do not fit together."""


class StoreUnavailable(KVTransferError):
    """A configured KV store cannot be used; the message says which and why."""


class TransportWedged(KVTransferError):
    """A link could not be aborted, so the device may still write into blocks. Only the end of the process stops it."""
