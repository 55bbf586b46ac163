"""Attention around a ring of simulated devices against attention on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tape_jax._src.attention import attention, attention_plan, chunked, ring, zigzag
from tape_jax._src.attention.visibility import Band
from tape_jax.sharding import ShardingConfig
from tests.selection import mostly_slow
from train.analysis.collectives import collectives

B, T, D, DV = 2, 48, 8, 6


def mesh_of(**sizes):
    config = ShardingConfig(**sizes)
    return config.build(jax.devices()[: int(np.prod(list(sizes.values())))])


def inputs(heads=2, kv_heads=2, state=(2, D), query_state=False, length=T, log_decay=None):
    """Float64 arrays that get gradients, by name; ``state`` is the tail of the state, or None.

    ``log_decay`` is its heads, or those of the queries and of the keys.
    """
    rng = np.random.default_rng(0)
    shapes = {"q": (heads, D), "k": (kv_heads, D), "v": (kv_heads, DV)}
    shapes |= {} if state is None else {"state": state}
    shapes |= {"query_state": (heads, D)} if query_state else {}
    arrays = {name: rng.normal(size=(B, length, *tail)) for name, tail in shapes.items()}
    if isinstance(log_decay, tuple):
        arrays["log_decay"] = tuple(4 * rng.normal(size=(1, length, n)) for n in log_decay)
    elif log_decay is not None:
        arrays["log_decay"] = -np.cumsum(rng.random(size=(B, length, log_decay)), axis=1)
    return arrays


def outputs_and_gradients(arrays, dtype=jnp.float64, wrap=lambda x: x, unwrap=lambda x: x, **call):
    """``(o, a)`` and the gradients of a scalar of them to all arrays."""

    @jax.jit
    def run(arrays):
        def loss(arrays):
            out = attention(**jax.tree.map(wrap, arrays), **call)
            out = [unwrap(x) for x in out if x is not None]
            weights = [jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in out]
            return sum(jnp.sum(x * w) for x, w in zip(out, weights, strict=True)), out

        gradients, out = jax.grad(loss, has_aux=True)(arrays)
        return out, gradients

    return jax.device_get(run(jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays)))


def largest_error(found, expected):
    """Of all arrays, each divided by its largest value where that exceeds 1."""

    def error(x, y):
        return np.max(np.abs(x - y)) / max(1, np.max(np.abs(y)))

    return max(jax.tree.leaves(jax.tree.map(error, found, expected)))


SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 3, size=(B, T)))
CASES = {
    # mesh, shapes, keywords
    "grouped_segments_one_headed": (
        {"sequence": 2},
        {"heads": 4, "state": (1, D), "query_state": True},
        {"segment_ids": SEGMENTS},
    ),
    "window": ({"sequence": 4}, {}, {"local_window_size": 6}),
    "bidirectional": (
        {"sequence": 8},
        {"state": (1, D)},
        {"is_causal": False, "segment_ids": (SEGMENTS, SEGMENTS[:1])},
    ),
    "multi_query": (
        {"sequence": 4, "tensor": 2},
        {"state": None, "heads": 4, "kv_heads": 1},
        {"scale": 0.3},
    ),
    "decay": (
        {"sequence": 2},
        {"heads": 4, "log_decay": 4},
        {"segment_ids": SEGMENTS, "local_window_size": 29, "logit_softcap": 0.4},
    ),
    "decay_on_four": (
        {"sequence": 4, "tensor": 2},
        {"heads": 4, "log_decay": (1, 4)},
        {"is_causal": False},
    ),
    "decay_of_shared_keys": (
        {"data": 2, "sequence": 2, "tensor": 2},
        {"heads": 4, "kv_heads": 1, "state": None, "log_decay": (4, 1)},
        {},
    ),
}


@pytest.mark.parametrize("name", mostly_slow(CASES, "decay"))
@pytest.mark.usefixtures("x64")
def test_equals_one_device(name):
    sizes, shapes, call = CASES[name]
    arrays, call = inputs(**shapes), {"is_causal": True, **call}
    expected = outputs_and_gradients(arrays, implementation="reference", **call)
    if name == "window":
        # Asked for by name, in a context of jax's own.
        mesh = jax.make_mesh((sizes["sequence"],), ("sequence",), (AxisType.Auto,))
        with jax.set_mesh(mesh):
            found = outputs_and_gradients(arrays, implementation="ring", **call)
    else:
        found = outputs_and_gradients(arrays, sharding=mesh_of(**sizes), **call)
    assert largest_error(found, expected) < 1e-10


@pytest.mark.slow
def test_gradients_do_not_round_with_large_logits():
    """Logits are exact in float32, and shifted by 2**20."""
    arrays = inputs(state=None)
    arrays |= {name: np.round(2 * arrays[name]) for name in ("q", "k")}
    arrays["q"][..., -1], arrays["k"][..., -1] = 2.0**22, 1
    call = {"is_causal": True, "scale": 0.25}
    expected = outputs_and_gradients(arrays, jnp.float32, implementation="reference", **call)
    found = outputs_and_gradients(arrays, jnp.float32, sharding=mesh_of(sequence=2), **call)
    assert largest_error((found[0], found[1]["v"]), (expected[0], expected[1]["v"])) < 1e-5


@pytest.mark.slow
def test_zigzag_order_tensor_states_and_other_axes_in_float32():
    """Inputs that come in zigzag order; batch and heads are split too."""
    sharding = mesh_of(data=2, sequence=2, tensor=2)
    arrays = inputs(heads=4, state=(2, D // 2, 2, 3))
    expected = outputs_and_gradients(
        arrays, jnp.float32, is_causal=True, implementation="reference"
    )
    found = outputs_and_gradients(
        arrays,
        jnp.float32,
        is_causal=True,
        implementation="ring",
        sharding=sharding,
        options={"order": "zigzag", "block_q": 8, "block_k": 5},
        wrap=lambda x: zigzag.to_zigzag(sharding, x, 1),
        unwrap=lambda x: zigzag.from_zigzag(sharding, x, 1),
    )
    assert largest_error(found, expected) < 1e-5


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_zigzag_gives_each_device_both_ends(devices):
    sharding = mesh_of(sequence=devices)
    tokens = jnp.arange(2 * 2 * devices).reshape(2, -1)
    chunks = [x for d in range(devices) for x in (d, 2 * devices - 1 - d)]
    held = zigzag.to_zigzag(sharding, tokens, 1)
    np.testing.assert_array_equal(held[0], chunks)
    np.testing.assert_array_equal(zigzag.from_zigzag(sharding, held, 1), tokens)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_causal_work_is_equal_at_every_step(devices):
    """Of the pairs of chunks that meet at a step, as many are visible on every device."""
    blocks = chunked.Blocks(4, 4, 4, 4, groups=1, scale=1.0)
    band = Band(is_causal=True)
    found = ring._Ring(("sequence",), devices, True, False, band, blocks)
    for hop in range(devices):
        visible = [
            sum(
                int(found.chunk(here, a)) >= int(found.chunk((here - hop) % devices, b))
                for a, b in found.pairs().tolist()
            )
            for here in map(jnp.int32, range(devices))
        ]
        assert visible == [3 if hop == 0 else 2] * devices


@pytest.mark.slow
def test_memory_falls_with_devices_and_only_permutations_are_needed():
    arrays = {n: jnp.asarray(x, jnp.float32) for n, x in inputs(length=1024).items()}
    memory = {}
    for devices in (2, 4, 8):
        sharding = mesh_of(sequence=devices)

        def loss(arrays, sharding=sharding):
            # Small blocks, so that what is kept of the sequence dominates.
            options = {"order": "zigzag", "block_q": 16, "block_k": 16}
            o, a = attention(
                **arrays, is_causal=True, implementation="ring", sharding=sharding, options=options
            )
            return jnp.sum(o**2) + jnp.sum(a**2)

        placed = sharding.place(arrays)
        kept = {name: x.sharding for name, x in placed.items()}
        step = jax.jit(jax.grad(loss), out_shardings=kept)
        compiled = step.lower(placed).compile()
        memory[devices] = compiled.memory_analysis().temp_size_in_bytes
        found = collectives(compiled.as_text(), sharding.mesh)
        assert {x.kind for x in found} == {"collective-permute"}
        assert {x.axes for x in found} == {("sequence",)}
        # Keys, values and states hop devices - 1 times in each direction, gradients devices times.
        # Between two devices both directions can share the only hop.
        if devices > 2:
            assert sum(x.times for x in found) == 3 * (devices - 1) * 2 + 3 * devices
    assert memory[4] < 0.6 * memory[2]
    assert memory[8] < 0.6 * memory[4]


def test_refusals():
    q = jnp.zeros((B, T, 2, D))
    sharding = mesh_of(sequence=4)
    named = {"implementation": "ring", "sharding": sharding}
    with pytest.raises(NotImplementedError, match=r"needs a mesh that splits.*jax\.set_mesh"):
        attention(q, q, q, implementation="ring")
    for call, problem in (
        ({"bias": jnp.zeros((T, T))}, "bias= speaks of pairs"),
        ({"mask": jnp.ones((T, T), bool)}, "mask= speaks of pairs"),
        ({"query_offset": 1}, "query_offset = 1"),
    ):
        with pytest.raises(NotImplementedError, match=problem):
            attention(q, q, q, **named, **call)
    with pytest.raises(ValueError, match="must be a multiple of 8; got 44"):
        attention(*[q[:, :44]] * 3, **named)
    with pytest.raises(ValueError, match="unknown order of ring attention 'zigzig'"):
        attention(q, q, q, **named, options={"order": "zigzig"})
    uneven = ShardingConfig(sequence=2, tensor=2, rules=(("kv_heads", None),)).build(4)
    with pytest.raises(ValueError, match=r"heads on \('tensor',\) and kv_heads on \(\)"):
        attention(q, q, q, implementation="ring", sharding=uneven)
    split = mesh_of(data=4, sequence=2)
    with pytest.raises(ValueError, match=r"'batch' into 4 parts .*, which do not divide 2"):
        attention(q, q, q, implementation="ring", sharding=split)


def test_is_chosen_where_the_sequence_is_split():
    x = jax.ShapeDtypeStruct((B, T, 2, D), jnp.float32)
    sharding = mesh_of(sequence=2)
    assert attention_plan(x, x, x, state=x, sharding=sharding).implementation == "ring"
    mask = jax.ShapeDtypeStruct((T, T), jnp.bool_)
    plan = attention_plan(x, x, x, state=x, mask=mask, sharding=sharding)
    assert plan.implementation == "reference"
    assert "different devices" in plan.rejected["ring"]
    assert "ring" not in attention_plan(x, x, x, state=x, sharding=mesh_of(data=2)).rejected
