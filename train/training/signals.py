"""The early end of a training: the exception it raises, and the signals that request it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

NON_FINITE_EXIT_CODE = 3
# Seconds in which the main thread is expected to answer a second signal.
PATIENCE = 2.0


class Stopped(Exception):
    """Training ended early, on purpose.

    Attributes:
      exit_code: for the shell: 128 + signal number, or 3 for a number that is not finite.
    """

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class Signals:
    """Remembers SIGINT, SIGTERM and SIGHUP while a step finishes; a second signal acts at once.

    A signal that is already ignored, as SIGHUP is under ``nohup``, stays ignored.

    Python's handlers wait for the main thread, which may be inside a compilation or a long step. A
    separate thread therefore prints the messages at once. If the main thread is still busy at a
    second signal, this thread ends the process.

    Attributes:
      received: number of the first signal, or 0.
    """

    def __init__(
        self,
        first: Callable[[], str] | None = None,
        second: Callable[[], str] | None = None,
        *,
        as_preemption: bool = False,
    ) -> None:
        """
        Args:
          as_preemption: whether SIGTERM is jax's, which makes several processes stop after the same
            step; SIGINT and SIGHUP are then passed on as SIGTERM, and ``received`` stays 0.
          first: the message for the first signal; None: nothing.
          second: the message for a second one that ends the process, if the main thread does not
            answer; None: it is waited for.
        """
        self.received = 0
        self._first, self._second = first, second
        self._as_preemption = as_preemption
        self._previous: dict[int, Any] = {}
        self._acted = threading.Event()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            own = () if self._as_preemption else (signal.SIGTERM,)
            for number in (signal.SIGINT, signal.SIGHUP, *own):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._receive)
            if self._first:
                self._watch(tuple(self._previous))
        return self

    def __exit__(self, *_: object) -> None:
        self._acted.set()
        self._stack.close()
        self._restore()
        if self._as_preemption and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Nobody asks jax about it any more.

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._as_preemption:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.received = number
        heeded = signal.SIGINT in self._previous
        self._restore()
        if heeded:
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._act)

    def _act(self, number: int, frame: FrameType | None) -> None:
        self._acted.set()
        self._restore()
        raise KeyboardInterrupt

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _watch(self, numbers: Sequence[int]) -> None:
        """Starts a thread that reads signals from a pipe, where the C library writes them."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._say, args=(read, numbers), daemon=True)
        thread.start()
        # In reverse order: the thread ends with the pipe.
        self._stack.callback(os.close, read)
        self._stack.callback(thread.join, 1.0)
        self._stack.callback(os.close, write)
        self._stack.callback(signal.set_wakeup_fd, before)

    def _say(self, pipe: int, numbers: Sequence[int]) -> None:
        from tqdm import tqdm

        assert self._first is not None
        seen = 0
        while content := os.read(pipe, 1):
            if content[0] not in numbers:
                continue
            seen += 1
            if seen == 1:
                tqdm.write(self._first(), file=sys.stderr)
            elif self._second and not self._acted.wait(PATIENCE):
                tqdm.write(self._second(), file=sys.stderr)
                os._exit(128 + content[0])
