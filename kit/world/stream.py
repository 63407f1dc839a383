"""A rank's output: straight into its log file, at the level of file descriptors, so that C libraries and crashes are in it too."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from pathlib import Path


class LogStream(io.RawIOBase):
    """Writes to the log. A full disk loses output and counts it; it never raises in the code that printed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.lost = 0

    @classmethod
    def install(cls, folder: str, rank: int) -> LogStream:
        """Make the log this process's stdout and stderr."""
        path = Path(folder) / f"rank{rank}.log"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        stream = cls(1)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(stream, 1 << 16), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(stream, 1 << 10), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        return stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return os.write(self._fd, data)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
                raise
            self.lost += len(data)
            return len(data)

    def flushed(self) -> tuple[int, int]:
        """Flush what was printed; the log's size, and how many bytes were lost since the last call."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a person's code may have closed it, or put anything in its place
                stream.flush()
        lost, self.lost = self.lost, 0
        return os.fstat(self._fd).st_size, lost
