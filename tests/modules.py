"""The modules of the package, for the tests of what is public and of what is said of it."""

import importlib
import pkgutil
import types

import tape_jax


def all_modules() -> list[types.ModuleType]:
    """Every module of the package, private ones included."""
    found = pkgutil.walk_packages(tape_jax.__path__, "tape_jax.")
    return [tape_jax, *(importlib.import_module(module.name) for module in found)]


def public_modules() -> list[types.ModuleType]:
    """Those in whose path nothing starts with an underscore."""
    return [module for module in all_modules() if "._" not in module.__name__]
