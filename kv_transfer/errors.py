"""Everything that can go wrong on this floor.

KVTransferError
|-- HandshakeRefused   the two ends do not agree (model, dtype, layout, block size, protocol version)
|-- LinkLost           the link's data or control stream is gone; every transfer on it fails
|   `-- ChunkTimeout   an announced chunk did not arrive, or leave, before its deadline
|-- ProtocolViolation  a peer said something that its state does not allow; its link is closed
|-- TlsUnusable        the certificates of internal_tls cannot be used
|-- TransportUnavailable  the configured transport cannot run here (no GPU, missing package)
|-- Untrusted          the other end has not proven that it belongs to this cluster
|   |-- WrongSecret    it does not know the cluster's secret
|   |-- OtherParty     it does, but it is another engine, or incarnation, than the one that was meant
|   |-- OtherUser      it runs on this host as another user than this process
|   |-- OtherProtocol  it speaks another version of the handshake
|   `-- NotRaypd       what it says is no handshake, or it said nothing in time
|       `-- HungUp     it ended the connection before it was proven: strangers may have taken its callers' places
|-- SecretUnusable     the file of the cluster's secrets cannot be used
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


class Untrusted(KVTransferError):
    """A connection's other end has not proven that it belongs to this cluster. Nothing was told or taken."""


class WrongSecret(Untrusted):
    """The other end does not know the cluster's secret."""


class OtherParty(Untrusted):
    """The other end belongs to the cluster, but is another one than was meant, or another incarnation of it."""


class OtherUser(Untrusted):
    """The other end is a process of this host that another user has started."""


class OtherProtocol(Untrusted):
    """The other end speaks another version of the handshake: an older or a newer raypd."""


class NotRaypd(Untrusted):
    """What the other end says is no handshake, or it said nothing in time."""


class HungUp(NotRaypd):
    """The other end has closed the connection before both ends were proven. Calling again may help."""


class SecretUnusable(KVTransferError):
    """The file of the cluster's secrets cannot be read, others may read it, or it holds no secret."""


class TlsUnusable(KVTransferError):
    """The authority, certificate and key of internal_tls cannot be read, or do not fit together."""


class StoreUnavailable(KVTransferError):
    """A configured KV store cannot be used; the message says which and why."""


class TransportWedged(KVTransferError):
    """A link could not be aborted, so the device may still write into blocks. Only the end of the process stops it."""
