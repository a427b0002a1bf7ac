"""What UCX itself says it does, read from its own log.

UCX chooses the path per peer and prints the choice (`UCX_PROTO_INFO=y`): a table per operation, headed by who speaks to
whom. The log goes into a memory file of this process, so nothing of it reaches the terminal; warnings are passed on.
The tables that matter are those of `remote memory read` (READ transfers) to another process:

    | decode-0+1f intra-node cfg#1                                     |
    | remote memory read by ucp_get*(multi) into host memory from host |
    | Range  | Description |              Config                       |
    | 0..inf | zero-copy   | cma/memory                                |
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Iterator

_CONTEXT = re.compile(r"\| .*(self|intra-node|inter-node) cfg#\d+ +\|$")
_ROW = re.compile(r"\| +([\dKMG.inf]+) +\| [^|]+\| +([^|]+?) *\|$")
_RESOURCE = re.compile(r"\b([a-z][a-z0-9_]*)/[\w:.-]+")
_PROBLEM = re.compile(r"UCX +(?:WARN|ERROR|FATAL) +(.*)")
_KINDS = (
    (re.compile(r"^(cma|xpmem|cuda_ipc|rocm_ipc|tcp|gdr_copy|cuda_copy|self)$"), ""),
    (re.compile(r"^(posix|sysv|mm)$"), "shm"),
    (re.compile(r"^(rc|dc|ud|srd|gga|ib)(_|$)"), "rdma"),
)
_SETTINGS = {"UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "y"}


class UcxLog:
    """The log of every UCX context that was made inside `captured()`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: int | None = None
        self._position = 0
        self._rest = ""
        self._foreign = False
        self._reading = False
        self._paths: dict[str, None] = {}
        self._problems: list[str] = []

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """UCX reads its environment when it is loaded and when a context is made: both must happen in here.

        A log that the user configured is left alone, and `paths` then stays empty.
        """
        if any(os.environ.get(name) for name in ("UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCX_PROTO_INFO")):
            yield
            return
        if self._file is None:
            self._file = os.memfd_create("ucx-log")
        settings = {**_SETTINGS, "UCX_LOG_FILE": f"/proc/self/fd/{self._file}"}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name in settings:
                os.environ.pop(name, None)

    def paths(self) -> list[str]:
        """What carried or will carry reads from other processes, in order of appearance: cma, tcp, shm, rdma ..."""
        self._refresh()
        return list(self._paths)

    def take_problems(self) -> list[str]:
        """Warnings and errors since the last call."""
        self._refresh()
        problems, self._problems = self._problems, []
        return problems

    def _refresh(self) -> None:
        with self._lock:
            self._read_on()

    def _read_on(self) -> None:
        if self._file is None:
            return
        ctypes.CDLL(None).fflush(None)  # UCX writes through stdio; the lines may still lie in its buffer
        size = os.fstat(self._file).st_size
        if size <= self._position:
            return
        text = self._rest + os.pread(self._file, size - self._position, self._position).decode(errors="replace")
        self._position = size
        *lines, self._rest = text.split("\n")
        for line in lines:
            self._read_line(line)

    def _read_line(self, line: str) -> None:
        if problem := _PROBLEM.search(line):
            self._problems.append(problem.group(1))
        elif context := _CONTEXT.search(line):
            self._foreign, self._reading = context.group(1) != "self", False
        elif "| remote memory read by ucp_get" in line:
            self._reading = self._foreign
        elif self._reading and (row := _ROW.search(line)) and row.group(1).endswith("inf"):
            for resource in _RESOURCE.findall(row.group(2)):
                self._paths[kind_of(resource)] = None


def kind_of(resource: str) -> str:
    """The name people know for one of UCX's resources: rc_mlx5 is rdma, posix is shm; unknown ones stay as they are."""
    for pattern, kind in _KINDS:
        if pattern.match(resource):
            return kind or resource
    return resource
