"""Watches files whose new content has to be used when it changes, such as certificates that are renewed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

_LOOK_INTERVAL_S: Final = 1.0

_Stamp: TypeAlias = tuple[tuple[int, int, int], ...]


class WatchedFiles:
    """A few files, any of which may change. A symbolic link that points elsewhere counts, as in Kubernetes' secrets."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = tuple(paths)
        self._clock = clock
        self._stamp: _Stamp | None = None
        self._next_look_s = 0.0

    def have_changed(self) -> bool:
        """Return whether a file has changed since the last call that returned True; True at the first call.

        The files are looked at once a second at most. A file that is missing now counts as unchanged: it may be there
        again in a moment.
        """
        now_s = self._clock()
        if self._stamp is not None and now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + _LOOK_INTERVAL_S
        try:
            stamp = tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in map(Path.stat, self._paths))
        except OSError:
            return False
        has_changed = stamp != self._stamp
        self._stamp = stamp
        return has_changed
