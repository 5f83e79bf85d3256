"""Cutting a connection of another process, from outside: both ends see the network fail, and neither has done anything.

A copy of the process's descriptor is taken (pidfd_getfd, Linux 5.6) and shut down. That works for TCP and for the Unix
sockets of links through shared memory alike, needs no firewall, and hits this one connection only. It takes the right
to trace the process: root, or a parent where Yama's ptrace_scope is at most 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Final

import psutil

_PIDFD_GETFD: Final = 438
"""The number of the system call, the same on every architecture."""
_LOCAL_LINK_PREFIX: Final = "@raypd-kv-"
"""Names of the Unix sockets on which producers serve consumers of the same host."""


class CannotCut(Exception):
    """This machine does not let us."""


def check_can_cut() -> None:
    """Try it on a child of ours. Raises CannotCut with the reason."""
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen(["cat"], stdin=theirs.fileno(), stdout=subprocess.DEVNULL) as child:
        try:
            with _copy_of(child.pid, 0) as copy:
                copy.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            child.kill()
            raise CannotCut(f"no connection of another process can be cut: {error}") from error


def cut_tcp(process: psutil.Process, remote_port: int) -> int:
    """Cut the process's connections to this port; returns how many there were."""
    num_cut = 0
    for connection in process.net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr.port == remote_port:
            num_cut += _cut(process.pid, connection.fd)
    return num_cut


def cut_local_links(process: psutil.Process) -> int:
    """Cut the links on which the process shares its KV pool with consumers of this host; returns how many it cut."""
    num_cut = 0
    for connection in process.net_connections("unix"):
        if str(connection.laddr).startswith(_LOCAL_LINK_PREFIX):
            num_cut += _cut(process.pid, connection.fd)
    return num_cut


def _cut(pid: int, fd: int) -> int:
    # Closed meanwhile, by an end of its own: then there is nothing to cut.
    with contextlib.suppress(OSError), _copy_of(pid, fd) as copy:
        if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # A listener has the same name.
            copy.shutdown(socket.SHUT_RDWR)
            return 1
    return 0


@contextlib.contextmanager
def _copy_of(pid: int, fd: int) -> Iterator[socket.socket]:
    """The socket behind a descriptor of another process. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        copy: int = libc.syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    if copy < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=copy) as connection:
        yield connection
