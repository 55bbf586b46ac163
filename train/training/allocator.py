"""The C library's allocator, told how a training uses memory."""

from __future__ import annotations

import ctypes
import platform

# For the environment of a process that starts: glibc asks for pages of two megabytes. What
# keep_freed_memory cannot keep, blocks over 64 MB, then costs a step little: with it a step of
# configs/bytes_demo.py took 84 milliseconds of processor time, and 135 without.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory for the next allocation; elsewhere it does nothing.

    XLA allocates the temporary memory of a step anew for every step on the CPU. By default glibc
    fetches so much memory from the kernel each time, page by page, and hands it back: 18 of the 48
    milliseconds of processor time that a step of ``configs/addition_demo.py`` took.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
    libc.mallopt(_TOP_PAD, 1 << 26)
