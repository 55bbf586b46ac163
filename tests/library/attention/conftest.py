"""Set-up for tests of attention."""

import pytest

from tape_jax._src.attention import (
    pallas_blocks,
    pallas_mosaic,
    pallas_triton,
    vendor_cudnn,
    vendor_splash,
    vendor_tokamax,
)


@pytest.fixture
def any_device(monkeypatch):
    """Takes the checks of the device out of the way: for what needs no device."""
    monkeypatch.setattr(pallas_triton, "_check_device", lambda interpret: None)
    monkeypatch.setattr(pallas_mosaic, "_check_release", lambda: None)
    monkeypatch.setattr(pallas_mosaic, "_check_device", lambda: None)
    monkeypatch.setattr(pallas_blocks, "compute_capability", lambda: (9, 0))
    for backend in (vendor_splash.Splash, vendor_cudnn.Cudnn, vendor_tokamax.Tokamax):
        monkeypatch.setattr(backend, "check_device", lambda self, interpret: None)
