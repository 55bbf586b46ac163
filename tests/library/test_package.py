"""What importing and packaging the library brings along."""

import collections
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import types
import zipfile

import pytest

import tape_jax
from tests.paths import ROOT


def all_modules() -> list[types.ModuleType]:
    """Every module of the package, private ones included."""
    found = pkgutil.walk_packages(tape_jax.__path__, "tape_jax.")
    return [tape_jax, *(importlib.import_module(module.name) for module in found)]


def public_modules() -> list[types.ModuleType]:
    """Those in whose path nothing starts with an underscore."""
    return [module for module in all_modules() if "._" not in module.__name__]


PUBLIC = [
    "adapt", "linen", "losses", "nnx", "parity", "positions", "pretrained", "sharding", "testing",
    "tune",
]  # fmt: skip
# The same two modules for each framework, and the layer of the model that they stand beside.
SAME_IN_EACH_FRAMEWORK = {"UpdateState", "Attention"}


def test_import_is_light():
    """Neither import nor any public name loads an optional package, or asks for a device.

    Implementations of attention are loaded when they are needed.

    But ``tape_jax.nnx``: ``flax.nnx`` loads optax.
    """
    code = """
import importlib, sys, tape_jax
from tape_jax._src.attention import BACKENDS
print(BACKENDS["chunked"] in sys.modules)
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    [getattr(module, public) for public in module.__all__]
heavy = "grain tensorflow_datasets tokamax transformers matplotlib orbax.checkpoint torch chex"
heavy += " optax safetensors hypothesis"
print([name for name in heavy.split() if name in sys.modules])
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""
    names = [x.__name__ for x in public_modules() if x.__name__ != "tape_jax.nnx"]
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines() == ["False", "[]", "False"]


def test_what_is_not_public_has_an_underscore_in_its_path():
    named = {module.__name__ for module in public_modules()}
    assert named == {"tape_jax", *(f"tape_jax.{name}" for name in PUBLIC)}
    for module in public_modules():
        own = {
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
        }
        assert own <= set(module.__all__), module.__name__


def test_public_names_exist_and_are_documented():
    for module in public_modules():
        assert inspect.getdoc(module), module.__name__
        assert len(set(module.__all__)) == len(module.__all__), module.__name__
        for name in module.__all__:
            value = getattr(module, name)
            constant = not (inspect.ismodule(value) or callable(value))
            assert constant or inspect.getdoc(value), f"{module.__name__}.{name}"


def test_no_public_name_is_both_a_module_and_something_else():
    modules = {module.__name__ for module in all_modules()}
    for module in public_modules():
        for name in module.__all__:
            if f"{module.__name__}.{name}" in modules:
                assert inspect.ismodule(getattr(module, name)), f"{module.__name__}.{name}"


def test_no_two_classes_share_a_name():
    homes = collections.defaultdict(set)
    for folder in ("tape_jax", "train", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"^class (\w+)", path.read_text("utf-8"), re.MULTILINE):
                homes[name].add(path.relative_to(ROOT).as_posix())
    shared = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert {name: shared[name] for name in shared.keys() - SAME_IN_EACH_FRAMEWORK} == {}


@pytest.mark.slow
def test_wheel_holds_the_package_alone(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)],
        check=True,
    )
    (wheel,) = tmp_path.glob("tape_jax-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"tape_jax", f"tape_jax-{tape_jax.__version__}.dist-info"}
