"""The update by one kernel each way, interpreted, against what writes the equations down."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import init_update, update_state
from tape_jax._src.core import devices
from tape_jax._src.positions.tape import update, update_kernel
from tests.library.attention.backends import lowered
from tests.library.positions.tape.test_update import (
    CASES,
    arguments,
    assert_near,
    result_and_gradients,
    wanted,
)
from tests.models import normal

FUSED = {"implementation": "fused"}


@pytest.fixture
def interpreted(monkeypatch):
    """Programs of three tokens, the last of which is not full."""
    fused = functools.partial(update.fused, interpret=True, tokens=3)
    monkeypatch.setitem(update.UPDATES, "fused", fused)


@pytest.mark.mostly_slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", CASES)
def test_against_float64(case):
    args, d_out = arguments(case, "float32")
    assert_near(result_and_gradients(args, d_out, CASES[case][3], **FUSED), wanted(case), 1e-5)


@pytest.mark.mostly_slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("norm", ["none", "unit"])
def test_norms_of_tensor_states(norm):
    (params, *_, x, alpha), _ = arguments("grouped", "float32")
    e, a, d_out = (jnp.asarray(normal(2, 11, n, 4, 2, 3, seed=n), "float32") for n in (2, 4, 2))
    run = functools.partial(result_and_gradients, (params, e, a, x, alpha), d_out, norm)
    assert_near(run(**FUSED), run(implementation="reference"), 1e-5)


@pytest.mark.usefixtures("interpreted")
def test_a_magnitude_that_is_traced():
    """Its gradient too."""
    args, d_out = arguments("grouped", "float32")

    def total(magnitude, implementation):
        options = {"norm": "rms", "implementation": implementation}
        return (update_state(*args, magnitude=magnitude, **options) * d_out).sum()

    got, want = (jax.jit(jax.value_and_grad(functools.partial(total, implementation=name)))(1.5)
                 for name in ("fused", "reference"))  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-4)
    with pytest.raises(ValueError, match=r"magnitude must be a number; got .* of shape \(8,\)"):
        update_state(*args, norm="rms", magnitude=jnp.ones(8))


@pytest.mark.usefixtures("interpreted")
def test_narrow_states():
    args, d_out = arguments("grouped", "bfloat16")
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda z: jnp.asarray(z, "float64"), (args, d_out))
        want = result_and_gradients(*exact, "rms", implementation="reference")
    got = result_and_gradients(args, d_out, "rms", **FUSED)
    assert got[0].dtype == "bfloat16"
    assert_near(got, want, 2e-2)


@pytest.mark.usefixtures("interpreted")
def test_wide_states_in_parts(monkeypatch):
    """Of 16 numbers each; the last part has fewer."""
    monkeypatch.setattr(update_kernel, "MOST_NUMBERS", {False: 256, True: 256})
    params = init_update(jax.random.key(0), 12, 4, num_kv_heads=2, attention_mix="heads")
    params = jax.tree.map(lambda p: p + 0.1 * jnp.asarray(normal(*p.shape, seed=p.size)), params)
    x = jnp.asarray(normal(2, 5, 12, seed=3), "float32")
    e, a, d_out = (jnp.asarray(normal(2, 5, n, 40, seed=n), "float32") for n in (2, 4, 2))
    run = functools.partial(result_and_gradients, (params, e, a, x, 0.5), d_out, "rms")
    assert_near(run(**FUSED), run(implementation="reference"), 1e-5)


@pytest.mark.usefixtures("interpreted")
def test_states_at_zero_stay_there():
    """Their norm counts as the least, in value and gradient."""
    (params, e, _, x, alpha), d_out = arguments("nothing attended", "float32", time=3)
    args = params, 0 * e, None, x, alpha
    run = functools.partial(result_and_gradients, args, d_out, "rms")
    got = run(**FUSED)
    np.testing.assert_array_equal(got[0], 0)
    assert_near(got[1][1], run(implementation="reference")[1][1], 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_a_batch_of_calls():
    """Parameters may differ from call to call."""
    calls = [arguments("grouped", "float32", alpha=alpha) for alpha in (0.7, 0.3)]
    stacked = jax.tree.map(lambda *z: jnp.stack(z), *calls)
    run = functools.partial(result_and_gradients, norm="rms", **FUSED)
    want = jax.tree.map(lambda *z: jnp.stack(z), *(run(*call) for call in calls))
    assert_near(jax.vmap(run)(*stacked), want, 1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_a_batch_split_over_devices():
    """The kernel runs on the rows that a device holds; nothing is gathered."""
    args, d_out = arguments("grouped", "float32", batch=(4,))
    want = result_and_gradients(args, d_out, **FUSED)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = lambda *axes: jax.NamedSharding(mesh, jax.P(*axes))  # noqa: E731
    (params, e, a, x, alpha), split = args, functools.partial(jax.device_put, device=place("data"))
    params, alpha = jax.device_put((params, alpha), place())
    args = params, split(e), split(a), split(x), alpha
    assert_near(result_and_gradients(args, split(d_out), **FUSED), want, 1e-5)
    run = jax.jit(functools.partial(update_state, **FUSED))
    assert "all-gather" not in run.lower(*args).compile().as_text()


@pytest.mark.mostly_slow
@pytest.mark.parametrize("wide", [True, False])
def test_lowers_to_cuda(monkeypatch, wide):
    monkeypatch.setattr(devices, "compute_capability", lambda: (9, 0))
    with jax.enable_x64(wide):
        args, d_out = arguments("matrix", "float32")
        shapes = jax.tree.map(lambda z: jax.ShapeDtypeStruct(z.shape, z.dtype), (args, d_out))
        run = functools.partial(result_and_gradients, **FUSED)
        text = lowered("cuda", lambda args, d_out: run(args, d_out), *shapes)
        assert text.count("custom_call @__gpu$xla.gpu.triton") == 2


def test_refused(monkeypatch):
    args, _ = arguments("grouped", "float32")
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="'fused': needs a CUDA GPU"):
            update_state(*args, **FUSED)
    fused = functools.partial(update.fused, interpret=True)
    monkeypatch.setitem(update.UPDATES, "fused", fused)
    params, e, a, *rest = args
    with pytest.raises(NotImplementedError, match="each of 128 numbers; got 4 of 136"):
        update_state(params, jnp.tile(e, 17), jnp.tile(a, 17), *rest, **FUSED)
    with pytest.raises(NotImplementedError, match="no product over heads"):
        update_state({"mix": params["mix"]}, e, a, *rest, **FUSED)
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="got float64"):
        update_state(*arguments("grouped")[0], **FUSED)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", ["none", "rms"])
@pytest.mark.parametrize("heads", [(12, 12, 64), (32, 8, 128), (6, 3, 40), (2, 2, 8)])
def test_compiled(heads, norm, dtype):
    """Against ``reference`` with whole float32 products."""
    queries, states, dim = heads
    params = init_update(jax.random.key(0), 96, queries, num_kv_heads=states)
    params = {
        n: jnp.asarray(normal(*z.shape, seed=i) / 3) for i, (n, z) in enumerate(params.items())
    }
    e, a, d_out = (
        jnp.asarray(normal(2, 1001, n, dim, seed=n + dim), dtype) for n in (states, queries, states)
    )
    x = jnp.asarray(normal(2, 1001, 96), "float32")
    params = jax.tree.map(lambda z: z.astype("float32"), params)
    wide = jax.tree.map(lambda z: z.astype("float32"), (params, e, a, x, jnp.float32(0.7)))
    with jax.default_matmul_precision("highest"):
        want = result_and_gradients(wide, d_out.astype("float32"), norm, implementation="reference")
        got = result_and_gradients((params, e, a, x, jnp.float32(0.7)), d_out, norm, **FUSED)
    assert_near(got, want, 2e-5 if dtype == "float32" else 2e-2)
