"""What importing and packaging the library brings along."""

import importlib
import pkgutil
import subprocess
import sys
import types

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
