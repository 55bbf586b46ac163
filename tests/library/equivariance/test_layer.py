"""The symmetries of one attention and one update, in every form."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import tape_jax as tape
from tape_jax import testing
from tests.drawn import precision
from tests.library.equivariance.checks import few, seeds
from tests.selection import mostly_slow


@dataclasses.dataclass(frozen=True)
class Layer:
    """One attention and one update."""

    l: int | None = None
    r: int | None = None
    heads: int = 4
    kv_heads: int = 4
    mix: str = "head_scale"
    mlp: bool = True
    degree: int = 1
    norm: str = "none"
    local_window_size: int | None = None
    implementation: str = "reference"

    def __str__(self):
        form = "rotary" if self.l is None else f"tensor{self.l}x{self.r}"
        mlp = "mlp" if self.mlp else "no_mlp"
        degree = "" if self.degree == 1 else f"-degree{self.degree}"
        return f"{form}-{self.heads}/{self.kv_heads}-{self.mix}-{mlp}-{self.norm}{degree}"

    @property
    def state_axes(self) -> int:
        """The time axis of a state."""
        return -3 if self.l is None else -5

    def inputs(self, seed: int, shape: tuple[int, ...]):
        """Everything that a layer reads, for ``shape = (batch..., T, D)``; nothing is special."""
        *batch, time, dim = shape
        rng = np.random.default_rng(seed)
        key = jax.random.key(seed)

        def normal(*tail: int):
            return jnp.asarray(rng.standard_normal((*batch, time, *tail)))

        hidden = 6
        params = tape.init_update(
            key,
            hidden,
            self.heads,
            num_kv_heads=self.kv_heads,
            width=5,
            attention_mix=self.mix,
            mlp_mix=self.mlp,
            degree=self.degree,
        )
        params["alpha"] = jnp.asarray(1.0)
        return {
            "q": normal(self.heads, dim),
            "k": normal(self.kv_heads, dim),
            "v": normal(self.kv_heads, dim + 1),
            "x": normal(hidden),
            "e": testing.random_state(key, (*batch, time, self.kv_heads, dim), l=self.l, r=self.r),
            "segments": jnp.asarray(rng.integers(0, 2, (*batch, time))),
            "mask": jnp.asarray(rng.random((*batch, 1, time, time)) < 0.7),
            "params": testing.random_params(key, params, std=0.5),
        }


@functools.cache
def run(layer: Layer, is_causal: bool):
    """The layer as a function of ``Layer.inputs``; the same object for the same layer."""

    def logits(q, k, e):
        q, k = tape.rotate(q, e), tape.rotate(k, e)
        k = jnp.repeat(k, layer.heads // layer.kv_heads, axis=-2)
        return jnp.einsum("...qhd,...khd->...hqk", q, k)

    def fn(inputs):
        q, k, e, params = (inputs[name] for name in ("q", "k", "e", "params"))
        options = {"segment_ids": inputs["segments"], "implementation": layer.implementation}
        if is_causal:
            options |= {"is_causal": True, "local_window_size": layer.local_window_size}
        elif layer.implementation == "reference":
            options["mask"] = inputs["mask"]
        o, a = tape.attention(q, k, inputs["v"], state=e, **options)
        new = tape.update_state(
            {name: x for name, x in params.items() if name != "alpha"},
            e,
            a,
            inputs["x"],
            params["alpha"],
            norm=layer.norm,
            num_kv_heads=layer.kv_heads,
        )
        out = {"o": o, "a": a, "e": new}
        if not is_causal:
            out |= {"logits": logits(q, k, e), "next logits": logits(q, k, new)}
        return out

    return fn


LAYERS = [
    Layer(),
    Layer(kv_heads=2, mix="heads", norm="rms", local_window_size=3),
    Layer(kv_heads=1, mix="none", norm="unit"),
    Layer(kv_heads=2, mlp=False, norm="rms", implementation="chunked"),
    Layer(2, 2, mix="heads", norm="unit", local_window_size=2, implementation="chunked"),
    Layer(4, 4, mix="none", norm="rms"),
    Layer(1, 3, kv_heads=1, mlp=False),
    Layer(kv_heads=2, mix="heads", degree=3),
    Layer(4, 5, kv_heads=2, mix="none", norm="rms", degree=3),
]
SHAPE = (2, 5, 8)


def check_layer(layer: Layer, seed: int, shape: tuple[int, ...]):
    """Permutations of the tokens, and the symmetry group of the layer's form."""
    inputs, fn = layer.inputs(seed, shape), run(layer, is_causal=False)
    key = jax.random.key(seed)
    axes = dict.fromkeys("qkv", -3) | {"x": -2, "e": layer.state_axes, "segments": -1}
    testing.assert_permutation_equivariant(
        fn,
        inputs,
        in_axes=(axes | {"mask": {-2, -1}, "params": None},),
        out_axes={
            "o": -3,
            "a": layer.state_axes,
            "e": layer.state_axes,
            "logits": {-2, -1},
            "next logits": {-2, -1},
        },
        key=key,
    )
    check = (
        testing.assert_phase_equivariant
        if layer.l is None
        else testing.assert_orthogonal_equivariant
    )
    check(
        fn,
        inputs,
        in_states=({name: name == "e" for name in inputs},),
        out_states={"o": False, "a": True, "e": True, "logits": False, "next logits": False},
        key=key,
    )


@pytest.mark.parametrize("layer", mostly_slow(LAYERS, *(LAYERS[n] for n in (0, 3, 8))), ids=str)
@given(seed=seeds)
@few()
def test_layer(layer, seed):
    with precision("float64"):
        check_layer(layer, seed, SHAPE)


def test_layer_is_causal():
    layer, seed = LAYERS[4], 0
    with precision("float64"):
        axes = dict.fromkeys("qkv", -3) | {"x": -2, "e": layer.state_axes, "segments": -1}
        testing.assert_causal(
            run(layer, is_causal=True),
            layer.inputs(seed, SHAPE),
            in_axes=(axes | {"mask": None, "params": None},),
            out_axes={"o": -3, "a": layer.state_axes, "e": layer.state_axes},
        )
