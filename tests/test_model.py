"""The decoder as a whole: equalities between ways of running it, precision, wrong calls."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import (
    Experts,
    ModelConfig,
    RopeScaling,
    Transformer,
    init_cache,
    init_update,
    positions,
    rotary_state,
    tensor_state,
)
from tape_jax._src import layers
from tape_jax._src.checks import from_mapping
from tape_jax.sharding import ShardingConfig
from tests.models import (
    DIGITS,
    VOCAB,
    encoding,
    random_variables,
    small_model,
    without,
)
from tests.selection import mostly_slow

# Tests compile much and compute little.
FAST_COMPILATION = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames=("is_causal", "length", "output", "return_states"),
    compiler_options=FAST_COMPILATION,
)
def run(model, variables, tokens, **options):
    return model.apply(variables, tokens, **options)


@functools.partial(jax.jit, static_argnums=0, compiler_options=FAST_COMPILATION)
def loss_and_gradients(model, variables, tokens):
    def loss(variables):
        logits = jax.nn.log_softmax(model.apply(variables, tokens[:, :-1]))
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    return jax.value_and_grad(loss)(variables)


def random_tokens(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, shape), jnp.int32)


def unstacked(model, variables):
    """Variables of a scanned model for the same model with ``scan_layers=False``."""
    params = dict(variables["params"])
    for start, stop, _ in model.runs:
        stacked = params.pop(f"layers_{start}")
        for i in range(start, stop):
            params[f"layers_{i}"] = jax.tree.map(lambda x, j=i - start: x[j], stacked)
    return {"params": params}


def with_initial_position(model, variables):
    """Variables in which the parameters of the encoding have their initial values."""
    updating = model.encoding.layer_params(model.config, updates=True)
    updating |= model.encoding.input_params(model.config)

    def reset(path, x):
        name = path[-1].key.removeprefix("position_")
        if name == path[-1].key:
            return x
        return updating[name].init(jax.random.key(0), x.shape, x.dtype)

    return jax.tree.map_with_path(reset, variables)


def close(actual, expected, tolerance=1e-5):
    """Equality to ``tolerance``, relative to the largest value where that exceeds 1."""
    allowed = tolerance * max(1.0, float(jnp.abs(expected).max()))
    chex.assert_trees_all_close(actual, expected, atol=allowed, rtol=0)


YARN = RopeScaling("yarn", factor=2.0, original_length=16)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_mix": "heads", "norm": "rms"},
        {"norm": "unit", "scaling": YARN},
        {"form": "tensor", "l": 4, "r": 5, "norm": "rms", "scaling": YARN},
        {"form": "tensor", "norm": "unit", "learn_alpha": True},
        {"learn_base": True, "learn_alpha": True, "alpha_per_head": True},
    ],
)
def test_untrained_tape_is_rope(options):
    scaling = options.get("scaling", RopeScaling())
    shape = {"num_layers": 2, "scan_layers": False, "num_kv_heads": 1}
    tape = small_model(positions.Tape(**options), **shape)
    rope = small_model(positions.Rope(scaling=scaling), **shape)
    variables, tokens = random_variables(tape), random_tokens(2, 9)
    expected = run(rope, without(variables, "position_"), tokens)
    assert jnp.abs(run(tape, variables, tokens) - expected).max() > 1e-3
    close(run(tape, with_initial_position(tape, variables), tokens), expected, 1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"position": positions.Tape(layers=(1, 3)), "num_layers": 5},
        {"position": "fire"},
        {"position": positions.RandomRope(range=64, each_layer=True)},
    ],
)
def test_scanned_layers_equal_unrolled_ones(options):
    scanned, unrolled = small_model(**options), small_model(**options, scan_layers=False)
    variables, tokens = random_variables(scanned), random_tokens(2, 7)
    other = unstacked(scanned, variables)
    chex.assert_trees_all_equal_shapes(other, random_variables(unrolled))
    logits, states = run(scanned, variables, tokens, return_states=True)
    expected, expected_states = run(unrolled, other, tokens, return_states=True)
    close(logits, expected)
    chex.assert_trees_all_close(states, expected_states, atol=1e-4, rtol=1e-4)


def loops(model, variables, tokens):
    """Loops in the program of a forward pass."""
    program = jax.jit(functools.partial(model.apply, variables)).lower(tokens)
    return program.as_text().count("stablehlo.while")


@pytest.mark.parametrize("position", ["rope", positions.Tape(layers=(1, 3)), "tape+fox"])
def test_layers_without_a_loop_equal_those_of_the_loop(position, monkeypatch):
    model = small_model(position, num_layers=4)
    variables, tokens = random_variables(model), random_tokens(2, 8)
    unrolled = loss_and_gradients(model, variables, tokens)
    whole = loops(model, variables, tokens)
    monkeypatch.setattr(layers, "MOST_UNROLLED", 3)
    assert whole < loops(model, variables, tokens)
    again = jax.jit(functools.partial(loss_and_gradients.__wrapped__, model))
    chex.assert_trees_all_close(again(variables, tokens), unrolled, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"position": "rope"}, True),
        ({"position": "tape+alibi"}, True),
        ({"position": "rope", "num_layers": 9}, False),
        ({"position": "rope", "remat": "dots"}, False),
        ({"position": "cope"}, False),
        ({"position": "stickbreaking"}, False),
        ({"position": "tape+fire"}, False),
    ],
)
def test_a_cpu_has_few_layers_without_a_loop(options, expected, monkeypatch):
    model = small_model(**options)
    assert layers.unrolls(model.config) == expected
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not layers.unrolls(model.config)


WITH_BASE = {
    "rope": positions.Rope(learn_base=True),
    "xpos": positions.Xpos(learn_base=True),
    "rotary tape": positions.Tape(learn_base=True),
    "tensor tape": positions.Tape(learn_base=True, form="tensor", l=4, r=5),
}


@pytest.mark.parametrize(
    ("name", "attention"),
    mostly_slow(
        itertools.product(WITH_BASE, ["reference", "chunked"]),
        ("xpos", "reference"),
        ("tensor tape", "chunked"),
    ),
)
def test_the_base_learns(name, attention):
    wide = {"dtype": "float64", "param_dtype": "float64"}
    model = small_model(WITH_BASE[name], num_layers=2, attention_implementation=attention, **wide)
    with jax.enable_x64(True):
        variables, tokens = random_variables(model), random_tokens(2, 9)
        stretched = variables["params"]["position_log_stretch"]

        @jax.jit
        def loss(stretch):
            params = {**variables["params"], "position_log_stretch": stretch}
            return jnp.square(model.apply({"params": params}, tokens)).mean()

        step = 1e-5
        slope = (loss(stretched + step) - loss(stretched - step)) / (2 * step)
        assert abs(slope) > 1e-6
        np.testing.assert_allclose(jax.grad(loss)(stretched), slope, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", mostly_slow([True, False], True))
def test_remat_changes_neither_loss_nor_gradients(scan_layers):
    tape, shape = positions.Tape(norm="rms"), {"num_layers": 2, "scan_layers": scan_layers}
    plain = small_model(tape, **shape)
    variables, tokens = random_variables(plain), random_tokens(2, 7)
    expected = loss_and_gradients(plain, variables, tokens)
    for path, gradient in jax.tree_util.tree_leaves_with_path(expected[1]):
        assert gradient.any(), f"{jax.tree_util.keystr(path)} learns nothing"
    for policy in ("dots", "full") if scan_layers else ("full",):
        actual = loss_and_gradients(small_model(tape, **shape, remat=policy), variables, tokens)
        chex.assert_trees_all_close(actual, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, False])
def test_full_remat_saves_only_what_enters_the_layers_and_dots_also_products(scan_layers):
    """On a mesh that gathers parameters the same is kept: what was gathered is not."""
    tokens = random_tokens(2, 8)

    def saved(policy, sharding=None):
        model = small_model("tape", remat=policy, scan_layers=scan_layers)
        variables = random_variables(model)
        model = Transformer(model.config, sharding=sharding)

        def loss(variables):
            return model.apply(variables, tokens).sum()

        _, residuals = jax.eval_shape(lambda v: jax.vjp(loss, v), variables)
        return sum(x.size for x in jax.tree.leaves(residuals))

    full, dots, none = map(saved, ("full", "dots", "none"))
    assert full < dots < none
    mesh = ShardingConfig(fsdp=2).build(jax.devices()[:2])
    assert [saved("full", mesh), saved("dots", mesh)] == [full, dots]


jit_quickly = functools.partial(jax.jit, compiler_options=FAST_COMPILATION)


@pytest.mark.slow
def test_remat_in_groups_of_layers_keeps_less_and_changes_no_gradient():
    """Seven layers that update, in groups of three, three and one; the last is by itself."""
    tokens, ids = random_tokens(2, 8), jnp.array([[1] * 5 + [2] * 3, [1] * 6 + [0] * 2])
    plain = small_model("tape", num_layers=8)
    variables = random_variables(plain)

    def kept_and_gradients(remat):
        model = small_model("tape", num_layers=8, remat=remat)

        def loss(variables):
            return jnp.square(model.apply(variables, tokens, segment_ids=ids)).mean()

        _, residuals = jax.eval_shape(lambda v: jax.vjp(loss, v), variables)
        kept = sum(x.size for x in jax.tree.leaves(residuals))
        return kept, jit_quickly(jax.value_and_grad(loss))(variables)

    kept, expected = kept_and_gradients("full")
    in_groups, actual = kept_and_gradients("groups")
    chex.assert_trees_all_close(actual, expected, atol=1e-6, rtol=1e-4)
    width = plain.config.hidden_size + plain.config.kv_heads * plain.config.dim
    assert in_groups <= kept - 3 * tokens.size * width


@pytest.mark.slow
def test_groups_of_layers_with_states_in_bfloat16():
    tokens = random_tokens(2, 8)
    shape = {"num_layers": 6, "state_dtype": "bfloat16"}
    variables = random_variables(small_model("tape", **shape))
    full, groups = (
        loss_and_gradients(small_model("tape", **shape, remat=remat), variables, tokens)
        for remat in ("full", "groups")
    )
    chex.assert_trees_all_close(groups, full, atol=2e-2, rtol=2e-2)


def test_groups_of_layers_are_stacked_ones():
    for wrong in ({"scan_layers": False}, {"experts": Experts(2)}):
        with pytest.raises(ValueError, match=r"remat='groups' needs scan_layers=True and experts"):
            small_model("rope", remat="groups", **wrong)


@pytest.mark.parametrize("position", ["tape", positions.Tape(form="tensor")])
def test_remat_keeps_a_state_with_its_heads_in_one_axis(position):
    """A TPU would fill up a last axis of one head."""
    model, tokens = small_model(position, num_layers=4, remat="full"), random_tokens(2, 8)
    variables, c = random_variables(model), model.config
    e = jax.eval_shape(lambda v: model.apply(v, tokens, return_states=True), variables)[1]
    numbers = e.position[1].size // (2 * 8)
    _, residuals = jax.eval_shape(
        lambda v: jax.vjp(lambda v: model.apply(v, tokens).sum(), v), variables
    )
    shapes = [x.shape for x in jax.tree.leaves(residuals)]
    assert (3, 2, 8, numbers) in shapes
    assert (3, 2, 8, c.hidden_size) in shapes
    assert not [shape for shape in shapes if shape[:3] == (3, 2, 8) and len(shape) > 4]


def test_a_single_layer_makes_its_gradients_at_once():
    """They leave one barrier, which keeps none that nobody wants."""
    tokens = random_tokens(1, 8)

    def program(remat, frozen=()):
        model = small_model("rope", num_layers=1, remat=remat)
        params = dict(random_variables(model)["params"])
        layer = dict(params.pop("layers_0"))
        fixed = {name: layer.pop(name) for name in frozen}

        def loss(params, layer):
            return model.apply({"params": params | {"layers_0": layer | fixed}}, tokens).sum()

        lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, layer)
        return lowered, len(jax.tree.leaves(layer))

    lowered, leaves = program("full")
    barriers = [line for line in lowered.as_text().splitlines() if "optimization_barrier" in line]
    assert all(line.split("optimization_barrier")[1].count("%") > leaves for line in barriers)
    assert len(barriers) == 2
    assert "optimization_barrier" not in program("none")[0].as_text()
    fewer = program("full", frozen=("attention", "mlp"))[0]
    flops, flops_fewer = (x.compile().cost_analysis()["flops"] for x in (lowered, fewer))
    assert flops_fewer < 0.9 * flops


@pytest.mark.parametrize(
    ("position", "dtype"),
    mostly_slow(
        itertools.product(["tape", positions.Tape(form="tensor"), "fire"], ["bfloat16", "float16"]),
        ("tape", "bfloat16"),
        ("fire", "float16"),
    ),
)
def test_half_precision_is_near_float32(position, dtype):
    wide, narrow = small_model(position), small_model(position, dtype=dtype)
    variables, tokens = random_variables(wide, std=0.1), random_tokens(2, 16)
    expected = run(wide, variables, tokens)
    logits, states = run(narrow, variables, tokens, return_states=True)
    chex.assert_type(logits, jnp.float32)
    chex.assert_type(states.hidden[1], dtype)
    for state in states.position:
        if state is not None:
            chex.assert_type(state, jnp.float32)
    close(logits, expected, 2e-2 if dtype == "bfloat16" else 4e-3)


def test_the_type_of_states_can_be_chosen():
    model = small_model("tape", dtype="bfloat16", state_dtype="bfloat16")
    _, states = run(model, random_variables(model), random_tokens(1, 4), return_states=True)
    for state in states.position:
        chex.assert_type(state, jnp.bfloat16)


@pytest.mark.parametrize("position", ["tape", "alibi", "rope", "xpos"])
def test_far_positions_stay_apart_in_bfloat16(position):
    model = small_model(position, dtype="bfloat16", num_layers=2)
    variables, tokens = random_variables(model, std=0.4), random_tokens(1, 12)
    near = run(model, variables, tokens, positions=jnp.arange(12))
    far = run(model, variables, tokens, positions=jnp.arange(12) + 1000)
    close(far, near, 2e-2)
    merged = run(model, variables, tokens, positions=jnp.arange(12) // 8 * 8)
    assert jnp.abs(merged - near).max() > 0.1, "the test would not notice merged positions"


def test_float64(x64):
    model = small_model("tape", dtype="float64", param_dtype="float64")
    variables = random_variables(model)
    logits, states = run(model, variables, random_tokens(1, 4), return_states=True)
    chex.assert_type([logits, *states.hidden, *states.position], jnp.float64)


@pytest.mark.parametrize(
    "position", mostly_slow(["tape", "fire", "sinusoidal", "xpos", "random_rope"], "tape", "fire")
)
def test_x64_changes_nothing_for_a_float32_model(position):
    model = small_model(position)
    variables, tokens = random_variables(model), random_tokens(2, 6)
    expected = run(model, variables, tokens, return_states=True)
    with jax.enable_x64(True):
        actual = run(model, variables, tokens, return_states=True)
    chex.assert_trees_all_equal_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_tied_embeddings():
    model = small_model("tape", tie_embeddings=True)
    variables, tokens = random_variables(model), random_tokens(2, 5)
    assert "head" not in variables["params"]
    logits, states = run(model, variables, tokens, return_states=True)
    close(logits, states.final_norm @ variables["params"]["embedding"].T)


def test_untied_embeddings():
    model = small_model("tape")
    variables = random_variables(model)
    logits, states = run(model, variables, random_tokens(2, 5), return_states=True)
    close(logits, states.final_norm @ variables["params"]["head"]["kernel"])


@pytest.mark.parametrize(
    "options",
    mostly_slow([{}, {"tie_embeddings": True}, {"dtype": "bfloat16"}], {"tie_embeddings": True}),
)
def test_logits_of_a_few_tokens_at_a_time(options):
    model = small_model("tape", **options)
    variables, tokens = random_variables(model), random_tokens(2, 6)
    expected = run(model, variables, tokens)
    hidden = run(model, variables, tokens, output="hidden")
    chex.assert_shape(hidden, (2, 6, model.config.hidden_size))
    chex.assert_type(hidden, model.config.dtype)
    parts = [model.project(variables, hidden[:, i : i + 2]) for i in (0, 2, 4)]
    chex.assert_trees_all_equal_dtypes(parts[0], expected)
    close(jnp.concatenate(parts, axis=1), expected)
    made = jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, output="hidden"))
    chex.assert_trees_all_equal_shapes_and_dtypes(made, variables)


def test_grouped_queries_equal_repeated_keys_and_values():
    grouped = small_model("rope", num_heads=4, num_kv_heads=2, head_dim=6, num_layers=2)
    full = small_model("rope", num_heads=4, head_dim=6, num_layers=2)
    variables, tokens = random_variables(grouped), random_tokens(2, 6)

    def repeat(path, x):
        if not {"k", "v"} & {entry.key for entry in path}:
            return x
        return x.reshape(2, 16, 2, 6).repeat(2, axis=2).reshape(2, 16, 24)

    expected = run(full, jax.tree.map_with_path(repeat, variables), tokens)
    close(run(grouped, variables, tokens), expected)


def test_shapes_of_parameters_with_an_explicit_head_dim():
    model = small_model("tape", num_heads=4, num_kv_heads=2, head_dim=6, num_layers=4)
    params = random_variables(model)["params"]
    layers, last = params["layers_0"], params["layers_3"]
    kernels = {name: leaf["kernel"].shape for name, leaf in layers["attention"].items()}
    assert kernels == {"q": (3, 16, 24), "k": (3, 16, 12), "v": (3, 16, 12), "out": (3, 24, 16)}
    assert layers["position_mix"].shape == (3, 4)
    assert layers["position_wx"].shape == (3, 16, 8)
    assert layers["position_up"].shape == (3, 8, 2)
    assert layers["position_down"].shape == (3, 2, 8)
    assert last["attention"]["q"]["kernel"].shape == (1, 16, 24)


@pytest.mark.parametrize(
    ("layers", "updating"),
    [("all", {0, 1, 2}), ((1, 3), {1, 2}), ((2, 4), {2}), ((0, 0), set()), ((3, 4), set())],
)
def test_only_updating_layers_have_parameters_and_never_the_last(layers, updating):
    model = small_model(positions.Tape(layers=layers), num_layers=4, scan_layers=False)
    params = random_variables(model)["params"]
    having = {
        i for i in range(4) if any(name.startswith("position") for name in params[f"layers_{i}"])
    }
    assert having == updating
    assert {i for a, b, updates in model.runs if updates for i in range(a, b)} == updating
    cache = jax.eval_shape(lambda: init_cache(model, 1, 3))
    assert [layer.e is not None for layer in cache.layers] == [u for _, _, u in model.blocks]


def test_only_updating_layers_change_the_state():
    model = small_model(positions.Tape(layers=(1, 3)), num_layers=5)
    _, states = run(model, random_variables(model), random_tokens(2, 6), return_states=True)
    entering = [
        jnp.broadcast_to(s if s.ndim > 2 else s[:, None], (2, 6, 2, 8)) for s in states.position
    ]
    same = [bool((a == b).all()) for a, b in itertools.pairwise(entering)]
    assert same == [True, False, False, True]


def test_shapes_of_returned_states():
    model = small_model("tape", num_heads=4, num_kv_heads=2)
    logits, states = run(model, random_variables(model), random_tokens(2, 6), return_states=True)
    chex.assert_shape(logits, (2, 6, VOCAB))
    assert len(states.hidden) == 4
    chex.assert_shape([*states.hidden, states.final_norm], (2, 6, 16))
    assert len(states.position) == 3
    chex.assert_shape(states.position, (2, 6, 2, 4))


def test_the_number_of_parameters():
    layers, hidden, heads, kv, dim, mlp, vocab = 32, 4096, 32, 8, 128, 14336, 128256
    config = ModelConfig(
        vocab, hidden, layers, heads, num_kv_heads=kv, head_dim=dim, intermediate_size=mlp
    )
    shapes = jax.eval_shape(
        Transformer(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
    )
    block = hidden * dim * (2 * heads + 2 * kv) + 3 * hidden * mlp + 2 * hidden
    width = 4 * kv
    update = heads + hidden * width + 2 * width * kv
    expected = layers * block + (layers - 1) * update + 2 * vocab * hidden + hidden
    assert sum(x.size for x in jax.tree.leaves(shapes)) == expected
    assert (expected - (layers - 1) * update) == 8_030_261_248, "Llama 3 8B"


def banded(time, local_window_size):
    i, j = np.arange(time)[:, None], np.arange(time)
    return (j <= i) & (j > i - local_window_size)


def test_window_equals_its_mask():
    variables, tokens = random_variables(small_model("tape")), random_tokens(2, 9)
    expected = run(small_model("tape"), variables, tokens, mask=banded(9, 3))
    close(run(small_model("tape", local_window_size=3), variables, tokens), expected)


def test_a_causal_mask_equals_causal():
    model = small_model("tape")
    variables, tokens = random_variables(model), random_tokens(2, 5)
    mask = jnp.tril(jnp.ones((5, 5), bool))
    close(run(model, variables, tokens, mask=mask, is_causal=False), run(model, variables, tokens))


def test_without_causality_every_token_is_seen():
    model = small_model("tape")
    variables, tokens = random_variables(model), random_tokens(1, 6)
    changed = tokens.at[0, -1].add(1)
    both = [run(model, variables, t, is_causal=False) for t in (tokens, changed)]
    assert jnp.abs(both[0] - both[1]).max(-1).min() > 1e-4


@pytest.mark.parametrize("kind", mostly_slow(positions.registry, "tape", "abacus", "t5"))
def test_packed_segments_equal_separate_sequences(kind):
    model = small_model(kind)
    generator = np.random.default_rng(0)
    first, second = generator.integers(0, VOCAB, 4), generator.integers(0, VOCAB, 5)
    first[-1] = second[0] = DIGITS[4]  # one number ends where the next begins
    filler = generator.integers(0, VOCAB, 5)
    rows = [(first, second), (first, filler), (second, filler[:4])]
    tokens = jnp.asarray([np.concatenate(row) for row in rows])
    segments = jnp.asarray(
        [
            np.repeat(ids, [len(x) for x in row])
            for ids, row in zip([(7, 3), (1, 1), (2, 2)], rows, strict=True)
        ]
    )
    logits = run(model, random_variables(model), tokens, segment_ids=segments)
    close(logits[0, :4], logits[1, :4])
    close(logits[0, 4:], logits[2, :5])


@pytest.mark.parametrize("kind", mostly_slow(positions.registry, "tape", "learned", "fire"))
def test_padding_is_not_read_and_not_seen(kind):
    """Padded on either side, with ids and positions that no token has, a row stays what it is."""
    model, length = small_model(kind), 5
    variables, row = random_variables(model), random_tokens(length)
    tokens = jnp.full((3, 8), 10_000).at[0, :5].set(row).at[1, 3:].set(row).at[2, 1:6].set(row)
    ids = (tokens < VOCAB).astype(jnp.int32) * 4
    places = jnp.where(ids == 0, -9000, jnp.cumsum(ids // 4, axis=1) - 1)
    expected = run(model, variables, row, length=length)
    for given in ({}, {"positions": places}):
        logits = run(model, variables, tokens, segment_ids=ids, length=length, **given)
        assert jnp.isfinite(logits).all()
        close(logits[ids != 0].reshape(3, length, VOCAB), jnp.stack([expected] * 3))


DYNAMIC = RopeScaling("dynamic", 2.0, original_length=4)


OF_LENGTH = {
    "random_rope": encoding("random_rope"),
    "each layer": encoding("random_rope", each_layer=True),
    "rope": positions.Rope(scaling=DYNAMIC),
    "tape": positions.Tape(scaling=DYNAMIC, form="tensor"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(OF_LENGTH, "each layer"))
def test_the_width_of_a_batch_is_no_length(name):
    """Draws and dynamic scaling are for what each row really has, or for the length it is given."""
    model = small_model(OF_LENGTH[name], num_layers=2)
    variables, row = random_variables(model), random_tokens(7)
    expected = run(model, variables, row)
    for width in (8, 14):
        left, right = jnp.zeros((2, width), int), jnp.zeros((2, width), int)
        ids = left.at[0, -7:].set(1).at[1, -3:].set(1)
        left = left.at[0, -7:].set(row).at[1, -3:].set(row[:3])
        close(run(model, variables, left, segment_ids=ids)[0, -7:], expected)
        right = right.at[0, :7].set(row).at[1, :3].set(row[:3])
        close(run(model, variables, right, segment_ids=ids[:, ::-1])[0, :7], expected)
    told = jax.jit(model.apply)(variables, jnp.stack([row, row]), length=jnp.array([7, 14]))
    close(told[0], expected)
    close(told[1], run(model, variables, row, length=14))
    assert jnp.abs(run(model, variables, row, length=14) - expected).max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random_rope", "tape"])
def test_a_row_that_is_all_padding_spoils_nothing(kind):
    """Its logits are finite, so that a loss with weight 0 there, and its gradients, are too."""
    model, tokens = small_model(kind, num_layers=1), random_tokens(2, 4)
    variables, ids = random_variables(model), jnp.array([[1, 1, 1, 1], [0, 0, 0, 0]])
    assert jnp.isfinite(run(model, variables, tokens, segment_ids=ids)).all()
    assert jnp.isfinite(model.apply(variables, tokens, segment_ids=ids)).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_ids_of_a_type_that_has_no_number_for_the_vocabulary(dtype):
    model = small_model("none", num_layers=1, vocab_size=300)
    variables, tokens = random_variables(model), random_tokens(2, 4)
    expected = run(model, variables, tokens)
    chex.assert_trees_all_equal(run(model, variables, tokens.astype(dtype)), expected)


@pytest.mark.parametrize("length", [[-5, 3], [0, 3]])
def test_lengths_that_are_none(length):
    model = small_model("rope", num_layers=1)
    with pytest.raises(ValueError, match=r"length must be positive; got \[(-5|0), 3\]"):
        model.apply({}, random_tokens(2, 4), length=np.array(length))


@pytest.mark.parametrize("name", ["tokens", "positions", "segment_ids"])
def test_64_bit_integers_are_not_cut(name):
    wide = np.array([[0, 1, 2**32 + 1]])
    given = {"tokens": np.array([[1, 2, 3]]), name: wide}
    model = small_model("rope", num_layers=1)
    with pytest.raises(ValueError, match=f"{name} must fit in int32"):
        model.apply(random_variables(model), **given)


def test_lists_are_named():
    with pytest.raises(ValueError, match="tokens must be an array; got list"):
        small_model("rope", num_layers=1).apply({}, [[1, 2, 3]])


def test_nothing_but_padding():
    tokens, ids = jnp.ones((2, 3), int), jnp.zeros((2, 3), int)
    model = small_model("rope", experts=Experts(3))
    variables = random_variables(model)
    with pytest.raises(ValueError, match="all segment_ids are 0, which is padding"):
        model.apply(variables, tokens, segment_ids=ids)

    @jax.jit
    def balance(ids):
        _, sown = model.apply(variables, tokens, segment_ids=ids, mutable=["losses"])
        return sown["losses"]["layers_0"]["mlp"]["balance"][0]

    np.testing.assert_array_equal(balance(ids), 0)
    assert (balance(ids.at[0].set(3)) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "position", [positions.Tape(form="tensor", attention_mix="heads"), "fire", "abacus"]
)
def test_any_batch_axes(position):
    model = small_model(position)
    variables, tokens = random_variables(model), random_tokens(2, 3, 5)
    places = jnp.asarray(np.random.default_rng(1).integers(0, 9, (2, 3, 5)))
    segments = jnp.asarray([2, 2, 1, 1, 1])
    options = {"positions": places, "segment_ids": segments}
    whole = run(model, variables, tokens, **options)
    chex.assert_shape(whole, (2, 3, 5, VOCAB))
    flat = run(
        model, variables, tokens.reshape(6, 5), positions=places.reshape(6, 5), segment_ids=segments
    )
    close(flat, whole.reshape(6, 5, VOCAB))
    one = run(model, variables, tokens[1, 2], positions=places[1, 2], segment_ids=segments)
    close(one, whole[1, 2])
    mapped = jax.jit(
        jax.vmap(lambda t, p: model.apply(variables, t, positions=p, segment_ids=segments)),
        compiler_options=FAST_COMPILATION,
    )(tokens, places)
    close(mapped, whole)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 5)])
def test_positions_broadcast(shape):
    model = small_model("tape")
    variables, tokens = random_variables(model), random_tokens(2, 5)
    places = jnp.broadcast_to(jnp.arange(5), shape)
    close(run(model, variables, tokens, positions=places), run(model, variables, tokens))


def test_indices_beyond_a_table_are_refused_or_give_nan():
    """For token ids and every encoding with a table, never the row of a neighbour."""
    tokens, zeros = jnp.array([[3, 4, 5, 6]]), jnp.zeros(4, int)
    for kind, size, what in (
        ("none", VOCAB, "token ids"),
        ("learned", 40, "learned: positions"),
        ("random_rope", 4, "random_rope: positions"),
    ):
        model = small_model(kind, num_layers=1)
        variables = random_variables(model)
        apply = functools.partial(model.apply, variables)
        for wrong in (size, -1):
            given = {"tokens": tokens, "positions": zeros}
            name = "tokens" if kind == "none" else "positions"
            given[name] = given[name].at[..., 2].set(wrong)
            with pytest.raises(ValueError, match=rf"{what} must lie in 0 \.\. {size - 1}; got"):
                apply(**given)
            logits = jax.jit(apply)(**given)
            assert jnp.isnan(logits[0, 2:]).all()
            cache = init_cache(model, 1, 4)
            with pytest.raises(ValueError, match=rf"{what} must lie in 0 \.\. {size - 1}; got"):
                apply(**given, cache=cache)
            assert jnp.isnan(jax.jit(apply)(**given, cache=cache)[0][0, 2:]).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alibi", "fire", "t5", "abacus"])
def test_narrow_integers_do_not_overflow(kind):
    """Unsigned differences would wrap around, and sums of small types too."""
    model = small_model(kind, num_layers=1)
    variables, tokens = random_variables(model), random_tokens(1, 6)
    at = np.array([0, 3, 60, 61, 100, 127])
    expected = run(model, variables, tokens, positions=at, is_causal=False)
    for dtype in (np.uint8, np.int8, np.uint32):
        found = run(model, variables, tokens, positions=at.astype(dtype), is_causal=False)
        close(found, expected)


@pytest.mark.parametrize(
    "position",
    [
        positions.Rope(axes=2),
        positions.Tape(axes=2, base=100.0),
        positions.Tape(axes=2, form="tensor", r=3),
    ],
)
def test_coordinates_of_two_axes(position):
    model = small_model(position)
    variables, tokens = random_variables(model), random_tokens(2, 6)
    row, column = np.divmod(np.arange(6), 3)
    places = np.stack([row, column], axis=-1)
    expected = run(model, variables, tokens, positions=places)
    close(run(model, variables, tokens, positions=places + np.array([7, -4])), expected)
    for axis in range(2):
        moved = places.copy()
        moved[0, axis] += 1
        assert jnp.abs(run(model, variables, tokens, positions=moved) - expected).max() > 1e-3


@pytest.mark.parametrize("position", ["rope", positions.Tape(form="tensor", layers=(0, 0))])
def test_positions_may_lack_batch_axes(position):
    model = small_model(position)
    variables, tokens = random_variables(model), random_tokens(2, 3, 5)
    places = jnp.asarray(np.random.default_rng(1).integers(0, 9, (3, 5)))
    whole = run(model, variables, tokens, positions=jnp.broadcast_to(places, tokens.shape))
    close(run(model, variables, tokens, positions=places), whole)


def test_an_initial_state_replaces_the_start():
    tokens, places = random_tokens(2, 6), jnp.arange(6)
    for position, state in (
        ("tape", rotary_state(places, 8)),
        (positions.Tape(form="tensor"), tensor_state(places, 8)),
    ):
        model = small_model(position, num_layers=2)
        variables = random_variables(model)
        expected = run(model, variables, tokens)
        close(run(model, variables, tokens, initial_state=state), expected)
        backwards = run(model, variables, tokens, initial_state=state[::-1])
        assert jnp.abs(backwards - expected).max() > 1e-3


@pytest.mark.parametrize("position", [*positions.registry, "tape+fox", "alibi+fox", "repo+kerple"])
def test_an_initial_state_is_read_or_refused(position):
    chosen = positions.create(position) if "+" in position else encoding(position)
    rotary = {"rope", "yarn", "xpos", "random_rope", "mapformer_wm", "mapformer_em"}
    assert chosen.reads_start is (position in rotary or position.startswith("tape"))
    if not chosen.reads_start:
        model, state = small_model(chosen), (jnp.zeros((5, 8)), jnp.zeros(3))
        told = rf"the encoding '{re.escape(position)}' reads no state .*got \(\(5, 8\), \(3,\)\)"
        with pytest.raises(ValueError, match=told):
            model.init(jax.random.key(0), jnp.zeros((2, 5), jnp.int32), initial_state=state)


def test_a_late_start_of_repo_reads_an_initial_state():
    model = small_model(positions.Repo(width=4, first_layer=1))
    variables, tokens = random_variables(model), random_tokens(2, 6)
    state = rotary_state(jnp.arange(6), 8, 500_000.0)
    close(run(model, variables, tokens, initial_state=state), run(model, variables, tokens))


@pytest.mark.parametrize("kind", ["random_rope", "abacus"])
def test_encodings_that_draw_follow_the_random_stream(kind):
    model = small_model(kind)
    variables, tokens = random_variables(model), random_tokens(2, 8)
    apply = jax.jit(
        lambda key: model.apply(variables, tokens, rngs={"positions": key}),
        compiler_options=FAST_COMPILATION,
    )
    first = apply(jax.random.key(1))
    chex.assert_trees_all_equal(apply(jax.random.key(1)), first)
    assert jnp.abs(apply(jax.random.key(2)) - first).max() > 1e-3
    fixed = run(model, variables, tokens)
    chex.assert_trees_all_equal(run(model, variables, tokens), fixed)
    assert jnp.abs(fixed - first).max() > 1e-3


def test_backends_agree():
    variables, tokens = random_variables(small_model("tape")), random_tokens(2, 9)
    results = [
        run(small_model("tape", attention_implementation=name), variables, tokens)
        for name in ("reference", "chunked")
    ]
    close(*results)


def test_equal_models_are_one_key():
    assert hash(small_model("tape")) == hash(small_model("tape"))
    assert small_model("tape") == small_model("tape")
    assert small_model("tape") != small_model("rope")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be a positive integer; got 0"),
        ({"num_layers": 0}, "num_layers must be a positive integer; got 0"),
        ({"hidden_size": 16.0}, "hidden_size must be a positive integer; got 16.0"),
        ({"max_length": 0}, "max_length must be a positive integer or None; got 0"),
        ({"local_window_size": -1}, "local_window_size must be a positive integer or None; got -1"),
        ({"head_dim": 7}, "head dimension must be even; got 7"),
        ({"hidden_size": 20, "num_heads": 4}, "head dimension must be even; got 5"),
        ({"hidden_size": 18, "num_heads": 4}, "hidden_size = 18 is not a multiple of num_heads"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads = 4 is not a multiple of num_kv_heads"),
        ({"dtype": "bfloat"}, r"unknown model dtype 'bfloat'.*did you mean 'bfloat16'"),
        ({"param_dtype": "int8"}, "unknown model param_dtype 'int8'"),
        ({"state_dtype": "int8"}, "unknown model state_dtype 'int8'"),
        ({"remat": "dot"}, r"unknown remat policy 'dot'.*did you mean 'dots'"),
        (
            {"hiden_size": 8},
            r"unknown field 'hiden_size' of model \(did you mean 'hidden_size'\?\)",
        ),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message):
        from_mapping(ModelConfig, {"vocab_size": 5, "hidden_size": 16, **options}, what="model")


def trace(model, tokens=None, **options):
    """Initialises without computing anything."""
    tokens = jnp.zeros((2, 5), jnp.int32) if tokens is None else tokens
    return jax.eval_shape(lambda: model.init(jax.random.key(0), tokens, **options))


@pytest.mark.parametrize(
    ("position", "options", "message"),
    [
        ("taep", {}, r"unknown position encoding 'taep'.*did you mean 'tape'"),
        ({"kind": "tape", "norms": "rms"}, {}, r"unknown field 'norms'.*did you mean 'norm'"),
        ({"norm": "rsm"}, {}, r"unknown tape norm 'rsm'.*did you mean 'rms'"),
        ({"form": "tensors"}, {}, r"unknown tape form 'tensors'.*did you mean 'tensor'"),
        ({"attention_mix": "head"}, {}, r"unknown tape attention_mix 'head'.*did you mean"),
        ({"activation": "slu"}, {}, r"unknown tape activation 'slu'.*did you mean 'silu'"),
        ({"layers": (2, 1)}, {}, r"layers must be 'all' or \(start, stop\).*got \(2, 1\)"),
        ({"layers": (1, 4)}, {}, r"layers = \(1, 4\) goes past the model's 3 layers"),
        ({"form": "tensor", "l": 3}, {}, "l = 3 does not divide the head dimension 8"),
        ({"form": "tensor", "l": 4, "r": 2}, {}, "start state exists for even l and r >= l"),
        ({"kind": "abacus"}, {}, "abacus: digits"),
        ({"kind": "rope", "axes": 5}, {"positions": jnp.zeros((5, 5))}, r"axes must lie in 1\.\.4"),
        (
            {"kind": "tape_mix_head_dim"},
            {"num_kv_heads": 1},
            "one state per query head; got num_heads = 2",
        ),
        ("tape", {"attention_implementation": "chunky"}, r"'chunky'.*did you mean 'chunked'"),
    ],
)
def test_bad_encodings_and_backends(position, options, message):
    inputs = {name: options[name] for name in options if name == "positions"}
    config = {name: options[name] for name in options if name != "positions"}
    with pytest.raises(ValueError, match=message):
        trace(small_model(positions.create(position), **config), **inputs)


GRID = positions.Rope(axes=2)


@pytest.mark.parametrize(
    ("position", "tokens", "options", "message"),
    [
        ("tape", jnp.zeros((2, 5)), {}, r"tokens must be integers .* float32 of shape \(2, 5\)"),
        ("tape", jnp.int32(3), {}, r"tokens must be integers .* shape \(\)"),
        ("tape", jnp.zeros((2, 0), jnp.int32), {}, r"at least one token; got shape \(2, 0\)"),
        ("tape", None, {"positions": jnp.arange(6)}, r"positions of shape \(6,\).*\(2, 5\)"),
        ("tape", None, {"positions": jnp.zeros((3, 5))}, r"positions of shape \(3, 5\)"),
        ("tape", None, {"positions": jnp.zeros((1, 2, 5))}, r"positions of shape \(1, 2, 5\)"),
        ("tape", None, {"positions": jnp.int32(3)}, r"positions of shape \(\)"),
        ("alibi", None, {"positions": jnp.ones(5, bool)}, "positions must be integers or floats"),
        ("tape", None, {"positions": jnp.zeros((2, 5, 2))}, r"positions of shape \(2, 5, 2\)"),
        (GRID, None, {}, r"axes=2: give positions= of shape \(2, 5, 2\)"),
        (GRID, None, {"positions": jnp.zeros((2, 5))}, r"expected \(2, 5, 2\)"),
        (GRID, None, {"positions": jnp.zeros((2, 5, 3))}, r"expected \(2, 5, 2\)"),
        ("tape", None, {"segment_ids": jnp.zeros((2, 5))}, "segment_ids must be integers; got fl"),
        ("tape", None, {"segment_ids": jnp.zeros(4, jnp.int32)}, r"segment_ids of shape \(4,\)"),
        ("tape", None, {"mask": jnp.ones((5, 5))}, "mask must be boolean"),
        ("tape", None, {"mask": jnp.ones((5, 4), bool)}, r"mask must broadcast .* got .*5, 4\)"),
        (
            "tape",
            None,
            {"initial_state": jnp.zeros((4, 8))},
            r"state of shape \(4, 8\) .* \(2, 5, 2, 8\)",
        ),
        ("tape", jnp.zeros((1, 9), jnp.int32), {}, "9 tokens exceeds the model's max_length of 8"),
        (
            positions.Learned(size=4),
            None,
            {},
            "5 tokens exceeds the limit of the encoding 'learned' of 4",
        ),
        (positions.RandomRope(range=4), None, {}, "the limit of the encoding 'random_rope' of 4"),
        (encoding("random_rope"), None, {"length": 65}, "65 positions cannot be drawn"),
        ("tape", None, {"length": 0}, "length must be positive; got 0"),
        ("tape", None, {"length": 5.0}, r"length must be an integer or .* got float32 of shape"),
        ("tape", None, {"length": jnp.ones(3, int)}, r"broadcast to the batch \(2,\); got .* \(3,"),
        ("tape", None, {"output": "hiden"}, r"unknown output 'hiden'.*did you mean 'hidden'"),
    ],
)
def test_bad_inputs(position, tokens, options, message):
    with pytest.raises(ValueError, match=message):
        trace(small_model(position, max_length=8), tokens, **options)


def test_a_named_implementation_never_falls_back():
    with pytest.raises(NotImplementedError, match="'splash': needs a TPU"):
        trace(small_model("tape", attention_implementation="splash"))


@pytest.mark.parametrize(
    ("batch", "capacity", "shape", "used", "message"),
    [
        (2, 4, (2, 5), 0, "5 tokens do not fit into a cache of capacity 4 with 0 in use"),
        (2, 6, (2, 5), 2, "5 tokens do not fit into a cache of capacity 6 with 2 in use"),
        (3, 6, (2, 5), 0, r"cache for 3 sequences, tokens must have shape \(3, T\); got \(2, 5\)"),
        (2, 6, (5,), 0, r"tokens must have shape \(2, T\); got \(5,\)"),
        (2, 6, (1, 2, 5), 0, r"tokens must have shape \(2, T\); got \(1, 2, 5\)"),
        (2, 9, (2, 5), 0, "a cache of 9 tokens exceeds the model's max_length of 8"),
        (0, 5, (2, 5), 0, "batch_size and capacity must be positive; got 0 and 5"),
        (2, 0, (2, 5), 0, "batch_size and capacity must be positive; got 2 and 0"),
    ],
)
def test_bad_caches(batch, capacity, shape, used, message):
    model = small_model("tape", max_length=8)
    tokens = jnp.zeros(shape, jnp.int32)

    def use_cache():
        cache = init_cache(model, batch, capacity).replace(index=jnp.int32(used))
        model.init(jax.random.key(0), tokens, cache=cache)

    with pytest.raises(ValueError, match=message):
        use_cache()


def test_the_size_of_a_cache():
    model = small_model("tape", num_heads=4, num_kv_heads=2, dtype="bfloat16")
    cache = jax.eval_shape(lambda: init_cache(model, 3, 10))
    keys_and_values = 3 * 2 * (3 * 10 * 2 * 4) * 2
    states = 2 * (3 * 10 * 2 * 4) * 2
    assert cache.capacity == 10
    assert cache.nbytes == keys_and_values + states + 3 * (3 * 10) * 4


@pytest.mark.parametrize("scan_layers", [False, True])
def test_attention_plan(scan_layers):
    """One plan for each run of layers, from shapes alone; the last layer attends no state."""
    model = small_model("tape", scan_layers=scan_layers)
    plans = model.attention_plan(2, 7)
    assert list(plans) == (
        ["layers_0", "layers_2"] if scan_layers else ["layers_0", "layers_1", "layers_2"]
    )
    assert {plan.implementation for plan in plans.values()} == {"reference"}
    assert plans["layers_0"].operations > plans["layers_2"].operations > 0
    ids = jax.ShapeDtypeStruct((2, 8192), jnp.int32)
    plans = model.attention_plan(2, 8192, segment_ids=ids)
    assert {plan.implementation for plan in plans.values()} == {"chunked"}


def test_attention_plan_says_what_rewriting_rows_costs():
    (fox,), (cope,) = (small_model(k).attention_plan(1, 16).values() for k in ("fox", "cope"))
    pairs, heads, width = 16 * 16, 2, 8
    assert fox.operations == 2 * 2 * width * pairs * heads
    assert cope.operations > fox.operations


def test_attention_plan_of_a_named_implementation():
    plans = small_model("fire", attention_implementation="chunked").attention_plan(
        1, 8, is_causal=False
    )
    assert [plan.implementation for plan in plans.values()] == ["chunked"]
    with pytest.raises(NotImplementedError, match="'splash': needs a TPU"):
        small_model("tape", attention_implementation="splash").attention_plan(1, 8)
    with pytest.raises(ValueError, match="max_length of 4"):
        small_model("tape", max_length=4).attention_plan(1, 8)


def test_unknown_attention_is_refused_at_once():
    with pytest.raises(ValueError, match=r"implementation 'chunkd'.*did you mean 'chunked'"):
        small_model("tape", attention_implementation="chunkd")


@pytest.mark.parametrize("field", ["dtype", "param_dtype", "state_dtype"])
def test_64_bits_are_refused_where_they_are_disabled(field):
    """A model may be described and made; what would be computed in float32 is not."""
    model, tokens = small_model("tape", num_layers=1, **{field: "float64"}), jnp.ones((1, 2), int)
    words = f"{field} = float64 needs 64-bit types.*jax_enable_x64"
    with pytest.raises(ValueError, match=words):
        model.init(jax.random.key(0), tokens)
    with pytest.raises(ValueError, match=words):
        model.apply(random_variables(small_model("tape", num_layers=1)), tokens)
    if field != "param_dtype":
        with pytest.raises(ValueError, match=words):
            init_cache(model, 1, 3)
    with jax.enable_x64(True):
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
        assert (params["embedding"].dtype == jnp.float64) == (field == "param_dtype")


def test_functions_refuse_64_bits_too():
    for call in (
        lambda **options: rotary_state(jnp.arange(3), 8, **options),
        lambda **options: tensor_state(jnp.arange(3), 8, **options),
        lambda **options: init_update(jax.random.key(0), 8, 2, **options),
        lambda **options: init_cache(small_model("rope"), 1, 3, **options),
    ):
        with pytest.raises(ValueError, match="dtype = float64 needs 64-bit types"):
            call(dtype=jnp.float64)
    with pytest.raises(ValueError, match="position_dtype = float64 needs 64-bit types"):
        init_cache(small_model("rope"), 1, 3, position_dtype=np.float64)
