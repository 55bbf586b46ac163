"""Public functions refuse arguments that are not of the types that they declare."""

import functools
import inspect
import types
import typing

import jax
import pytest

import tape_jax
from tape_jax import adapt, losses, positions, pretrained, sharding, testing
from tests.models import small_model

# They check their arguments by themselves, most of them arrays of any kind.
OWN_CHECKS = {
    "attention", "attention_plan", "create", "kinds", "option_names", "recorded_plans", "rotate",
    "transform",
}  # fmt: skip


def declared():
    """Every public function with each of its parameters that has a type."""
    found = {}
    for module in (tape_jax, adapt, losses, positions, pretrained, sharding, testing):
        for name in module.__all__:
            function = getattr(module, name)
            if isinstance(function, types.FunctionType) and name not in OWN_CHECKS:
                found[name] = function
    for name, function in found.items():
        hints = typing.get_type_hints(function)
        for parameter in inspect.signature(function).parameters.values():
            named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            hint = hints[parameter.name]
            if named and typing.Any not in (hint, *typing.get_args(hint)):
                yield pytest.param(function, parameter.name, id=f"{name}-{parameter.name}")


@pytest.mark.parametrize(("function", "name"), list(declared()))
def test_what_is_of_no_declared_type(function, name):
    with pytest.raises(ValueError, match=rf"^{name} must be .*; got <object"):
        function(**{name: object()})


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (tape_jax.generate, {"temperature": float("nan")}, "a finite number; got nan"),
        (tape_jax.generate, {"top_k": 2.5}, "top_k must be an integer or None; got 2.5"),
        (tape_jax.generate, {"key": 0}, "key must be a random key or None; got 0"),
        (positions.Fire, {"width": "a"}, "fire: width must be an integer; got 'a'"),
        (positions.RelaxedEquivariance, {"penalty": 2.5}, "must be two numbers of at least 0"),
        (tape_jax.rotary_state, {"base": 10**400}, "base must be a finite number; got 1000"),
        (tape_jax.from_pretrained, {"path": 3}, "path must be a string or of the type PathLike"),
    ],
)
def test_messages(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(**arguments)


def test_what_is_no_variables():
    model = small_model("rope", num_layers=1)
    for call in (functools.partial(adapt.add_lora, key=jax.random.key(0)), adapt.fingerprint):
        with pytest.raises(ValueError, match="variables must be"):
            call(model, {"embedding": 0})


def test_keys_of_both_styles():
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        assert tape_jax.sample_logits(jax.numpy.zeros(1), key) == 0
