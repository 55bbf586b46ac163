"""The public attention call: what is wrong, refused and planned, and shapes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tape_jax._src.attention import attention, attention_plan
from tape_jax._src.attention.normalize import normalize
from tests.selection import mostly_slow

T, H, D = 6, 4, 8


def arrays(**changes):
    """A right call, some of it changed: tuples of integers are shapes, None leaves one out."""
    given = {"q": (2, T, H, D), "k": (2, T, 2, D), "v": (2, T, 2, D), "state": (2, T, 2, D)}

    def array(x):
        is_shape = isinstance(x, tuple) and all(isinstance(n, int) for n in x)
        return jnp.ones(x) if is_shape else x

    return {name: array(x) for name, x in {**given, **changes}.items() if x is not None}


INTS = np.zeros((2, T), np.int32)
ONES, BOOLS = np.ones((2, T)), np.ones((T, T), bool)
OWN = {"query_state": (2, T, 2, D)}
SHORT = {"q": (2, 3, H, D), "query_state": (2, 3, 2, D)}
TENSOR = (2, T, 2, 4, 2, 3)
LONG = np.array([2**32, -5])
FLOAT8 = {name: jnp.asarray(x, jnp.float8_e4m3fn) for name, x in arrays().items()}

# What the message must hold, and what is changed.
WRONG = [
    (r"\[batch..., time, heads, head_dim\].*\(6, 8\)", dict.fromkeys("qkv", (T, D))),
    (r"\(2, 6, 4, 8\).*\(6, 2, 8\)", {"k": (T, 2, D)}),
    ("batch axes.*disagree", {"k": (3, T, 2, D)}),
    ("k and v must agree", {"v": (2, 5, 2, D)}),
    ("must not be empty", {"k": (2, 0, 2, D), "v": (2, 0, 2, D)}),
    ("4 query heads, 3 key/value heads", {**dict.fromkeys("kv", (2, T, 3, D)), "state": None}),
    ("q must be floating.*int", {"q": jnp.ones((2, T, H, D), int)}),
    ("must be floating-point, float32, .*; got float8_e4m3fn", FLOAT8),
    ("q must be an array of numbers; got 'x'", {"q": "x"}),
    (r"head dimension 8; .*k \(2, 6, 2, 6\)", {"k": (2, T, 2, 6)}),
    (
        r"head dimension 12 \(rotated\)",
        {"state": TENSOR, "query_state": TENSOR, "keys_rotated": True},
    ),
    # States.
    ("even.*head dimension 7", {"q": (2, T, H, 7), **dict.fromkeys(("k", "state"), (2, T, 2, 7))}),
    ("h = 1, 2; give num_kv_heads=2 to init_update", {"state": (2, T, 4, D)}),
    (r"state of shape \(6, 2, 8\) does not fit k .*batch axes full or 1", {"state": (T, 2, D)}),
    ("state must be a floating", {"state": jnp.ones((2, T, 2, D), int)}),
    (r"M \* L = 8", {"state": (2, T, 2, 3, 2, 2)}),
    ("one form", {"query_state": TENSOR}),
    ("query_state is required.*differ in length", {"q": (2, 3, H, D)}),
    ("query_state without state", {"state": None, **OWN}),
    ("keys_rotated=True needs", {"keys_rotated": True}),
    ("query_state must be an array of numbers; got 'x'", {"query_state": "x"}),
    # What is visible.
    ("segment_ids must be integers.*float32", {"segment_ids": ONES}),
    (r"expected shape \(2, 6\).*got \(2, 5\)", {"segment_ids": INTS[:, :5]}),
    ("tuple.*3 queries, 6 keys", {**SHORT, "segment_ids": INTS}),
    ("tuple of two, queries' and keys'; got a list", {"segment_ids": [INTS, INTS]}),
    ("segment_ids must fit in 32 bits: .*4294967297", {"segment_ids": [2**32 + 1] * T}),
    ("an integer from 0 on, or a pair .* got -1", {"local_window_size": -1}),
    (
        "of queries and keys must be of one type.*int32 and uint32",
        {"local_window_size": 1, "window_positions": (INTS, INTS.astype(np.uint32))},
    ),
    (r"shape \(2,\), one a row; got int32 of shape \(3,\)", {"query_seq_lengths": INTS[0, :3]}),
    ("mask must be boolean", {"mask": np.ones((T, T))}),
    ("mask must broadcast", {"mask": np.ones((5, T), bool)}),
    (r"mask\[:, None, None, :\] .*; segment_ids= hides", {"mask": BOOLS[:2]}),
    ("query_offset must be an integer.*bool", {"query_offset": True}),
    ("query_offset must be an integer .*float32", {"query_offset": 1.5}),
    (r"or one a row, \(2,\); got shape \(2, 6\)", {"query_offset": INTS}),
    (r"below 2\*\*31; got 6, 6 and 2147483636", {"query_offset": 2**31 - 12}),
    (
        r"below 2\*\*31; got 6, 6 and -1073741824 to 1073741824",
        {"query_offset": np.array([-(2**30), 2**30]), "local_window_size": 2**31},
    ),
    ("must fit in int32, .* values from -5 to 4294967296", {"query_offset": LONG}),
    # Biases and numbers.
    ("log_decay must be floating-point; got int", {"log_decay": jnp.ones((2, T, H), int)}),
    (r"log_decay: expected shape \(2, 6, 4\), one .*; got \(2, 6\)", {"log_decay": (2, T)}),
    (r"log_decay: expected .*; got \(2, 6, 2\)", {"log_decay": (2, T, 2)}),
    (
        r"key log_decay: expected shape \(2, 6, 4\).*got \(5, 4\)",
        {"log_decay": (np.ones((T, H)), np.ones((5, H)))},
    ),
    (r"bias must broadcast to .*\(2, 4, 6, 6\); got \(3, 6, 6\)", {"bias": (3, T, T)}),
    ("use mask", {"bias": BOOLS}),
    ("bias function must be floating-point .*got bool", {"bias": lambda i, j: j <= i[:, None]}),
    ("logit_softcap must be a positive .*; got 0", {"logit_softcap": 0}),
    ("scale must be a finite number, .*; got nan", {"scale": np.nan}),
    # How it is computed.
    ("keys_rotated must be True or False, .*; got 'no'", {"keys_rotated": "no"}),
    ("sharding must be of the type Sharding or No", {"sharding": "x"}),
    ("must be a name, several or None; got 3", {"implementation": 3}),
    ("must be a name, several or None; got <", {"implementation": iter(["chunked"])}),
    ("did you mean 'chunked'", {"implementation": "chunky"}),
    (
        "unknown option .*'chunked' 'block'.*did you mean",
        {"implementation": "chunked", "options": {"block": 4}},
    ),
    ("one implementation; got implementation=None", {"options": {"block_q": 4}}),
    (
        r"options must be .*Mapping; got \['block_q'\]",
        {"implementation": "chunked", "options": ["block_q"]},
    ),
    *(
        (
            "block_q must be a positive .*; got 0",
            {"implementation": name, "options": {"block_q": 0}},
        )
        for name in ("chunked", "query_blocks", "rows")
    ),
]


@pytest.mark.parametrize(("message", "changes"), WRONG)
def test_wrong_calls(message, changes):
    with pytest.raises(ValueError, match=message):
        attention(**arrays(**changes))


def test_traced_scalars_are_named():
    with pytest.raises(ValueError, match=r"scale must be .*, known when the call is compiled"):
        jax.jit(lambda x: attention(**arrays(), scale=x))(0.5)


@pytest.mark.parametrize("window", mostly_slow([2**31 - 1, 2**40], 2**31 - 1))
def test_a_window_may_be_wider_than_32_bits(window):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, T, 1, D)), jnp.float32)

    def attend(offset, **keywords):
        call = {"query_offset": offset, "is_causal": True, **keywords}
        return jax.jit(lambda x: attention(x, x, x, **call)[0])(x)

    want = attend(3, implementation="reference")
    for name in ("reference", "chunked"):
        found = attend(3, implementation=name, local_window_size=window)
        np.testing.assert_allclose(found, want, atol=1e-6)
    traced = jax.jit(lambda o: attend(o, local_window_size=window))
    np.testing.assert_allclose(traced(jnp.int32(3)), want, atol=1e-6)


@pytest.mark.parametrize("offset", [2**30 + 5, -(2**30) - 5])
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_a_wide_window_hides_nothing_far_away(implementation, offset):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, T, 1, D)), jnp.float32)
    call = {"query_offset": offset, "implementation": implementation}
    found = attention(x, x, x, **call, local_window_size=2**31)[0]
    np.testing.assert_allclose(found, attention(x, x, x, **call)[0], atol=1e-6)


def test_named_implementation_never_falls_back():
    call = arrays() | {"mask": jnp.ones((T, T), bool), "implementation": "splash"}
    with pytest.raises(NotImplementedError, match="'splash': mask="):
        attention(**call, interpret=True)
    plan = attention_plan(**call, interpret=True)
    assert plan.implementation is None
    assert list(plan.rejected) == ["splash"]


def test_a_parameter_of_nnx_as_bias_is_an_array():
    """It can be called as well."""
    table = jax.random.normal(jax.random.key(0), (H, T, T))

    def total(bias):
        return attention(**arrays() | {"bias": bias})[0].sum()

    found, wanted = total(nnx.Param(table)), total(table)
    np.testing.assert_array_equal(found, wanted)
    assert attention_plan(**arrays() | {"bias": nnx.Param(table)}).implementation is not None


def test_a_module_as_bias_is_a_function():
    class Line(nnx.Module):
        dtype = jnp.float32

        def __call__(self, i, j):
            return jnp.float32(0.1) * (j - i[:, None])

    found, _ = attention(**arrays() | {"bias": Line()})
    wanted, _ = attention(**arrays() | {"bias": Line()(jnp.arange(T), jnp.arange(T))})
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_function_as_bias_has_the_same_queries_in_all_rows():
    call = arrays() | {"bias": lambda i, j: 0.1 * (i[:, None] - j)}
    for offset in (3, jnp.array(3), jnp.array([3])):
        jax.eval_shape(functools.partial(attention, **call, query_offset=offset))
    with pytest.raises(NotImplementedError, match=r"with one query_offset a row .* jax\.vmap"):
        attention(**call, query_offset=jnp.array([3, 4]))


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def test_plan_checks_shapes_without_arrays():
    with pytest.raises(ValueError, match="mask must broadcast"):
        attention_plan(**abstract(arrays(mask=np.ones((5, T), bool))))


def test_plan_of_shapes_is_that_of_arrays():
    """A call too large to be made is planned; an integer offset stays known, a traced one not."""
    keywords = arrays() | {"mask": jnp.ones((T, T), bool)}
    assert attention_plan(**abstract(keywords)) == attention_plan(**keywords)
    x = jax.ShapeDtypeStruct((8, 2**20, 32, 128), "bfloat16")
    assert attention_plan(x, x, x, state=x, is_causal=True).implementation == "chunked"
    splash = {"implementation": "splash", "interpret": True, "is_causal": True}
    assert attention_plan(x, x, x, query_offset=3, **splash).implementation == "splash"
    traced = jax.ShapeDtypeStruct((), "int32")
    assert attention_plan(x, x, x, query_offset=traced, **splash).implementation is None


def test_plan_takes_scalars_of_numpy_and_jax():
    given = {"local_window_size": np.int64(4), "is_causal": np.bool_(True)}
    for scale in (np.float32(0.5), jnp.float32(0.5)):
        plan = attention_plan(**arrays(), **given, scale=scale, query_offset=np.array(0))
        assert plan.implementation == "reference"


def test_states_of_queries_are_not_repeated():
    """Backends broadcast a state over the query heads that share it."""
    state = jnp.ones((2, T, 2, D))
    assert normalize(**arrays(), query_state=state).query_state.shape == state.shape


def test_unattended_state_costs_nothing():
    """attend_state=False multiplies values of width D only, as state=None does."""

    def flops(**keywords):
        x = jnp.zeros((1, 64, 1, 64))
        f = jax.jit(lambda x: attention(x, x, x, **keywords, implementation="reference")[0])
        return f.lower(x).compile().cost_analysis()["flops"]

    state = jnp.zeros((64, 64))
    products = 2 * 64**3
    plain, unattended = flops(), flops(state=state, attend_state=False)
    assert unattended - plain < products / 4
