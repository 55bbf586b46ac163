"""Rules, meshes, and the model split over simulated devices against the model on one."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tape_jax import Experts, ModelConfig, RandomPositions, Transformer, init_cache, positions
from tape_jax._src.core.sharding import process_share
from tape_jax.losses import added_by_routers
from tape_jax.sharding import MESH_AXES, PRESETS, RULES, Sharding, ShardingConfig, constrain, preset
from tests.library.positions.test_combined import combined
from tests.models import random_variables, small_model
from tests.selection import OF_EACH_SORT, mostly_slow
from train.analysis.collectives import collectives

B, T, VOCAB = 8, 16, 16
HIDDEN, HEADS, KV_HEADS, WIDTH = 32, 8, 4, 48


def model_of(mix="heads", sharding=None, layers=2, **options):
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=layers, num_heads=HEADS,
        num_kv_heads=KV_HEADS, intermediate_size=WIDTH,
        position=positions.Tape(attention_mix=mix), **options,
    )  # fmt: skip
    return Transformer(config, sharding=sharding)


def built(rules=(), **sizes):
    devices = jax.devices()[: math.prod(sizes.values())]
    return ShardingConfig(**sizes, rules=rules).build(devices)


TOKENS = np.random.default_rng(0).integers(0, VOCAB, (B, T))


def loss_and_gradients(model):
    """Loss on a fixed choice of targets, with routers'; without gathers over the vocabulary."""
    targets = np.eye(VOCAB, dtype=np.float32)[np.roll(TOKENS, -1, axis=1)]
    experts = model.config.experts

    def loss(variables, tokens, targets):
        logits, sown = model.apply(variables, tokens, mutable=["losses"])
        chosen = jnp.sum(logits * targets, axis=-1)
        added = added_by_routers(sown, experts)[0] if experts else 0
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen) + added

    return jax.value_and_grad(loss), targets


@functools.cache
def on_one_device(**options):
    model = model_of(**options)
    variables = random_variables(model)
    function, targets = loss_and_gradients(model)
    return variables, jax.device_get(jax.jit(function)(variables, TOKENS, targets))


def run_on(sharding, **options):
    """Largest difference from one device, and the compiled program's collectives."""
    variables, expected = on_one_device(**options)
    model = model_of(sharding=sharding, **options)
    sharding.check(model, batch_size=B, length=T)
    places = sharding.of(model, variables)
    function, targets = loss_and_gradients(model)
    args = (jax.device_put(variables, places), *sharding.place((TOKENS, targets)))
    # Gradients stay where the parameters are.
    compiled = jax.jit(function, out_shardings=(None, places)).lower(*args).compile()
    found = jax.device_get(compiled(*args))
    errors = jax.tree.map(lambda x, y: np.max(np.abs(x - y)), found, expected)
    return max(jax.tree.leaves(errors)), collectives(compiled.as_text(), sharding.mesh)


def unexpected(found, model, sharding):
    """Collectives of a step that the mesh does not call for.

    Parameters are gathered over ``fsdp`` and their gradients summed over all axes of tokens; the
    blocks' sums over ``tensor``, and one position state in each mixing over heads, are of one
    device's tokens; keys, values and states hop along ``sequence``. Experts add the gradients of
    tokens' weights, and sums over tokens that their losses need.
    """
    shards = {axis: sharding.shards(axis) for axis in ("batch", "sequence", "heads")}
    tokens = (B // shards["batch"], T // shards["sequence"])
    state = (*tokens, KV_HEADS, HIDDEN // HEADS)
    width = 4 * KV_HEADS
    activations = [(), tokens, (*tokens, 1), (*tokens, HIDDEN), (*tokens, width)]

    experts = model.config.experts
    if experts:
        activations.append((*tokens, experts.per_token))

    def squeezed(shape):
        return tuple(sorted(n for n in shape if n > 1))

    # Parameters as a device has them: whole along the width of the residual stream, or not.
    parameters = {()} | ({(experts.count,)} if experts else set())
    for x, axes, _ in model.parameters().values():
        for width_shards in (1, sharding.shards("embed")):
            split = [1 if a is None else sharding.shards(a) for a in axes]
            split = [width_shards if a == "embed" else k for a, k in zip(axes, split, strict=True)]
            shape = [n // k for n, k in zip(x.shape, split, strict=True)]
            parameters.add(squeezed(shape[axes[:1] == ("layers",) :]))
    # Gradients of up and down, and of the products of their columns.
    mixing = [(width, KV_HEADS), (width, KV_HEADS, KV_HEADS // shards["heads"])]
    mixing = {squeezed(shape) for shape in mixing}
    scattered = (*tokens, KV_HEADS // shards["heads"], HIDDEN // HEADS)

    def is_expected(c):
        shapes = [shape for _, shape in c.shapes]
        if c.axes == ("tensor",) and c.kind == "all-reduce":
            return all(s in activations or squeezed(s) in mixing for s in shapes)
        if c.axes == ("tensor",):
            return shapes == [{"reduce-scatter": scattered, "all-gather": state}.get(c.kind)]
        if c.axes == ("sequence",) and c.kind == "collective-permute":
            return True
        gathers = c.axes == ("fsdp",) and c.kind == "all-gather"
        sums = "tensor" not in c.axes and c.kind in ("all-reduce", "reduce-scatter")
        return (gathers or sums) and all(squeezed(s) in parameters | mixing for s in shapes)

    return [str(c) for c in found if not is_expected(c)]


CASES = {
    "fsdp_and_tensor": ({"fsdp": 2, "tensor": 2}, {"layers": 3}),
    "sequence": ({"sequence": 4}, {"scan_layers": False}),
    "mixed": ({"fsdp": 2, "sequence": 2, "tensor": 2}, {}),
    "mixed_unscanned": (
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"mix": "head_scale", "scan_layers": False, "attention_implementation": "chunked"},
    ),
    "recomputed": ({"fsdp": 2, "sequence": 4}, {"mix": "head_scale", "remat": "full"}),
    "recomputed_but_products": ({"fsdp": 2, "tensor": 2}, {"layers": 4, "remat": "dots"}),
    "experts": (
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"experts": Experts(3, balance=0.1, z=0.1), "remat": "dots"},
    ),
    "experts_fsdp": ({"fsdp": 8}, {"experts": Experts(3, per_token=1, normalize=False)}),
    "experts_unscanned": (
        {"fsdp": 2, "sequence": 2, "tensor": 2},
        {"experts": Experts(3, balance=0.1, z=0.1), "scan_layers": False},
    ),
    "tensor_and_sequence": ({"sequence": 2, "tensor": 4}, {"tie_embeddings": True}),
}


@pytest.mark.parametrize("name", mostly_slow(CASES, "fsdp_and_tensor"))
def test_loss_gradients_and_collectives(name):
    sizes, options = CASES[name]
    sharding = built(**sizes)
    error, found = run_on(sharding, **options)
    assert error < 1e-5
    assert unexpected(found, model_of(**options), sharding) == []
    kinds = {(c.kind, *c.axes) for c in found}
    if "fsdp" in sizes:
        assert ("all-gather", "fsdp") in kinds
    if name == "fsdp_and_tensor":
        # Kernels of blocks and head once in each direction, not kept in between; x's kernel of
        # each update, and the embedding, once.
        gathers = [c for c in found if (c.kind, *c.axes) == ("all-gather", "fsdp")]
        assert sum(c.times * len(c.shapes) for c in gathers) == 2 * (3 * 7 + 1) + 2 + 1
    if "sequence" in sizes:
        assert ("collective-permute", "sequence") in kinds
    # For each layer that updates its states: one sum of states per mixing and direction.
    mixings = 2 if options.get("mix", "heads") == "heads" else 1
    layers = options.get("layers", 2) - 1
    if "tensor" in sizes:
        for kind in ("reduce-scatter", "all-gather"):
            times = [c.times for c in found if c.kind == kind and c.axes == ("tensor",)]
            assert sum(times) == mixings * layers


def test_unexpected_collectives_are_seen():
    sharding = built(fsdp=2, tensor=2)

    @jax.jit
    def gathers(x):
        x = constrain(sharding, x, "batch", "sequence", "mlp")
        return constrain(sharding, jnp.sin(x), "batch")

    compiled = gathers.lower(jnp.zeros((B, T, WIDTH))).compile()
    found = unexpected(collectives(compiled.as_text(), sharding.mesh), model_of(), sharding)
    assert len(found) == 1
    assert found[0].startswith("all-gather over tensor of f32[4,16,48]")


HEADS_SPLIT = {"data": 2, "tensor": 2}
SPLIT = [(kind, HEADS_SPLIT) for kind in positions.registry]
SPLIT += [(kind, {"sequence": 2}) for kind in OF_EACH_SORT]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    mostly_slow(SPLIT, ("tape", {"sequence": 2}), ("tape", HEADS_SPLIT)),
    ids=str,
)
def test_every_encoding_can_be_split(kind, sizes):
    """Traced only; encodings that look at pairs of tokens cannot split sequences."""
    model = small_model(kind)
    sharding = built(rules=(("vocab", None),), **sizes)
    split = Transformer(model.config, sharding=sharding)
    sharding.check(split, batch_size=2, length=8)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    step = jax.grad(lambda v, x: split.apply(v, x).sum())
    pairs = {"bias", "logits", "weights"} & set(model.encoding.acts_on)
    if "sequence" in sizes and pairs and "decay" not in model.encoding.acts_on:
        why = f"the encoding '{kind}': .*'ring': (bias= speaks of pairs|[a-z]*_fn= is given rows)"
        with pytest.raises(NotImplementedError, match=why):
            jax.eval_shape(step, variables, tokens)
    else:
        jax.eval_shape(step, variables, tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "sizes"),
    [
        (positions.Tape(axes=2), {"sequence": 2}),
        (combined("rope+abacus", axes=2), {"sequence": 2}),
        (positions.RandomRope(range=64, each_layer=True), {"data": 2}),
        (positions.Tape(head_shift=2.0, degree=3, norm="rms"), {"sequence": 2}),
        (positions.Tape(head_shift=2.0, degree=3, norm="rms"), {"tensor": 2}),
        (positions.Rope(still_heads=1), {"sequence": 2}),
        (positions.Tape(still_heads=2), {"data": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_states_that_are_more_than_one_array_a_token(position, sizes):
    model, tokens = small_model(position, num_layers=2, num_heads=4), TOKENS % 13
    given = {}
    if model.encoding.coordinate_axes > 1:
        given["positions"] = np.stack(np.divmod(np.arange(T), 4), axis=-1)
    variables = random_variables(model)
    split = Transformer(model.config, sharding=built(rules=(("vocab", None),), **sizes))
    expected, found = (
        jax.jit(functools.partial(m.apply, **given))(variables, tokens) for m in (model, split)
    )
    np.testing.assert_allclose(found, expected, atol=1e-5 * max(1, float(jnp.abs(expected).max())))


@pytest.mark.slow
def test_drawn_positions_keep_the_order_of_their_tokens():
    model, tokens = small_model("tape", random_positions=RandomPositions(range=64)), TOKENS % 13
    variables = random_variables(model)
    split = Transformer(model.config, sharding=built(rules=(("vocab", None),), sequence=2))
    expected, found = (
        jax.jit(functools.partial(m.apply, rngs={"positions": jax.random.key(1)}))(
            variables, tokens
        )
        for m in (model, split)
    )
    np.testing.assert_allclose(found, expected, atol=1e-5 * max(1, float(jnp.abs(expected).max())))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tape+fox", "selective_rope+alibi", "mapformer_wm"])
def test_what_goes_along_time(kind):
    """Interleaved segments, whose sums and shifts start anew, have the values of one device."""
    model, tokens = small_model(kind, num_layers=2), TOKENS % 13
    ids = np.random.default_rng(2).integers(0, 3, (B, T))
    variables = random_variables(model)
    split = Transformer(model.config, sharding=built(rules=(("vocab", None),), sequence=4))
    expected, found = (
        jax.jit(functools.partial(m.apply, segment_ids=ids))(variables, tokens)
        for m in (model, split)
    )
    np.testing.assert_allclose(found, expected, atol=1e-5 * max(1, float(jnp.abs(expected).max())))


@pytest.mark.slow
def test_a_window_of_segments():
    """Where a sequence is split, indices measure them: a segment in pieces is NaN."""
    model, tokens = small_model("tape", num_layers=2, local_window_size=2), TOKENS % 13
    ids = np.sort(np.random.default_rng(2).integers(1, 4, (B, T)))
    ids[0, -1], ids[1, [0, -1]] = 1, 0
    variables = random_variables(model)
    for sizes in ({"sequence": 2}, {"data": 2, "tensor": 2}):
        split = Transformer(model.config, sharding=built(rules=(("vocab", None),), **sizes))
        expected, found = (
            jax.jit(functools.partial(m.apply, segment_ids=ids))(variables, tokens)
            for m in (model, split)
        )
        if "sequence" in sizes:
            assert np.isnan(found[0]).all()
            found, expected = found[1:], expected[1:]
        np.testing.assert_allclose(found, expected, atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.slow
@pytest.mark.parametrize("position", ["tape", "rope/tape"])
def test_recorded_states_positions_and_segments_keep_their_order(position):
    """All that is given and returned is in the order of the tokens, on a split sequence too."""
    sharding = built(sequence=2)
    config = dataclasses.replace(model_of(layers=6).config, position=position)
    model = Transformer(config)
    variables = random_variables(model)
    given = {
        "positions": np.arange(T) * 2 + 1,
        "segment_ids": np.sort(np.random.default_rng(1).integers(0, 3, (B, T))),
        "return_states": True,
    }
    expected = jax.jit(functools.partial(model.apply, **given))(variables, TOKENS)
    split = Transformer(model.config, sharding=sharding)
    found = jax.jit(functools.partial(split.apply, **given))(variables, TOKENS)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1, float(jnp.max(jnp.abs(y)))))


@pytest.mark.slow
def test_initial_values_do_not_depend_on_the_mesh():
    sharding = built(fsdp=2, tensor=2)
    model = model_of(sharding=sharding)
    init = functools.partial(model.init, tokens=jnp.zeros((1, 2), jnp.int32))
    key = jax.random.key(0)
    places = sharding.of(model, jax.eval_shape(init, key))
    split, whole = jax.jit(init, out_shardings=places)(key), jax.jit(init)(key)
    for x, y in zip(jax.tree.leaves(split), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(x, y)
    kernel = split["params"]["layers_0"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.spec == P(None, "fsdp", "tensor")
    assert kernel.addressable_shards[0].data.shape == (1, HIDDEN // 2, WIDTH // 2)


def test_optimizer_states_go_where_their_parameters_are():
    sharding = ShardingConfig(fsdp=2, tensor=2).build(4)
    model = model_of()
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    state = {"params": params, "moments": jax.eval_shape(optax.adam(1e-3).init, params)}
    places = sharding.of(model, {**state, "step": jax.ShapeDtypeStruct((), jnp.int32)})
    adam = places["moments"][0]
    assert adam.mu == adam.nu == places["params"]
    assert adam.mu["embedding"].spec == P("tensor", "fsdp")
    assert adam.count.spec == places["step"].spec == P()


def test_every_parameter_declares_its_axes():
    for options in ({}, {"tie_embeddings": True}, {"scan_layers": False}):
        parameters = model_of(**options).parameters()
        for path, (x, axes, _) in parameters.items():
            assert len(axes) == len(x.shape), path
            if path.endswith("kernel"):
                assert "embed" in axes
    assert parameters["layers_0/attention/k/kernel"].axes == ("embed", "kv_heads")
    assert model_of().parameters()["layers_0/position_up"].axes == ("layers", None, "kv_heads")


def test_table_of_parameters():
    """On a mesh without devices, as large as one likes."""
    sharding = preset("pod_slice", fsdp=8, data=-1, tensor=4).build(256)
    lines = sharding.table(model_of()).splitlines()
    assert lines[0] == "mesh: data=8, fsdp=8, sequence=1, tensor=4 (256 devices)"
    by_path = {line.split()[0]: line for line in lines[2:]}
    assert by_path["embedding"].split("  ")[-1].strip() == str(16 * 32 * 4 // 32)
    assert "1 x 32 x 48" in by_path["layers_0/mlp/up/kernel"]
    assert "layers, embed, mlp" in by_path["layers_0/mlp/up/kernel"]
    assert "-, fsdp, tensor" in by_path["layers_0/mlp/up/kernel"]
    total = sum(int(line.split()[-1].replace(",", "")) for line in lines[2:-1])
    assert lines[-1].split() == ["all", f"{total:,}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"experts": Experts(4, 2)}],
    ids=["dense", "mixture of experts"],
)
def test_a_lenient_mesh_takes_what_it_does_not_divide(options):
    model = model_of(**options)
    variables, tokens = random_variables(model), TOKENS[:3, :7]
    expected = jax.jit(model.apply)(variables, tokens)
    strict = built(fsdp=2, tensor=4)
    with pytest.raises(ValueError, match="batch = 3 is not a multiple of 2"):
        model_of(sharding=strict, **options).apply(variables, tokens)
    lenient = dataclasses.replace(strict, strict=False)
    split = model_of(sharding=lenient, **options)
    placed = jax.device_put(variables, lenient.of(split, variables))
    found = jax.jit(split.apply)(placed, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-5 * float(jnp.max(jnp.abs(expected))))
    assert lenient.spec(("batch", "heads"), (3, 8)) == P(None, "tensor")


def test_presets_and_meshes():
    assert {n: c.mesh_shape(8 if n != "device" else 1) for n, c in PRESETS.items()} == {
        "device": (1, 1, 1, 1),
        "host": (8, 1, 1, 1),
        "pod_slice": (1, 8, 1, 1),
    }
    mesh = ShardingConfig(data=2, tensor=-1).build().mesh
    assert dict(mesh.shape) == dict(zip(MESH_AXES, (2, 1, 1, 4), strict=True))
    # A config file may hold lists.
    config = ShardingConfig(rules=[["batch", ["data"]], ["vocab", None]])
    assert config == ShardingConfig(rules=(("batch", ("data",)), ("vocab", None)))
    assert hash(config.build(1)) == hash(config.build(1))
    # The first rule that names an axis counts; a mesh of one's own may lack axes.
    sharding = Sharding(Mesh(np.array(jax.devices()[:2]), ("data",)), (*config.rules, *RULES))
    assert sharding.spec(("batch", "heads", None), (4, 3, 2)) == P("data", None, None)


def test_shares_of_processes():
    """Of a batch in four parts, each on two devices."""
    hosts = np.array([[0, 0], [0, 0], [1, 1], [1, 1]])
    assert [process_share(hosts, p) for p in (0, 1)] == [(0, 2), (1, 2)]
    # Each host holds one half of the heads of all rows.
    assert process_share(np.array([[0, 1]] * 4), 1) == (0, 1)
    with pytest.raises(ValueError, match="equal or disjoint parts of a batch"):
        process_share(np.array([[0, 0], [0, 1], [1, 1], [1, 1]]), 0)
    assert built(data=2, tensor=2).share() == (0, 1)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ShardingConfig(data=0), "data must be a positive integer or -1; got 0"),
        (lambda: ShardingConfig(data=-1, fsdp=-1), "at most one axis may be -1"),
        (lambda: ShardingConfig(tensor=3).build(), "tensor=3 needs 3 devices; got 8"),
        (lambda: ShardingConfig(tensor=3, data=-1).build(8), "a multiple of 3 devices; got 8"),
        (lambda: ShardingConfig(rules=("vocab",)), "a rule is a pair"),
        (lambda: ShardingConfig(rules=(("vocab", 3),)), r"a rule is a pair .*got \('vocab', 3\)"),
        (
            lambda: ShardingConfig(rules=(("vocab", "tenser"),)),
            r"for 'vocab' 'tenser'.*did you mean 'tensor'",
        ),
        (lambda: preset("pod"), "unknown sharding preset 'pod'"),
    ],
)
def test_wrong_configs(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()


@pytest.mark.parametrize(
    ("config", "step", "problem"),
    [
        (ShardingConfig(rules=(("vocabulary", None),)), (8, 16), "'vocabulary' matches no axis"),
        (
            ShardingConfig(data=2, rules=(("mlp", "fsdp"),)),
            (8, 16),
            "mlp/down/kernel .*'mlp' and 'embed' both on the mesh axis 'fsdp'",
        ),
        (ShardingConfig(data=3), (8, 16), "batch = 8 is not a multiple of 3"),
        (ShardingConfig(sequence=3), (8, 16), "sequence = 16 is not a multiple of 6.*two chunks"),
        (ShardingConfig(tensor=8), (8, 16), "kv_heads = 4 is not a multiple of 8"),
        (ShardingConfig(fsdp=5), (5, 16), "embedding .*'embed' into 5 parts.*do not divide 32"),
    ],
)
def test_what_does_not_fit_a_model(config, step, problem):
    sizes = (config.data, config.fsdp, config.sequence, config.tensor)
    sharding = config.build(math.prod(sizes))
    with pytest.raises(ValueError, match=problem):
        sharding.check(model_of(), batch_size=step[0], length=step[1])


@pytest.mark.slow
def test_wrong_calls_on_a_mesh():
    """Told from the shapes, before anything is compiled."""
    sharding = built(data=2, sequence=2)
    model = model_of(sharding=sharding)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))

    def trace(model, shape, **call):
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        return jax.eval_shape(functools.partial(model.apply, **call), variables, tokens)

    with pytest.raises(ValueError, match="batch = 3 is not a multiple of 2"):
        trace(model, (3, T))
    with pytest.raises(ValueError, match="sequence = 10 is not a multiple of 4"):
        trace(model, (2, 10))
    with pytest.raises(ValueError, match=r"must have shape \[B, T\]; got shape \(16,\)"):
        trace(model, (T,))
    with pytest.raises(ValueError, match="neither a cache nor an initial_state"):
        trace(model, (B, 4), cache=init_cache(model, B, 8))
    with pytest.raises(
        ValueError, match="needs attention_implementation=None or 'ring'; got 'chunked'"
    ):
        trace(model_of(sharding=sharding, attention_implementation="chunked"), (B, T))
    for kind in ("kerple", "tape+kerple", "cope"):
        pairs = Transformer(small_model(positions.create(kind)).config, sharding=sharding)
        params = jax.eval_shape(pairs.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
        told = rf"the encoding '{re.escape(kind)}': attention implementation 'ring': "
        with pytest.raises(NotImplementedError, match=told):
            jax.eval_shape(pairs.apply, params, jax.ShapeDtypeStruct((B, T), jnp.int32))
    with pytest.raises(ValueError, match="no attention maps"):
        trace(model, (B, T), mutable=["maps"])
    with pytest.raises(ValueError, match="the mesh splits 'batch' into 2 parts"):
        sharding.place(np.zeros((3, 4), np.int32))
