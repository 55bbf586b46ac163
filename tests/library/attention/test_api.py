"""The public attention call: what is wrong, refused and planned, and shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax._src.attention import attention, attention_plan
from tape_jax._src.attention.normalize import normalize

T, H, D = 6, 4, 8


def arrays(**shapes):
    """Float arrays of the given shapes; q, k, v and state have defaults, None leaves one out."""
    defaults = {"q": (2, T, H, D), "k": (2, T, 2, D), "v": (2, T, 2, D), "state": (2, T, 2, D)}
    shapes = {**defaults, **shapes}
    return {name: jnp.ones(shape) for name, shape in shapes.items() if shape is not None}


INTS = np.zeros((2, T), np.int32)

# name: (keywords, what the message must hold).
WRONG = {
    "no_heads_axis": (
        {"q": jnp.ones((T, D)), "k": jnp.ones((T, D)), "v": jnp.ones((T, D))},
        r"\[batch..., time, heads, head_dim\].*\(6, 8\)",
    ),
    "axes_disagree": (arrays(k=(T, 2, D)), r"\(2, 6, 4, 8\).*\(6, 2, 8\)"),
    "batch_disagrees": (arrays(k=(3, T, 2, D)), "batch axes.*disagree"),
    "k_v_lengths": (arrays(v=(2, 5, 2, D)), "k and v must agree"),
    "k_v_heads": (arrays(v=(2, T, 1, D)), "k and v must agree"),
    "empty": (arrays(k=(2, 0, 2, D), v=(2, 0, 2, D)), "must not be empty"),
    "heads_not_divisible": (
        arrays(k=(2, T, 3, D), v=(2, T, 3, D), state=None),
        "multiple of key/value heads.*4 query heads, 3 key/value heads",
    ),
    "integer_q": ({**arrays(), "q": jnp.ones((2, T, H, D), int)}, "q must be floating.*int"),
    "odd_head_dim": (
        arrays(q=(2, T, H, 7), k=(2, T, 2, 7), state=(2, T, 2, 7)),
        "even.*head dimension 7",
    ),
    "key_width": (arrays(k=(2, T, 2, 6)), r"head dimension 8; .*k \(2, 6, 2, 6\)"),
    "rotated_key_width": (
        arrays(k=(2, T, 2, 6), query_state=(2, T, 2, D)) | {"keys_rotated": True},
        r"head dimension 8 \(rotated\)",
    ),
    "tensor_rotated_key_width": (
        arrays(state=(2, T, 2, 4, 2, 3), query_state=(2, T, 2, 4, 2, 3)) | {"keys_rotated": True},
        r"head dimension 12 \(rotated\)",
    ),
    "state_length": (
        arrays(state=(2, 5, 2, D)),
        r"state of shape \(2, 5, 2, 8\).*k of shape \(2, 6, 2, 8\)",
    ),
    "state_heads": (arrays(state=(2, T, 3, D)), "state of shape.*does not fit.*h = 1, 2(?!;)"),
    "state_query_heads": (
        arrays(state=(2, T, 4, D)),
        "h = 1, 2; give num_kv_heads=2 to init_update or UpdateState",
    ),
    "heads_before_time": (
        arrays(q=(2, H, T, D), k=(2, H, T, D), v=(2, H, T, D), state=(T, D)),
        r"h = 1, 6 \(arrays are \[batch, time, heads, D\]\)",
    ),
    "heads_before_time_in_the_state": (
        arrays(state=(2, 2, T, D)),
        r"h = 1, 2 \(arrays are \[batch, time, heads, D\]\)",
    ),
    "grouped_heads_before_time": (
        arrays(q=(2, H, T, D), k=(2, 2, T, D), v=(2, 2, T, D), state=(T, D)),
        r"differ in length \(arrays are \[batch, time, heads, D\]\); got q \(2, 4, 6, 8\)",
    ),
    "state_heads_divide": (
        arrays(q=(2, T, 4, D), k=(2, T, 4, D), v=(2, T, 4, D), state=(2, T, 2, D)),
        r"state of shape .*does not fit k .*h = 1, 4",
    ),
    "state_without_batch": (
        arrays(state=(T, 2, D)),
        r"state of shape \(6, 2, 8\) does not fit k of shape \(2, 6, 2, 8\): expected \(6, 8\) or "
        r"\(2, 6, h, 8\), batch axes full or 1, h = 1, 2",
    ),
    "state_without_heads": (
        arrays(state=(2, T, D)),
        r"state\[\.\.\., None, :\] has an axis of heads",
    ),
    "tensor_state_without_batch": (
        arrays(state=(T, 2, 4, 2, 3)),
        r"expected \(6, 1, M, L, R\) or \(2, 6, h, M, L, R\)",
    ),
    "query_state_without_batch": (
        arrays(query_state=(T, H, D)),
        r"query_state of shape \(6, 4, 8\).*expected \(6, 8\) or \(2, 6, h, 8\), .*h = 1, 2, 4",
    ),
    "state_integer": (
        arrays() | {"state": jnp.ones((2, T, 2, D), int)},
        "state must be a floating",
    ),
    "tensor_state_blocks": (arrays(state=(2, T, 2, 3, 2, 2)), r"M \* L = 8"),
    "query_state_length": (
        arrays(query_state=(2, 5, 2, D)),
        r"query_state of shape \(2, 5, 2, 8\).*q of shape",
    ),
    "query_state_heads": (arrays(query_state=(2, T, 3, D)), "query_state of shape.*does not fit"),
    "query_state_form": (arrays(query_state=(2, T, 2, 4, 2, 2)), "one form"),
    "query_state_missing": (arrays(q=(2, 3, H, D)), "query_state is required.*differ in length"),
    "query_state_alone": (
        arrays(state=None, query_state=(2, T, 2, D)),
        "query_state without state",
    ),
    "keys_rotated_alone": (arrays() | {"keys_rotated": True}, "keys_rotated=True needs"),
    "segments_float": (arrays() | {"segment_ids": jnp.ones((2, T))}, "must be integers.*float32"),
    "segments_length": (
        arrays() | {"segment_ids": INTS[:, :5]},
        r"expected shape \(2, 6\).*got \(2, 5\)",
    ),
    "segments_triple": (arrays() | {"segment_ids": (INTS, INTS, INTS)}, "a pair of arrays; got 3"),
    "segments_not_a_pair": (
        arrays(q=(2, 3, H, D), query_state=(2, 3, 2, D)) | {"segment_ids": INTS},
        "tuple.*3 queries, 6 keys",
    ),
    "decay_integer": (
        arrays() | {"log_decay": jnp.ones((2, T, H), int)},
        "log_decay must be floating-point; got int",
    ),
    "decay_without_heads": (
        arrays() | {"log_decay": jnp.ones((2, T))},
        r"log_decay: expected shape \(2, 6, 4\), one head .*; got \(2, 6\)",
    ),
    "decay_kv_heads": (arrays() | {"log_decay": jnp.ones((2, T, 2))}, r"got \(2, 6, 2\)"),
    "decay_length": (
        arrays() | {"log_decay": (jnp.ones((T, H)), jnp.ones((5, H)))},
        r"key log_decay: expected shape \(2, 6, 4\).*got \(5, 4\)",
    ),
    "decay_batch": (
        arrays() | {"log_decay": (jnp.ones((3, T, 1)), jnp.ones((T, H)))},
        r"query log_decay: expected .* got \(3, 6, 1\)",
    ),
    "decay_not_a_pair": (
        arrays(q=(2, 3, H, D), query_state=(2, 3, 2, D)) | {"log_decay": jnp.ones((T, 1))},
        "log_decay must be a tuple .*3 queries, 6 keys",
    ),
    "decay_triple": (arrays() | {"log_decay": (1.0,) * 3}, "log_decay must be .* pair .*got 3"),
    "window": (arrays() | {"local_window_size": -1}, "an integer from 0 on, or a pair .* got -1"),
    "window_true": (arrays() | {"local_window_size": True}, "an integer from 0 on.* got True"),
    "causal_text": (arrays() | {"is_causal": "no"}, "is_causal must be True or False.* got 'no'"),
    "types": (
        {name: x.astype(jnp.float8_e4m3fn) for name, x in arrays().items()},
        "must be floating-point, float32, .*; got float8_e4m3fn",
    ),
    "lengths": (
        arrays() | {"query_seq_lengths": jnp.ones(3, int)},
        r"query_seq_lengths must be integers of shape \(2,\), one a row; got int32 of shape \(3,\)",
    ),
    "window_pair": (
        arrays() | {"local_window_size": (3, 0, 1)},
        r"an integer from 0 on, or a pair .*; got \(3, 0, 1\)",
    ),
    "softcap_zero": (arrays() | {"logit_softcap": 0}, "logit_softcap must be a positive .*; got 0"),
    "softcap_traced": (arrays() | {"logit_softcap": "5"}, "logit_softcap must be a pos.*; got '5'"),
    "scale_name": (arrays() | {"scale": "2"}, "scale must be a finite number, .*; got '2'"),
    "scale_nan": (arrays() | {"scale": np.nan}, "scale must be a finite number, .*; got nan"),
    **{
        f"{name}_text": (arrays() | {name: "no"}, f"{name} must be True or False, .*; got 'no'")
        for name in ("keys_rotated", "attend_state", "interpret")
    },
    **{
        f"{name}_no_array": (
            arrays() | {"local_window_size": 1, "query_state": jnp.ones((2, T, 2, D)), name: "x"},
            f"{name} must be an array of numbers; got 'x'",
        )
        for name in (
            *("q", "k", "v", "state", "query_state", "mask", "bias", "log_decay", "segment_ids"),
            *("query_offset", "window_positions", "query_seq_lengths"),
        )
    },
    "window_positions_signs": (
        arrays()
        | {"local_window_size": 1, "window_positions": (INTS, jnp.asarray(INTS, jnp.uint32))},
        "window_positions of queries and keys must be of one type.*int32 and uint32",
    ),
    "sharding_name": (arrays() | {"sharding": "x"}, "sharding must be of the type Sharding or No"),
    "offset_true": (arrays() | {"query_offset": True}, "query_offset must be an integer.*bool"),
    "implementation_number": (
        arrays() | {"implementation": 3},
        "implementation must be a name, several or None; got 3",
    ),
    "bias_shape": (
        arrays() | {"bias": jnp.ones((3, T, T))},
        r"bias must broadcast to .*\(2, 4, 6, 6\); got \(3, 6, 6\)",
    ),
    "bias_bool": (arrays() | {"bias": jnp.ones((T, T), bool)}, "use mask"),
    "bias_function_shape": (
        arrays() | {"bias": lambda i, j: jnp.ones((3, 6, 6))},
        r"value of the bias function must broadcast to .*got \(3, 6, 6\)",
    ),
    "bias_function_bool": (
        arrays() | {"bias": lambda i, j: j <= i[:, None]},
        r"value of the bias function must be floating-point \(for a boolean, use mask\); got bool",
    ),
    "bias_function_none": (
        arrays() | {"bias": lambda i, j: None},
        "value of the bias function must be a floating-point array; got None",
    ),
    "mask_type": (arrays() | {"mask": jnp.ones((T, T))}, "mask must be boolean"),
    "mask_shape": (arrays() | {"mask": jnp.ones((5, T), bool)}, "mask must broadcast"),
    "mask_of_keys": (
        arrays() | {"mask": jnp.ones((2, T), bool)},
        r"got \(2, 6\): .* mask\[:, None, None, :\] .*; segment_ids= hides padding",
    ),
    "offset_type": (arrays() | {"query_offset": 1.5}, "query_offset must be an integer .*float32"),
    "offset_shape": (
        arrays() | {"query_offset": INTS},
        r"or one a row, \(2,\); got shape \(2, 6\)",
    ),
    "index_range": (
        arrays() | {"query_offset": 2**31 - 12},
        "together must be below 2\\*\\*31; got 6, 6 and 2147483636",
    ),
    "unsigned_offset": (
        arrays() | {"query_offset": np.array([0, 2**32 - 1], np.uint32)},
        "together must be below .* and 4294967295",
    ),
    "long_offset": (
        arrays() | {"query_offset": np.array([2**32, -5])},
        "query_offset must fit in int32, .* values from -5 to 4294967296",
    ),
    "long_segments": (
        arrays() | {"segment_ids": (INTS, np.full((2, T), 2**32 + 1))},
        "key segment_ids must fit in int32, .* to 4294967297",
    ),
    "long_segments_in_a_list": (
        arrays() | {"segment_ids": [2**32 + 1] * T},
        "segment_ids must fit in 32 bits: .*4294967297",
    ),
    "unknown_name": (arrays() | {"implementation": "chunky"}, "did you mean 'chunked'"),
    "unknown_option": (
        arrays() | {"implementation": "chunked", "options": {"block": 4}},
        "unknown option .*'chunked' 'block'.*did you mean",
    ),
    "options_of_none": (
        arrays() | {"options": {"block_q": 4}},
        "keywords of one implementation; got implementation=None",
    ),
    "options_of_several": (
        arrays() | {"options": {"block_q": 4}, "implementation": ("chunked", "reference")},
        "keywords of one implementation",
    ),
    "unknown_among_names": (
        arrays() | {"implementation": ["pallas", "chunky"]},
        "did you mean 'chunked'",
    ),
    "no_names": (arrays() | {"implementation": ()}, "implementation must hold a name"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    keywords, message = WRONG[name]
    for function in (attention, attention_plan):
        with pytest.raises(ValueError, match=message):
            function(**keywords)


@pytest.mark.parametrize(
    ("name", "value"), [("scale", 0.5), ("local_window_size", 3), ("is_causal", True)]
)
def test_traced_scalars_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, known when the call is compiled"):
        jax.jit(lambda x: attention(**arrays(), **{name: x}))(value)


@pytest.mark.parametrize("implementation", ["chunked", "query_blocks", "rows"])
@pytest.mark.parametrize("size", [0, 2.5, "a", True])
def test_no_block(implementation, size):
    options = {"block_q": size}
    with pytest.raises(ValueError, match=f"block_q must be a positive .*; got {size!r}"):
        attention(**arrays(), implementation=implementation, options=options)


@pytest.mark.parametrize("window", [2**31 - 1, np.int64(2**40)])
def test_a_window_may_be_wider_than_32_bits(window):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, T, 1, D)), jnp.float32)

    def attend(implementation, **keywords):
        return attention(x, x, x, query_offset=3, implementation=implementation, **keywords)[0]

    offset = jax.jit(lambda o: attention(x, x, x, local_window_size=window, query_offset=o)[0])
    for name in ("reference", "chunked"):
        for causal in (False, True):
            want = attend(name, is_causal=causal)
            found = attend(name, is_causal=causal, local_window_size=window)
            np.testing.assert_allclose(found, want, atol=1e-6)
    np.testing.assert_allclose(offset(jnp.int32(3)), attend("reference"), atol=1e-6)


def test_named_implementation_never_falls_back():
    call = arrays() | {"mask": jnp.ones((T, T), bool), "implementation": "splash"}
    with pytest.raises(NotImplementedError, match="'splash': mask="):
        attention(**call, interpret=True)
    plan = attention_plan(**call, interpret=True)
    assert plan.implementation is None
    assert list(plan.rejected) == ["splash"]


def test_a_function_as_bias_has_the_same_queries_in_all_rows():
    call = arrays() | {"bias": lambda i, j: 0.1 * (i[:, None] - j)}
    for offset in (3, jnp.array(3), jnp.array([3])):
        attention(**call, query_offset=offset)
    with pytest.raises(NotImplementedError, match=r"with one query_offset a row .* jax\.vmap"):
        attention(**call, query_offset=jnp.array([3, 4]))


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.parametrize("name", ["state_heads", "mask_shape"])
def test_plan_checks_shapes_without_arrays(name):
    keywords, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        attention_plan(**abstract(keywords))


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
        attention(**arrays(), **given, scale=scale)
        plan = attention_plan(**arrays(), **given, scale=scale, query_offset=np.array(0))
        assert plan.implementation == "reference"


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_states_of_queries_are_not_repeated(heads):
    """Backends broadcast a state over the query heads that share it."""
    state = jnp.ones((2, T, heads, D))
    request = normalize(**arrays(), query_state=state)
    assert request.query_state.shape == state.shape


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("tensor", [False, True])
def test_shapes(batch, tensor):
    tail = (4, 2, 3) if tensor else (D,)
    shapes = {
        "q": (*batch, T, H, D),
        "k": (*batch, T, 2, D),
        "v": (*batch, T, 2, 5),
        "state": (*batch, T, 1, *tail),
    }
    floats = {n: jax.ShapeDtypeStruct(shape, jnp.float32) for n, shape in shapes.items()}
    o, a = jax.eval_shape(lambda x: attention(**x), floats)
    assert o.shape == (*batch, T, H, 5)
    assert a.shape == (*batch, T, H, *tail)
    assert jax.eval_shape(lambda x: attention(**x, attend_state=False), floats)[1] is None


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
