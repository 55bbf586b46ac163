"""The C library's allocator, told how a training uses memory."""

from __future__ import annotations

import ctypes
import os
import platform

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory for the next allocation; elsewhere it does nothing.

    XLA allocates the temporary memory of a step anew for every step on the CPU. By default glibc
    fetches so much memory from the kernel each time, page by page, and hands it back: 18 of the 48
    milliseconds of processor time that a step of ``configs/addition_demo.py`` took. On one
    core all threads share an arena, since a thread's own holds no block over 64 MB; on several they
    would wait for one another.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    for parameter in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        libc.mallopt(parameter, (1 << 31) - 1)
    libc.mallopt(_TOP_PAD, 1 << 26)
    if len(os.sched_getaffinity(0)) == 1:
        libc.mallopt(_ARENA_MAX, 1)
