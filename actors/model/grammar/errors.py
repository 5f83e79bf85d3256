"""The errors that a grammar can end in.

GrammarError
|-- GrammarRefused     no engine can compile the grammar; the message is the compiler's
|   |-- GrammarTooSlow    it takes too much time to compile
|   `-- GrammarTooLarge   it takes too much memory to compile
`-- CompilerUnusable   this engine cannot compile any grammar
"""

from actors.errors import TravellingError


class GrammarError(TravellingError):
    """The root of the errors of structured output."""


class GrammarRefused(GrammarError):
    """The grammar itself is at fault: it is wrong, or it takes too much time or memory."""


class GrammarTooSlow(GrammarRefused):
    """The grammar takes too much time to compile."""


class GrammarTooLarge(GrammarRefused):
    """The grammar takes too much memory to compile, or is too large once it is compiled."""


class CompilerUnusable(GrammarError):
    """The compiler does not start, or the engine is ending. Another engine may compile the grammar."""
