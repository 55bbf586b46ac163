"""Processes that run the command line, and what is expected of what they print."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.paths import ROOT

LIMIT = 300.0


class Lost(Exception):
    """A trial that was not survived, and why."""


class Process(subprocess.Popen):
    """A process in the background, its output in a file."""

    def __init__(self, command: Sequence[str], log: Path, **environment: str):
        self._log = log
        with open(log, "w", encoding="utf-8") as file:
            super().__init__(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def finish(self, expected: int = 0, limit: float = LIMIT) -> str:
        """Waits for its end, checks its exit code, and returns what it has printed."""
        try:
            code = self.wait(limit)
        except subprocess.TimeoutExpired:
            self.destroy()
            raise Lost(f"hung for {limit:.0f} s: {last_line(self.output())}") from None
        if code != expected:
            raise Lost(f"exit code {code}, not {expected}: {last_line(self.output())}")
        return self.output()

    def destroy(self) -> None:
        """SIGKILL to it and to all that it has started."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()


def wait_until(condition: Callable[[], bool], process: Process) -> None:
    """Waits until something is true, or the process has ended, but not forever."""
    end = time.monotonic() + LIMIT
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.0005)


def seconds(action: Callable[[], object]) -> float:
    """How long something takes."""
    start = time.monotonic()
    action()
    return time.monotonic() - start


def expect(pattern: str, output: str) -> None:
    """Raises :class:`Lost` unless a process has printed what it should, and no traceback."""
    if not re.search(pattern, output):
        raise Lost(f"expected a message with {pattern!r}; got: {last_line(output)}")
    if "Traceback" in output:
        raise Lost(f"a traceback instead of a message: {last_line(output)}")


def last_line(text: str) -> str:
    """The last line that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "(no output)")


def quoted(path: Path) -> str:
    """A path for the shell."""
    return shlex.quote(str(path))


def can_mount() -> bool:
    """Whether a file system can be mounted in a namespace of one's own."""
    if not shutil.which("unshare"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        script = f"mount -t tmpfs -o size=64k tmpfs {shlex.quote(folder)}"
        command = ["unshare", "-rm", "sh", "-c", script]
        return subprocess.run(command, capture_output=True).returncode == 0


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
