"""Set-up for tests of attention."""

import pytest

from tape_jax.attention import pallas_triton, vendor


@pytest.fixture
def any_device(monkeypatch):
    """Takes the checks of the device out of the way: for what needs no device."""
    monkeypatch.setattr(pallas_triton, "_check_device", lambda interpret: None)
    monkeypatch.setattr(vendor, "compute_capability", lambda: (9, 0))
    for backend in (vendor.Splash, vendor.Cudnn, vendor.CudnnDirect, vendor.Tokamax):
        monkeypatch.setattr(backend, "check_device", lambda self, interpret: None)
