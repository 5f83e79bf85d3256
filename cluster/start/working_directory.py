"""Looks at packages in the working directory that Ray's processes load in place of raypd's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import actors
import cluster
import kv_transfer
from cluster.errors import CannotStart

logger = logging.getLogger(__name__)

_PACKAGES: Final = (actors, cluster, kv_transfer)


def look_for_hiding_packages(directory: Path) -> None:
    """Raise CannotStart if a directory has packages or modules with the names of raypd's; another raypd is logged.

    Ray puts the directory in which a driver was started before all others on the module path of its processes
    (`_py_driver_sys_path` in ray/_private/worker.py). There, engines and ingresses would fail with an error that names
    no cause. In another checkout of raypd they run its code, which may be what its author wants.
    """
    hiding = list(_hiding_files(directory))
    own = Path(__file__).relative_to(Path(cluster.__path__[0]).parent)
    if hiding and (directory / own).is_file():
        told = {"directory": str(directory), "installed": str(Path(cluster.__path__[0]).parent)}
        logger.warning("Ray's processes run the raypd of the working directory, not the installed one", extra=told)
    elif hiding:
        raise CannotStart(
            f"the working directory has the file {hiding[0]}, which Ray's processes would load in place of raypd's "
            f"package of that name: start raypd in another directory"
        )


def _hiding_files(directory: Path) -> Iterator[Path]:
    for package in _PACKAGES:
        name = package.__name__
        for file in (Path(name, "__init__.py"), Path(f"{name}.py")):
            found = directory / file
            if found.is_file() and found.parent.resolve() != Path(package.__path__[0]).resolve():
                yield file
