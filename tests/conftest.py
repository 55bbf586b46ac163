"""Test set-up: the CPU, seen as eight devices."""

import collections
import itertools
import os
import pathlib
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The tests neither see nor change what the user has measured; their processes share a folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    CACHE = tempfile.TemporaryDirectory(prefix="tape-jax-tests-")
    os.environ["TAPE_JAX_CACHE"] = CACHE.name
# Nearly all of the time of these tests is compilation, and the machine code need not be fast.
FLAGS = {
    "xla_force_host_platform_device_count": "8",
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
    # These two save two thirds of the rest.
    "xla_cpu_parallel_codegen_split_count": "1",
    "xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",
}
if os.environ["JAX_PLATFORMS"] != "cpu":
    # On a GPU: most of the time of these tests went into trying out products of the reference.
    FLAGS["xla_gpu_autotune_level"] = "0"
given = os.environ.get("XLA_FLAGS", "")
added = [f"--{name}={value}" for name, value in FLAGS.items() if name not in given]
os.environ["XLA_FLAGS"] = " ".join([given, *added]).strip()

import jax
import pytest

# With lines of code in programs, XLA of jax 0.11.2 may inline loops of interpreted kernels without
# end (xla::StackFrames::IsPrefix), in processes that have compiled much before.
jax.config.update("jax_traceback_in_locations_limit", 0)


@pytest.fixture
def x64():
    """Runs a test with 64-bit types enabled."""
    with jax.enable_x64(True):
        yield


def pytest_addoption(parser):
    """Adds ``--cases``."""
    few = "at most so many cases of each test, and as many of its slow ones"
    parser.addoption("--cases", type=int, metavar="COUNT", help=few)


def name_of(item):
    """The test that an item is a case of."""
    return item.nodeid.partition("[")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Makes later cases of ``mostly_slow`` tests slow; skips GPU tests where there is no GPU.

    With ``--cases`` few of each test are left, and few of those that are slow, from first to last.
    """
    cases = collections.Counter()
    for item in items:
        if marker := item.get_closest_marker("mostly_slow"):
            cases[name_of(item)] += item.get_closest_marker("slow") is None
            if cases[name_of(item)] > (marker.args or (1,))[0]:
                item.add_marker("slow")
    if most := config.getoption("cases"):
        tests = collections.defaultdict(list)
        for item in items:
            tests[name_of(item), item.get_closest_marker("slow") is None].append(item)
        few = {item for found in tests.values() for item in found[:: -(-len(found) // most)]}
        items[:] = [item for item in items if item in few]
    if any(item.get_closest_marker("gpu") for item in items) and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason=f"needs a GPU; jax runs on {jax.default_backend()}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


MAPPINGS = pathlib.Path("/proc/self/maps")
finished = itertools.count(1)


def pytest_runtest_teardown():
    """Drops compiled programs while Linux still lets this process map memory for new ones.

    Each takes a few mappings. XLA ends the process where there are none left, at 65,530 of them.
    """
    if next(finished) % 10 == 0 and MAPPINGS.exists():
        with MAPPINGS.open("rb") as file:
            crowded = sum(1 for _ in file) > 25_000
        if crowded:
            jax.clear_caches()
