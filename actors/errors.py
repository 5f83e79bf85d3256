"""The errors of the actors floor.

EngineError
|-- DuplicateRequest   a request id that this engine still knows was submitted again
|-- EncodeRefused      another engine asked this one to encode an image that its encoder cannot take
|-- EngineNotStarted   the engine was asked for something that it can do once its model is loaded
|-- InvalidRecording   a file is no recording of decisions
|-- ProfileUnderWay    an engine makes one profile at a time
|-- IllegalTransition  a request was about to change its status by a transition that docs/states.md does not have
`-- IntegrityError     block or queue accounting contradicts itself: the engine must die and be replaced
"""

from collections.abc import Callable


class TravellingError(Exception):
    """An error that can be sent to another process; it is rebuilt there without a call of its __init__."""

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
    """The arrays of the image are not those that this model's encoder takes."""


class EngineNotStarted(EngineError):
    """The engine was asked for something that it can do once its model is loaded."""

    def __init__(self, engine_id: str) -> None:
        super().__init__(f"engine {engine_id} has not started yet")


class InvalidRecording(EngineError):
    """The file is no recording of decisions, or one of another version; the message names the file."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


class ProfileUnderWay(EngineError):
    """The engine is being profiled already."""


class IllegalTransition(EngineError):
    """A bug of raypd: a change of a request's status that docs/states.md does not have."""


class IntegrityError(EngineError):
    """A bug of raypd: an invariant of the block pool or of the queues does not hold."""
