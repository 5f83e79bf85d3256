"""Everything that can go wrong on this floor.

EngineError
|-- DuplicateRequest   a request id that this engine still knows was submitted again
|-- EncodeRefused      another engine wants an image encoded that this one's encoder cannot be given
|-- ProfileUnderWay    an engine makes one profile at a time
|-- IllegalTransition  a request was about to change its status along an arrow that is not drawn
`-- IntegrityError     block or queue accounting contradicts itself: the engine must die and be replaced
"""

from collections.abc import Callable


class TravellingError(Exception):
    """Can be sent to another process whatever its __init__ wants: it is put together there without a call of it."""

    def __reduce__(self) -> tuple[Callable[..., Exception], tuple[object, ...]]:
        return _put_together, (type(self), self.args, self.__dict__)


def _put_together(kind: type[Exception], arguments: tuple[object, ...], state: dict[str, object]) -> Exception:
    error: Exception = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


class EngineError(TravellingError):
    """The root of this floor's errors."""


class DuplicateRequest(EngineError):
    """The id belongs to a request that is unfinished here, or whose blocks a transfer still holds."""


class EncodeRefused(EngineError):
    """The image is not made of what this model's encoder takes."""


class ProfileUnderWay(EngineError):
    """The engine is being profiled already."""


class IllegalTransition(EngineError):
    """A bug of ours: docs/states.md draws every change of status that there is."""


class IntegrityError(EngineError):
    """A bug of ours: an invariant of the block pool or of the queues does not hold."""
