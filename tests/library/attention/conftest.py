"""Set-up for tests of attention."""

import sys
import types

import pytest

from tape_jax._src.attention import (
    choice,
    pallas_mosaic,
    vendor_cudnn,
    vendor_splash,
    vendor_tokamax,
)
from tape_jax._src.core import devices


@pytest.fixture
def any_device(monkeypatch):
    """Takes the checks of the device out of the way: for what needs no device."""
    monkeypatch.setattr(pallas_mosaic, "_check_release", lambda: None)
    monkeypatch.setattr(pallas_mosaic, "_check_device", lambda: None)
    monkeypatch.setattr(devices, "compute_capability", lambda: (9, 0))
    for backend in (vendor_splash.Splash, vendor_cudnn.Cudnn, vendor_tokamax.Tokamax):
        monkeypatch.setattr(backend, "check_device", lambda self, interpret: None)


@pytest.fixture
def register(monkeypatch):
    """Registers a backend ``extra``, given its functions."""

    def register(**functions):
        module = types.ModuleType("tests.library.attention.extra_backend")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(choice.BACKENDS, "extra", module.__name__)

    return register
