"""Random models and random calls of them, for the properties in test_properties.py.

The first part is all that those call of the library. Models come from small pools, so that calls
of equal shapes share what is compiled: a model costs a second, one more call of it milliseconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import zlib
from typing import Any, NamedTuple

import hypothesis
import jax
import numpy as np
from hypothesis import strategies as st

from tape_jax import (
    Experts,
    RopeScaling,
    Transformer,
    attention,
    attention_plan,
    decode,
    extend,
    init_cache,
    prefill,
)
from tape_jax._src.model.layout import replaced, restack
from tape_jax.positions import Tape, registry
from tests.models import VOCAB, encoding, random_variables, small_model

# --- What is called of the library ---------------------------------------------------------------


class Batch(NamedTuple):
    """Tokens ``[B, T]``, their positions, and their segment ids or None."""

    tokens: np.ndarray
    positions: np.ndarray
    ids: np.ndarray | None

    def part(self, *index: Any) -> Batch:
        """Every array indexed alike."""
        return Batch(*(x[index] for x in self))


def coordinates(model, positions):
    """Positions ``[B, T]`` as the model takes them: different ones on each of several axes."""
    steps = np.arange(1, model.encoding.coordinate_axes + 1).astype(positions.dtype)
    return positions if steps.size == 1 else positions[..., None] * steps


def full_pass(model, variables, batch, *, is_causal=True, length=None, key=None, losses=False):
    """Logits of a pass without a cache; with ``losses`` also those of the routers."""
    out = model.apply(
        variables,
        batch.tokens,
        positions=coordinates(model, batch.positions),
        segment_ids=batch.ids,
        is_causal=is_causal,
        length=length,
        rngs=None if key is None else {"positions": jax.random.key(key)},
        mutable=["losses"] if losses else False,
    )
    return (out[0], jax.tree.leaves(out[1])) if losses else out


def chunk(model, variables, cache, batch):
    """Logits of the tokens that follow a cache, and the cache with them."""
    return model.apply(
        variables,
        batch.tokens,
        positions=coordinates(model, batch.positions),
        segment_ids=batch.ids,
        cache=cache,
    )


def prompt(model, variables, tokens, lengths, capacity):
    """Logits of prompts padded on the left, and their cache."""
    return prefill(model, variables, tokens, lengths, capacity=capacity)


def said(model, variables, prompts, count, capacity, stop=None):
    """Tokens that greedy decoding appends to prompts, and the cache."""
    _, cache = prefill(model, variables, prompts[:, :-1], capacity=capacity)
    return decode(model, variables, cache, prompts[:, -1], count, stop=stop)


def state_is_refused(q, k, v, e):
    """Whether a call of attention with this state is an error."""
    try:
        attention_plan(q, k, v, state=e)
    except ValueError:
        return True
    return False


def with_padding(cache, slots):
    """An empty cache, of which some slots were given to padding."""
    return dataclasses.replace(cache, index=np.int32(slots))


attend = attention
compiled_full_pass = jax.jit(
    full_pass, static_argnums=0, static_argnames=("is_causal", "length", "key", "losses")
)
compiled_chunk = jax.jit(chunk, static_argnums=0)
compiled_prompt = jax.jit(prompt, static_argnums=(0, 4))
compiled_extend = jax.jit(extend, static_argnums=0)
compiled_decode = jax.jit(said, static_argnums=(0, 3, 4))
compiled_init_cache = jax.jit(
    init_cache, static_argnums=(0, 1, 2), static_argnames=("position_dtype",)
)


# --- Examples ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Profile:
    """How much is tried: calls of each property, and models of TAPE, which has the most options.

    Of every other encoding there is one model.
    """

    name: str
    calls: int
    models_of_tape: int

    def numbers(self, kind: str) -> range:
        """Which models of the pool are taken."""
        return range(self.models_of_tape if kind == "tape" else 1)

    def __str__(self) -> str:
        return self.name


PHASES = (hypothesis.Phase.generate, hypothesis.Phase.shrink)


def for_all(examples: int, seed: str, /, **strategies: Any):
    """Runs the decorated function on ``examples`` examples, the same ones in every run."""

    def run(check):
        settings = hypothesis.settings(
            max_examples=examples,
            database=None,
            deadline=None,
            derandomize=True,
            report_multiple_bugs=False,
            phases=PHASES,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        given = hypothesis.given(**strategies)(check)
        settings(hypothesis.seed(zlib.crc32(seed.encode()))(given))()

    return run


# --- Encodings and models ------------------------------------------------------------------------

DYNAMIC = RopeScaling("dynamic", 2.0, original_length=4)
YARN = RopeScaling("yarn", 2.0, original_length=16)
SCALINGS = (
    RopeScaling(),
    DYNAMIC,
    DYNAMIC,
    YARN,
    RopeScaling("linear", 2.0),
    RopeScaling("ntk", 2.0),
    RopeScaling("llama3", 2.0, original_length=16),
)
ROTARY, TENSOR = ("rotary", 2, 2), ("tensor", 2, 2)
# Norms with updates that are linear in the states.
LINEAR = (("none", 1), ("rms", 1), ("unit", 1))

# By the fields of an encoding, which are drawn together, their values; the default ones first.
OPTIONS: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("scaling",): tuple((x,) for x in SCALINGS),
    ("partial_rotary_factor",): ((1.0,), (0.5,)),
    ("learn_base",): ((False,), (True,)),
    ("form", "l", "r"): (ROTARY, TENSOR, ("tensor", 2, 3), ("tensor", 4, 4)),
    ("attention_mix",): (("heads",), ("head_scale",), ("none",)),
    ("mlp_mix",): ((True,), (True,), (False,)),
    # Products of three states need a norm.
    ("norm", "degree"): (("none", 1), ("rms", 3), ("unit", 1), ("rms", 1), ("unit", 3)),
    ("head_shift",): ((0.0,), (2.0,), (0.25,)),
    ("alpha", "learn_alpha", "alpha_per_head"): (
        (1.0, False, False),
        (0.5, False, False),
        (1.0, True, False),
        (1.0, True, True),
    ),
    ("layers",): (("all",), ("all",), ((0, 1),)),
    ("scale_base",): ((2048.0,), (16.0,)),
    ("each_layer",): ((False,), (True,)),
    ("threshold",): ((512.0,), (3.0,)),
    ("buckets", "max_distance"): ((32, 128), (4, 8)),
}
# Of encodings that do not take all of them.
OWN: dict[str, dict[tuple[str, ...], tuple[Any, ...]]] = {
    "longrope": {
        ("scaling", "partial_rotary_factor"): (
            (RopeScaling("longrope", 2.0), 1.0),
            (RopeScaling("longrope", 8.0, 8, long_factor=(1.0, 2.0, 3.0, 9.0)), 1.0),
            (RopeScaling("longrope", 4.0, 8, short_factor=(2, 3), long_factor=(5, 7)), 0.5),
        )
    },
    "tape_pope": {
        ("form", "l", "r"): (ROTARY,),
        ("partial_rotary_factor", "clip"): ((1.0, True), (1.0, False)),
    },
    "pope": {("partial_rotary_factor", "clip"): ((1.0, True), (0.5, False), (0.375, True))},
    "fope": {
        ("learn",): ((False,), (True,)),
        ("original_length",): ((2048,), (8,), (64,)),
    },
    "mrope": {
        ("axes", "sections", "partial_rotary_factor"): (
            (3, (), 1.0),
            (3, (2, 1, 1), 1.0),
            (2, (1, 1), 0.5),
        ),
        ("interleaved",): ((False,), (True,)),
    },
    "p_rope": {("scaling",): ((RopeScaling("proportional"),), (RopeScaling("proportional", 2.0),))},
    "yarn": {("scaling",): ((RopeScaling("yarn", 2.0),), (YARN,))},
    "tape_separate_cos_sin": {("form", "l", "r"): (ROTARY,), ("norm", "degree"): LINEAR},
    "tape_relaxed_equivariance": {("form", "l", "r"): (ROTARY,), ("norm", "degree"): LINEAR},
    "tape_no_equivariance": {("form", "l", "r"): (TENSOR,), ("norm", "degree"): LINEAR},
    "tape_place_weights": {("norm", "degree"): LINEAR},
    "tape_mix_head_dim": {
        ("form", "l", "r"): (TENSOR,),
        ("norm", "degree"): LINEAR,
        ("attention_mix",): (("head_scale",), ("none",)),
    },
    "selective_rope": {
        ("rank", "gate"): ((16, "none"), (None, "standard"), (3, "standard"), (None, "none")),
        ("spacing", "learn_temperature"): (("rope", False), ("rfa", True)),
        ("taps", "bias"): ((4, False), (1, True), (2, False)),
    },
    "grape_m_ctx": {
        ("per_head",): ((False,), (True,)),
        ("frequencies_per_head",): ((False,), (True,)),
        ("step",): (("softplus",), ("sigmoid",)),
    },
    "repo": {
        ("form", "first_layer"): (("swiglu", 0), ("linear", 1), ("swiglu", 1), ("linear", 0)),
        ("width",): ((None,), (3,)),
    },
    "dapev2_kerple": {("taps",): ((3,), (5,))},
    "inkling": {("width", "reach"): ((16, 1024), (3, 4)), ("floor",): ((3.0,), (None,))},
    "inkling_local": {("width", "reach"): ((16, 3), (3, 512))},
    "kerple": {("form",): (("log",), ("power",))},
    "cope": {
        ("positions",): ((5,), (64,)),
        ("separate_key",): ((False,), (True,)),
        ("divide",): ((True,), (False,)),
    },
    "stickbreaking": {
        ("current",): ((False,), (True,)),
        ("remainder",): (("none",), ("value",)),
    },
    "grape_additive": {("gate",): (("query_key",), ("key",))},
    "wall": {("chunk",): ((2,), (32,)), ("bias",): ((8.0,), (0.0,))},
    "path": {
        ("rank", "taps"): ((3, 3), (None, 2), (2, 0)),
        ("chunk",): ((3,), (64,), (1,), (2,)),
    },
}
ONE_STATE_A_HEAD = ("tape_no_equivariance", "tape_mix_head_dim")

# Positions of these index a table, so they are integers below a limit.
INDEXING = ("learned", "random_rope")
# These take integers only: distances index a table.
WHOLE = (*INDEXING, "t5", "inkling", "inkling_local")
# These read the random stream "positions".
DRAWING = ("random_rope", "abacus", "position_coupling")
# These are refused where tokens see later ones.
CAUSAL = (
    "cope", "fox", "grape_path", "stickbreaking", "path", "cable", "dda_per_row", "dapev2_kerple",
    "dapev2_alibi", "inkling", "inkling_local", "wall",
)  # fmt: skip
# The size of the learned table and the capacity of caches; positions of calls are smaller.
LIMIT = 40

# Fields of the model beside its encoding, the default ones first.
MODEL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "local_window_size": (None, 3),
    "scan_layers": (True, False),
    "remat": ("none", "full", "dots"),
    "tie_embeddings": (False, True),
    "experts": (*[None] * 5, Experts(count=3)),
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A model with random parameters; the repr has the options that are not the default ones.

    Attributes:
      kind: of the encoding.
      encoding: its options.
      options: of the model.
      causal: whether passes that may be either are causal.
      fractions: whether positions are floats.
      chunks: sizes of the chunks that pass a cache.
      key: seed of the random stream of passes without a cache; None: they have none.
      relaid: options with which the model is to compute the same.
      by_row: whether that model is mapped over the rows of a batch.
    """

    kind: str
    encoding: dict[str, Any]
    options: dict[str, Any]
    is_causal: bool
    fractions: bool
    chunks: tuple[int, ...]
    key: int | None
    relaid: dict[str, Any]
    by_row: bool

    @functools.cached_property
    def model(self) -> Transformer:
        return small_model(encoding(self.kind, **self.encoding), head_dim=8, **self.options)

    @functools.cached_property
    def variables(self) -> Any:
        with precision(self.dtype):
            return random_variables(self.model, std=0.3)

    @property
    def dtype(self) -> str:
        return self.model.config.dtype

    @property
    def length(self) -> int | None:
        """The length that passes are for if they are to equal those through a cache."""
        scaling = self.encoding.get("scaling")
        reads_it = self.kind == "random_rope" or (
            scaling and scaling.kind in ("dynamic", "longrope")
        )
        return LIMIT if reads_it else None

    @functools.cached_property
    def relaid_gradients(self) -> Any:
        """Logits of the relaid model, and gradients of ``sum(weights * sin(logits))``.

        A compiled function of the parameters of ``model``, a batch and the weights.
        """
        other = replaced(self.model, **self.relaid)

        def loss(params, batch, weights):
            variables = {"params": restack(params, self.model, other)}
            run = functools.partial(full_pass, other, variables, length=self.length)
            logits = jax.vmap(run)(batch) if self.by_row else run(batch)
            return jax.numpy.sum(weights * jax.numpy.sin(logits)), logits

        def logits_and_gradients(params, batch, weights):
            (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch, weights)
            return logits, gradients

        return jax.jit(logits_and_gradients)


@functools.cache
def drawn_model(kind: str, number: int, **fixed: Any) -> Drawn:
    """The model of this number in the endless pool of an encoding; ``fixed`` are its options."""
    fields = {f.name: f.default for f in dataclasses.fields(registry[kind])}

    def choose(what: str, values: Any) -> Any:
        # Models of neighbouring numbers have all values, in random order.
        again, place = divmod(number, len(values))
        return random.Random(f"{kind} {what} {again}").sample(values, len(values))[place]

    chosen: dict[str, Any] = {}
    for names, values in {**OPTIONS, **OWN.get(kind, {})}.items():
        if set(names) <= set(fields):
            chosen |= dict(zip(names, choose(names[0], values), strict=True))
    if issubclass(registry[kind], Tape) and chosen.get("scaling") == YARN:
        # Its states have a magnitude in all dimensions.
        chosen["partial_rotary_factor"] = 1.0
    own_state = kind in ONE_STATE_A_HEAD
    options = {name: choose(name, values) for name, values in MODEL_OPTIONS.items()} | {
        # TAPE has a third, which reads a state that was updated twice.
        "num_layers": 3 if "layers" in fields else 2,
        "num_heads": 2 if own_state else 4,
        "num_kv_heads": 2 if own_state else choose("num_kv_heads", (1, 2, 4)),
        # Most is seen in float64.
        "dtype": "float64" if number == 0 else choose("dtype", ("float64", "float32", "bfloat16")),
    }
    more = {
        "is_causal": kind in CAUSAL or choose("is_causal", (True, True, False)),
        "fractions": kind not in WHOLE and choose("fractions", (True, True, False)),
        "chunks": choose("chunks", ((1,), (2,), (4,), (3, 1), (4, 2, 1))),
        "key": choose("key", (None, 5)) if kind in DRAWING else None,
        "relaid": {
            "scan_layers": not options["scan_layers"],
            "remat": choose("remat of relaid", ("none", "full")),
        },
        "by_row": choose("by_row", (True, False)),
    }
    for name, value in fixed.items():
        (chosen if name in fields else options)[name] = value
    if "window" in registry[kind].acts_on:
        options["local_window_size"] = None
    if options["experts"] is not None:
        # Rounding would now and then send a token to another expert.
        options["dtype"] = "float64"
        more["by_row"] = False
    options["param_dtype"] = "float64" if options["dtype"] == "float64" else "float32"
    return Drawn(
        kind,
        {name: x for name, x in chosen.items() if x != fields[name]},
        {name: x for name, x in options.items() if x != MODEL_OPTIONS.get(name, ((),))[0]},
        **more,
    )


def models(kind: str, profile: Profile, **fixed: Any) -> Any:
    """A model with an encoding of this kind."""
    return st.sampled_from([drawn_model(kind, n, **fixed) for n in profile.numbers(kind)])


# --- Calls ---------------------------------------------------------------------------------------


def tokens(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, shape).astype(np.int32)


seeds = st.integers(0, 99)


def draw_row(draw, model: Drawn, time: int, *, counted: bool, real: int, cut: int, right: bool):
    """Positions and ids of a row with ``real`` tokens, in two segments that meet at ``cut``."""
    unit = 0.25 if model.fractions and not counted else 1
    begin = 0 if right else time - real
    places = np.zeros(time, np.float32 if model.fractions else np.int32)
    ids = np.zeros(time, np.int32)
    names = draw(st.sampled_from(((1, 2), (2, 1), (1, 3), (3, 2))))
    for name, first, stop in ((names[0], 0, cut), (names[1], cut, real)):
        steps = np.ones(stop - first, int)
        if steps.size:
            steps[0] = 0 if counted else draw(st.sampled_from((0, 1, 7)))
        for i in range(1, steps.size):
            steps[i] = 1 if counted else draw(st.sampled_from((1, 2, 3, 0)))
        places[begin + first : begin + stop] = unit * np.cumsum(steps)
        ids[begin + first : begin + stop] = name
    if counted and right:
        # As if no positions had been given.
        places[real:] = np.arange(real, time)
    return places, ids


def as_batch(seed: int, rows: list[tuple[np.ndarray, np.ndarray]]) -> Batch:
    places, ids = (np.stack(x) for x in zip(*rows, strict=True))
    return Batch(tokens(seed, *ids.shape), places, ids)


@st.composite
def batches(draw, model: Drawn, rows: int, time: int, *, padded: bool = True):
    """Rows of padding, with id 0, followed by up to two segments with positions of their own.

    Steps between positions may be 0 or leave gaps; they are quarters where positions are floats.
    """
    drawn = []
    for _ in range(rows):
        real = time - (draw(st.integers(0, time)) if padded else 0)
        cut = real - draw(st.integers(0, real))
        drawn.append(draw_row(draw, model, time, counted=False, real=real, cut=cut, right=False))
    return as_batch(draw(seeds), drawn)


@st.composite
def batches_in_chunks(draw, model: Drawn, rows: int, time: int, *, padded: bool = True):
    """A batch, and sizes of chunks that add up to ``time``."""
    batch, sizes = draw(batches(model, rows, time, padded=padded)), []
    while (left := time - sum(sizes)) > 0:
        sizes.append(draw(st.sampled_from([n for n in model.chunks if n <= left])))
    return batch, sizes


@st.composite
def batches_around_a_segment(draw, model: Drawn, rows: int, time: int, size: int):
    """A batch, padded on either side, in whose first row one segment has ``size`` tokens.

    Returns:
      The batch, the slice of the segment, and the length that the call is for: None, where the
      encoding reads it, if the segment is all that the row holds and positions are counted.
    """
    length = draw(st.sampled_from((model.length, None)))
    single = length is None and model.length is not None
    counted = single or draw(st.booleans())
    right, real = draw(st.booleans()), size if single else draw(st.integers(size, time))
    cut = draw(st.sampled_from((size, real - size)))
    first = (0 if right else time - real) + (0 if cut == size else cut)
    drawn = [draw_row(draw, model, time, counted=counted, real=real, cut=cut, right=right)]
    for _ in range(rows - 1):
        right, real = draw(st.booleans()), draw(st.integers(0, time))
        cut = real if single else draw(st.integers(0, real))
        drawn.append(draw_row(draw, model, time, counted=counted, real=real, cut=cut, right=right))
    return as_batch(draw(seeds), drawn), slice(first, first + size), length


@st.composite
def calls(draw, models: Any, strategy: Any, *args: Any, **options: Any):
    """One of the models, and what ``strategy`` draws for it."""
    model = draw(models)
    return model, draw(strategy(model, *args, **options))


# --- Comparison ----------------------------------------------------------------------------------

# In bfloat16 a logit of TAPE with norms has been seen 0.14 of the largest one off from float32.
TOLERANCE = {"float64": 1e-10, "float32": 3e-5, "bfloat16": 2e-1}


def assert_near(actual: Any, expected: Any, tolerance: float) -> None:
    """Equality to ``tolerance``, relative to the largest value where that exceeds 1."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.isfinite(expected).all()
    if expected.size:
        difference = np.abs(actual - expected).max() / max(1.0, np.abs(expected).max())
        # Written so that NaN fails.
        assert difference <= tolerance, f"off by {difference:.3g}; {tolerance:.3g} is allowed"


@contextlib.contextmanager
def precision(dtype: str):
    """64-bit types where a model of this type needs them."""
    with jax.enable_x64(dtype == "float64"):
        yield
