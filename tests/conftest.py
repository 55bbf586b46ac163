"""Test set-up: the CPU, seen as eight devices."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

import jax
import pytest


@pytest.fixture
def x64():
    """Runs a test with 64-bit types enabled."""
    with jax.enable_x64(True):
        yield


def pytest_collection_modifyitems(items):
    """Skips tests marked ``gpu`` where there is no GPU, and says so."""
    if any(item.get_closest_marker("gpu") for item in items) and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason=f"needs a GPU; jax runs on {jax.default_backend()}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
