"""The symmetries of TAPE, layer by layer and for whole models, and that what breaks them is caught.

Every check runs in float64 (differences to 1e-10) and, for some cases, in float32.
"""

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tape_jax as tape
from tape_jax import positions, testing
from tape_jax._src.parity import language_models
from tape_jax.testing import SymmetryError
from tests import models
from tests.selection import mostly_slow

GOLDEN = Path(__file__).parent / "golden"

# The same few examples in every run: each costs a compilation, and CI must not be a lottery.
few = functools.partial(
    settings,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 2**20)


@contextlib.contextmanager
def precision(name: str):
    with jax.enable_x64(name == "float64"):
        yield


def raises(minimum: float, symmetry: str):
    """Expects a SymmetryError with a difference of at least ``minimum``."""
    return pytest.raises(
        SymmetryError, match=symmetry, check=lambda error: error.difference >= minimum
    )


# --- One layer -----------------------------------------------------------------------------------


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
    Layer(mix="heads", mlp=False, norm="unit", local_window_size=2, implementation="chunked"),
    Layer(mix="none", mlp=False, norm="rms"),
    Layer(2, 2, kv_heads=2, implementation="chunked"),
    Layer(2, 2, mix="heads", norm="unit", local_window_size=2),
    Layer(2, 4, norm="rms"),
    Layer(4, 4, mix="none", norm="rms"),
    Layer(4, 5, kv_heads=2, mix="heads", norm="unit"),
    Layer(1, 3, kv_heads=1, mlp=False),
    Layer(4, 2, norm="unit"),
    Layer(kv_heads=2, mix="heads", degree=3),
    Layer(4, 5, kv_heads=2, mix="none", norm="rms", degree=3),
    Layer(2, 2, mlp=False, norm="unit", degree=3),
]
SHAPES = [(2, 5, 8), (6, 4)]


def check_layer(layer: Layer, seed: int, shape: tuple[int, ...], tolerance: float | None = None):
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
        tolerance=tolerance,
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
        tolerance=tolerance,
    )


@pytest.mark.parametrize("layer", mostly_slow(LAYERS, *LAYERS[:13:3], *LAYERS[13:15]), ids=str)
@given(seed=seeds, shape=st.sampled_from(SHAPES))
@few(max_examples=4)
def test_layer(layer, seed, shape):
    with precision("float64"):
        check_layer(layer, seed, shape)


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS[::3], ids=str)
@given(seed=seeds)
@few(max_examples=3)
def test_layer_in_float32(layer, seed):
    with precision("float32"):
        # A polar factor multiplies rounding errors by the inverse of the least singular value.
        check_layer(layer, seed, SHAPES[0], tolerance=1e-3 if layer.norm == "unit" else 1e-5)


@pytest.mark.parametrize("layer", LAYERS[1::3], ids=str)
@given(seed=seeds)
@few(max_examples=1)
def test_layer_is_causal(layer, seed):
    with precision("float64"):
        axes = dict.fromkeys("qkv", -3) | {"x": -2, "e": layer.state_axes, "segments": -1}
        testing.assert_causal(
            run(layer, is_causal=True),
            layer.inputs(seed, SHAPES[0]),
            in_axes=(axes | {"mask": None, "params": None},),
            out_axes={"o": -3, "a": layer.state_axes, "e": layer.state_axes},
        )


def test_layer_that_is_not_causal_is_caught(x64):
    layer = Layer(mix="none")
    with raises(0.1, "causality"):
        testing.assert_causal(
            run(layer, is_causal=False),
            layer.inputs(0, SHAPES[0]),
            in_axes=(dict.fromkeys(layer.inputs(0, SHAPES[0])) | {"v": -3},),
            out_axes={"o": -3, "a": -3, "e": -3, "logits": None, "next logits": None},
        )


# --- Whole models --------------------------------------------------------------------------------

BATCH, TIME = 2, 6
TAPE = {
    "default": {},
    "heads-rms": {"attention_mix": "heads", "norm": "rms", "learn_alpha": True},
    "mlp_only-unit": {"attention_mix": "none", "norm": "unit"},
    "attention_only-range": {"mlp_mix": False, "layers": (1, 2)},
    "yarn-rms": {"norm": "rms", "scaling": {"kind": "yarn", "factor": 4.0, "original_length": 8}},
    "tensor2x2-unit": {"form": "tensor", "norm": "unit", "learn_alpha": True},
    "tensor2x4-heads-range": {"form": "tensor", "r": 4, "attention_mix": "heads", "layers": (0, 1)},
    "tensor4x5-rms": {"form": "tensor", "l": 4, "r": 5, "norm": "rms"},
    "shifted-still": {"attention_mix": "heads", "head_shift": 3.0, "still_heads": 1},
    "partial-shifted": {"partial_rotary_factor": 0.5, "head_shift": (0.0, -2.5), "norm": "rms"},
    "tensor2x4-shifted-still": {
        "form": "tensor",
        "r": 4,
        "head_shift": 1.5,
        "still_heads": 2,
        "learn_alpha": True,
        "alpha_per_head": True,
    },
    "degree3-shifted": {"degree": 3, "norm": "rms", "head_shift": 3.0, "attention_mix": "heads"},
    "tensor4x5-degree3": {
        "form": "tensor",
        "l": 4,
        "r": 5,
        "norm": "unit",
        "degree": 3,
        "attention_mix": "none",
        "head_shift": 1.0,
    },
}
MODEL = {
    "heads-rms": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    "attention_only-range": {"num_kv_heads": 1},
    "tensor2x4-heads-range": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    "tensor2x2-unit": {"scan_layers": False},
    "shifted-still": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 4},
    "tensor2x4-shifted-still": {"num_heads": 4, "head_dim": 4},
}
WINDOW = {"default": 3, "tensor2x4-heads-range": 2}
OTHERS = {"fire": {"threshold": 2.0}, "learned": {"size": 64}}


@functools.cache
def build(name: str, dtype: str, *, local_window_size: int | None = None):
    """A model: one of ``TAPE``, or with an encoding of the registry."""
    if name in TAPE:
        encoding = positions.create("tape", **TAPE[name])
    else:
        encoding = models.encoding(name, **OTHERS.get(name, {}))
    return models.small_model(
        encoding,
        dtype=dtype,
        param_dtype=dtype,
        attention_implementation="reference",
        local_window_size=local_window_size,
        **MODEL.get(name, {}),
    )


@functools.cache
def apply(model: tape.Transformer):
    """Logits as a function of positions, tokens, segment ids, mask and variables."""

    def fn(places, tokens, segment_ids, mask, variables):
        options = {"segment_ids": segment_ids, "mask": mask, "is_causal": False}
        return model.apply(variables, tokens, positions=places, **options)

    return fn


@functools.cache
def apply_from(model: tape.Transformer):
    """Logits and states of the causal model as a function of the first state and the tokens."""

    def fn(state, tokens, variables):
        return model.apply(variables, tokens, initial_state=state, return_states=True)

    return fn


def inputs_of(model: tape.Transformer, seed: int):
    """Positions with gaps, tokens, two segments a row, and variables."""
    rng = np.random.default_rng(seed)
    places = np.sort(rng.choice(20, TIME, replace=False))
    tokens = rng.permutation(models.VOCAB)[: BATCH * TIME].reshape(BATCH, TIME)
    segment_ids = np.sort(rng.integers(1, 3, (BATCH, TIME)), axis=-1)
    if model.encoding.kind == "random_rope":  # Positions index the draw.
        places = np.arange(TIME)
    return (
        *(jnp.asarray(x, jnp.int32) for x in (places, tokens, segment_ids)),
        models.random_variables(model, seed, std=0.4),
    )


CAUSAL = np.tril(np.ones((TIME, TIME), bool))
VISIBLE = {"all": np.ones_like(CAUSAL), "causal": CAUSAL, "window": CAUSAL & ~np.tril(CAUSAL, -3)}


def check_permutations(model: tape.Transformer, seed: int, tolerance: float | None = None):
    """Tokens with positions and segments; with the mask of a causal or windowed model too."""
    places, tokens, segment_ids, variables = inputs_of(model, seed)
    for mask in VISIBLE.values():
        testing.assert_permutation_equivariant(
            apply(model),
            *(places, tokens, segment_ids, jnp.asarray(mask), variables),
            in_axes=(-1, -1, -1, {-2, -1}, None),
            out_axes=-2,
            key=jax.random.key(seed),
            tolerance=tolerance,
        )


def check_shift(model: tape.Transformer, seed: int, tolerance: float | None = None):
    places, tokens, segment_ids, variables = inputs_of(model, seed)
    for mask in (VISIBLE["causal"], VISIBLE["window"]):
        testing.assert_shift_invariant(
            apply(model),
            *(places, tokens, segment_ids, jnp.asarray(mask), variables),
            tolerance=tolerance,
        )


def state_of(model: tape.Transformer, seed: int):
    """A first state of the model's form, one per key/value head."""
    c, encoding = model.config, model.encoding
    tensor = encoding.form == "tensor"
    return testing.random_state(
        jax.random.key(seed),
        (BATCH, TIME, c.kv_heads, c.dim),
        l=encoding.l if tensor else None,
        r=encoding.r if tensor else None,
        dtype=c.dtype,
    )


def check_group(
    model: tape.Transformer,
    seed: int,
    tolerance: float | None = None,
    *,
    states: Any = True,
    variables: Any = None,
):
    """One phase per frequency, or O(R): logits stay, the states of all layers go along.

    ``states`` says which arrays among the recorded position states these are.
    """
    _, tokens, _, random = inputs_of(model, seed)
    variables = random if variables is None else variables
    check = (
        testing.assert_phase_equivariant
        if model.encoding.form == "rotary"
        else testing.assert_orthogonal_equivariant
    )
    check(
        apply_from(model),
        *(state_of(model, seed), tokens, variables),
        in_states=(True, False, False),
        out_states=(False, tape.States(hidden=False, position=states, final_norm=False)),
        key=jax.random.key(seed),
        tolerance=tolerance,
    )


@pytest.mark.parametrize("name", mostly_slow(TAPE, "default", "tensor4x5-rms", "shifted-still"))
@given(seed=seeds)
@few(max_examples=3)
def test_model(name, seed):
    with precision("float64"):
        model = build(name, "float64")
        check_permutations(model, seed)
        check_shift(model, seed)
        check_group(build(name, "float64", local_window_size=WINDOW.get(name)), seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heads-rms", "tensor4x5-rms"])
@given(seed=seeds)
@few(max_examples=2)
def test_model_in_float32(name, seed):
    with precision("float32"):
        model = build(name, "float32")
        check_permutations(model, seed, tolerance=1e-4)
        check_shift(model, seed, tolerance=1e-4)
        check_group(model, seed, tolerance=1e-4)


@pytest.mark.parametrize(
    ("name", "local_window_size"),
    mostly_slow(
        [("default", 3), ("tensor2x4-heads-range", None), ("t5", None)],
        ("tensor2x4-heads-range", None),
    ),
)
def test_model_is_causal(x64, name, local_window_size):
    """In its first states and in the embedding of every token: each token id occurs once."""
    model = build(name, "float64", local_window_size=local_window_size)
    tokens = jnp.arange(BATCH * TIME).reshape(BATCH, TIME)
    variables = models.random_variables(model)

    def fn(embedded, state):
        table = variables["params"]["embedding"].at[tokens].set(embedded)
        params = variables["params"] | {"embedding": table}
        return model.apply({"params": params}, tokens, initial_state=state)

    embedded = testing.random_state(None, (BATCH, TIME, model.config.hidden_size), dtype="float64")
    state = state_of(model, 3) if name in TAPE else None
    testing.assert_causal(fn, embedded, state, in_axes=1, out_axes=1)


def test_abacus_is_causal_in_token_ids(x64):
    model = build("abacus", "float64")
    variables = models.random_variables(model)
    tokens = jnp.array([[3, 4, 0, 9, 8, 7], [0, 0, 5, 6, 1, 12]])
    testing.assert_causal(
        lambda tokens: model.apply(variables, tokens), tokens, in_axes=-1, out_axes=-2
    )


# --- Other encodings -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["yarn", "xpos", "alibi", "t5"])
def test_relative_encodings(x64, name):
    model = build(name, "float64")
    check_permutations(model, 0)
    check_shift(model, 0)


@pytest.mark.parametrize(
    ("name", "moved_by"), [("sinusoidal", 1.0), ("learned", 1.0), ("fire", 0.3)]
)
def test_absolute_encodings_see_the_shift(x64, name, moved_by):
    model = build(name, "float64")
    check_permutations(model, 0)
    with raises(moved_by, "shift of positions by 37"):
        check_shift(model, 0)


def test_random_positions_go_with_their_tokens(x64):
    check_permutations(build("random_rope", "float64"), 0)


def test_abacus_sees_permutations_but_no_positions(x64):
    model = build("abacus", "float64")
    check_shift(model, 0)
    with raises(1.0, "permutation"):
        check_permutations(model, 0)


def test_without_an_encoding_only_the_mask_orders_the_tokens(x64):
    check_permutations(build("none", "float64"), 0)


# --- Ablations: each breaks what it is named for -------------------------------------------------

ABLATIONS = {
    "tape_separate_cos_sin": "phase equivariance",
    "tape_mix_head_dim": "orthogonal equivariance",
    "tape_no_equivariance": "orthogonal equivariance",
    "tape_relaxed_equivariance": "phase equivariance",
}


@pytest.mark.parametrize("name", mostly_slow(ABLATIONS, "tape_no_equivariance"))
def test_ablations_break_the_group_and_the_shift_but_not_permutations(x64, name):
    model = build(name, "float64")
    check_permutations(model, 1)
    with raises(1.0, ABLATIONS[name]):
        check_group(model, 1)
    with raises(1.0, "shift of positions by 37"):
        check_shift(model, 1)


def test_weights_by_place_break_permutations_and_nothing_else(x64):
    model = build("tape_place_weights", "float64")
    with raises(1.0, "permutation equivariance"):
        check_permutations(model, 1)
    check_shift(model, 1)
    check_group(model, 1, states=((True, False),) * model.config.num_layers)


def test_relaxed_equivariance_is_whole_without_its_mirror_and_broken_by_degrees(x64):
    model = build("tape_relaxed_equivariance", "float64")
    variables = inputs_of(model, 1)[-1]

    def shrunk(factor):
        def shrink(path, x):
            return x * factor if path[-1].key == "position_mirror" else x

        return jax.tree.map_with_path(shrink, variables)

    check_group(model, 1, variables=shrunk(0.0))
    broken = []
    for factor in (1e-3, 1e-4):
        with pytest.raises(SymmetryError) as caught:
            check_group(model, 1, variables=shrunk(factor))
        broken.append(caught.value.difference)
    assert broken[0] == pytest.approx(10 * broken[1], rel=0.05)


MOVED_BY = {"adape_tiny": None, "adatensor_tiny": 1.3, "adavector_tiny": 3.2, "adawoeq_tiny": 2.4}


@pytest.mark.parametrize(
    ("file", "moved_by"), mostly_slow(MOVED_BY.items(), ("adatensor_tiny", 1.3))
)
def test_recorded_models_move_by_what_was_measured_on_the_reference(x64, file, moved_by):
    """Logits of the published code after a shift by 37, from the notes on the recorded runs."""
    golden = language_models.Golden(GOLDEN / f"{file}.npz")
    model = golden.model("float64")
    weights = {name: jnp.asarray(x, "float64") for name, x in golden.weights().items()}
    variables = {"params": language_models.convert(weights, golden, model)}
    tokens = jnp.asarray(golden.arrays["input_ids"])

    def fn(places):
        return model.apply(variables, tokens, positions=places)

    places = jnp.arange(tokens.shape[1])
    if moved_by is None:
        testing.assert_shift_invariant(fn, places)
        return
    with pytest.raises(SymmetryError) as caught:
        testing.assert_shift_invariant(fn, places)
    assert caught.value.difference == pytest.approx(moved_by, abs=0.05)
