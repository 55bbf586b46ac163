"""Attention around a ring of simulated devices against attention on one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from tape_jax._src.attention import attention, attention_plan, chunked, ring, zigzag
from tape_jax._src.attention.visibility import Band
from tape_jax.sharding import ShardingConfig
from tests.library.attention import cases
from tests.library.attention.backends import assert_close, jit, qkve, run
from tests.selection import mostly_slow
from train.analysis.collectives import collectives

B, T, D = 2, 48, 8


def mesh_of(**sizes):
    config = ShardingConfig(**sizes)
    return config.build(jax.devices()[: int(np.prod(list(sizes.values())))])


def assert_as_on_one_device(found, case, tolerance):
    with jax.enable_x64(True):
        expected = run(case, "float64", implementation="reference")
    assert_close(found, expected, tolerance)


Case = functools.partial(cases.Case, queries=T)
CASES = [
    (
        {"sequence": 2},
        Case("one_headed", heads=4, state_heads=1, query_state=True, segments="same"),
    ),
    ({"sequence": 4}, Case("window", local_window_size=6)),
    ({"sequence": 8}, Case("all_keys", state_heads=1, is_causal=False, segments="pair")),
    (
        {"sequence": 2},
        Case(
            "decay", heads=4, log_decay="same", segments="same", local_window_size=29, softcap=0.4
        ),
    ),
    (
        {"sequence": 4, "tensor": 2},
        Case("decay_on_four", heads=4, log_decay="mixed", is_causal=False),
    ),
    (
        {"data": 2, "sequence": 2, "tensor": 2},
        Case("decay_of_shared_keys", heads=4, kv_heads=1, form=None, log_decay="pair"),
    ),
]


@pytest.mark.parametrize(("sizes", "case"), mostly_slow(CASES, CASES[3]), ids=str)
@pytest.mark.usefixtures("x64")
def test_equals_one_device(sizes, case):
    if case.name == "window":
        # Asked for by name, in a context of jax's own.
        mesh = jax.make_mesh((sizes["sequence"],), ("sequence",), (AxisType.Auto,))
        with jax.set_mesh(mesh):
            found = run(case, "float64", implementation="ring")
    else:
        found = run(case, "float64", sharding=mesh_of(**sizes))
    assert_as_on_one_device(found, case, 1e-10)


@pytest.mark.slow
def test_gradients_do_not_round_with_large_logits():
    """Logits are exact in float32, and shifted by 2**20."""
    q, k, v, _ = qkve(T, dim=D)
    q, k = (jnp.round(2 * x) for x in (q, k))
    q, k = q.at[..., -1].set(2.0**22), k.at[..., -1].set(1)

    @functools.partial(jit, static_argnums=0)
    def output_and_gradient(call):
        call = {"is_causal": True, "scale": 0.25, **dict(call)}
        o, pull = jax.vjp(lambda v: attention(q, k, v, **call)[0], v)
        return o, pull(jnp.cos(o))

    expected = output_and_gradient((("implementation", "reference"),))
    found = output_and_gradient((("sharding", mesh_of(sequence=2)),))
    assert_close(*jax.device_get((found, expected)), 1e-5)


@pytest.mark.slow
def test_zigzag_order_tensor_states_and_other_axes_in_float32():
    """Inputs that come in zigzag order; batch and heads are split too."""
    sharding = mesh_of(data=2, sequence=2, tensor=2)

    def in_zigzag(*qkv, state, **keywords):
        *qkv, state = (zigzag.to_zigzag(sharding, x, 1) for x in (*qkv, state))
        out = attention(*qkv, state=state, **keywords)
        return tuple(zigzag.from_zigzag(sharding, x, 1) for x in out)

    case = Case("tensor", heads=4, form="tensor")
    options = {"order": "zigzag", "block_q": 8, "block_k": 5}
    ring = {"implementation": "ring", "sharding": sharding, "options": options}
    found = run(case, "float32", function=in_zigzag, **ring)
    assert_as_on_one_device(found, case, 1e-5)


@pytest.mark.parametrize("devices", [2, 8])
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
    arrays = dict(zip(("q", "k", "v", "state"), qkve(1024, dim=D), strict=True))
    memory = {}
    for devices in (2, 4):
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


UNEVEN = ShardingConfig(sequence=2, tensor=2, rules=(("kv_heads", None),)).build(4)
LENIENT = dataclasses.replace(mesh_of(sequence=2, tensor=4), strict=False)


def test_a_lenient_mesh_leaves_whole_heads_that_it_does_not_divide():
    case = Case("whole", heads=3, kv_heads=1, state_heads=1)
    found = run(case, "float32", implementation="ring", sharding=LENIENT)
    assert_as_on_one_device(found, case, 1e-5)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ({"sharding": None}, NotImplementedError, r"needs a mesh that splits.*jax\.set_mesh"),
        ({"bias": jnp.zeros((T, T))}, NotImplementedError, "bias= speaks of pairs"),
        ({"mask": jnp.ones((T, T), bool)}, NotImplementedError, "mask= speaks of pairs"),
        ({"query_offset": 1}, NotImplementedError, "query_offset = 1"),
        ({"options": {"order": "zigzig"}}, ValueError, "unknown order of ring attention 'zigzig'"),
        ({"options": {"block_q": -4}}, ValueError, "block_q must be a positive integer"),
        ({"sharding": UNEVEN}, ValueError, "split 2 heads are tensor, 2 kv_heads None"),
        (
            {"sharding": LENIENT, "q": jnp.zeros((B, T, 4, D))},
            ValueError,
            "split 4 heads are tensor, 2 kv_heads None",
        ),
        (
            {"sharding": mesh_of(data=4, sequence=2)},
            ValueError,
            r"'batch' into 4 parts .*, which do not divide 2",
        ),
        (
            dict.fromkeys("qkv", jnp.zeros((B, 44, 2, D))),
            ValueError,
            "must be a multiple of 8; got 44",
        ),
    ],
)
def test_refusals(call, error, words):
    arrays = dict.fromkeys("qkv", jnp.zeros((B, T, 2, D)))
    with pytest.raises(error, match=words):
        attention(**arrays | {"implementation": "ring", "sharding": mesh_of(sequence=4), **call})


def test_is_chosen_where_the_sequence_is_split():
    x = jax.ShapeDtypeStruct((B, T, 2, D), jnp.float32)
    sharding = mesh_of(sequence=2)
    assert attention_plan(x, x, x, state=x, sharding=sharding).implementation == "ring"
    mask = jax.ShapeDtypeStruct((T, T), jnp.bool_)
    plan = attention_plan(x, x, x, state=x, mask=mask, sharding=sharding)
    assert plan.implementation == "reference"
    assert "different devices" in plan.rejected["ring"]
    assert "ring" not in attention_plan(x, x, x, state=x, sharding=mesh_of(data=2)).rejected
