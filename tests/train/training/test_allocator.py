import platform
import resource

import numpy as np
import pytest

from train.training import allocator


def page_faults_of_an_array() -> int:
    """Pages fetched from the kernel to fill 80 MB that are freed again."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_freed_memory_is_used_again():
    allocator.keep_freed_memory()
    page_faults_of_an_array()
    assert page_faults_of_an_array() < 1000


def test_elsewhere_it_does_nothing(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(allocator.ctypes, "CDLL", None)
    allocator.keep_freed_memory()
