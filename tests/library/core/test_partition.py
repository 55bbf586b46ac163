"""Functions with a derivative of their own, over rows and heads that are split or batched."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tape_jax._src.core.partition import differentiable_over_batch_and_heads
from tests.library.attention.backends import assert_close, jit, normal
from tests.selection import mostly_slow

AXES = {"q": "b.h.", "k": "b.k.", "ids": "b.", "fixed": ""}


def scores(args):
    """Something of queries and keys by head, with what is the same for all."""
    q, k = args["q"], args["k"]
    wide = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    mean = jnp.cumsum(wide * args["ids"][..., None, None], axis=1)
    return jnp.sin(q) * mean * args["fixed"]


def arrays(kv_heads, rows=2, heads=4):
    return {
        "q": normal(0, rows, 5, heads, 6),
        "k": normal(1, rows, 5, kv_heads, 6),
        "ids": jnp.arange(rows * 5).reshape(rows, 5),
        "fixed": jnp.arange(6.0),
    }


def result_and_gradients(function, args):
    def loss(q, k):
        out = function({**args, "q": q, "k": k})
        return jnp.sum(jnp.cos(out)), out

    gradients, out = jax.grad(loss, (0, 1), has_aux=True)(args["q"], args["k"])
    return out, gradients


of_scores = jit(functools.partial(result_and_gradients, scores))


def whole(args):
    return differentiable_over_batch_and_heads(scores, args, AXES, "b.h.")


def test_outputs_and_gradients():
    args = arrays(1)
    got = jit(functools.partial(result_and_gradients, whole))(args)
    assert_close(got, of_scores(args), 1e-6)


def test_each_device_has_its_rows_and_heads():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    spec = {
        "q": PartitionSpec("data", None, "model"), "k": PartitionSpec("data", None, "model"),
        "ids": PartitionSpec("data"), "fixed": PartitionSpec(),
    }  # fmt: skip
    args = arrays(2)
    want = of_scores(args)
    placed = {name: NamedSharding(mesh, x) for name, x in spec.items()}
    args = jax.device_put(args, placed)
    compiled = jit(functools.partial(result_and_gradients, whole)).lower(args).compile()
    assert "all-gather" not in compiled.as_text()
    got = compiled(args)
    assert_close(jax.device_get(got), want, 1e-6)
    out, (of_q, of_k) = got
    for x, name in ((out, "q"), (of_q, "q"), (of_k, "k")):
        assert x.sharding.is_equivalent_to(placed[name], x.ndim)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices"), [(6, 3, 2), (12, 3, 4), (8, 2, 4), (12, 6, 4)]
)
def test_shards_that_do_not_divide_key_heads(heads, kv_heads, devices):
    """Else a device would pair query heads with key heads of another."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("model",))
    args = arrays(kv_heads, heads=heads)
    want = of_scores(args)
    split = NamedSharding(mesh, PartitionSpec(None, None, "model"))
    others = {name: NamedSharding(mesh, PartitionSpec()) for name in args}
    args = jax.device_put(args, others | {"q": split})
    got = jit(functools.partial(result_and_gradients, whole))(args)
    assert_close(jax.device_get(got), want, 1e-6)


def test_an_axis_of_the_mesh_that_splits_heads_here_and_rows_there():
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    args = arrays(2)
    want = of_scores(args)
    spec = {name: PartitionSpec() for name in args}
    spec |= {"q": PartitionSpec(None, None, "model"), "k": PartitionSpec("model")}
    args = jax.device_put(args, {name: NamedSharding(mesh, x) for name, x in spec.items()})
    got = jit(functools.partial(result_and_gradients, whole))(args)
    assert_close(jax.device_get(got), want, 1e-6)


@pytest.mark.parametrize(
    ("batched", "rows"), mostly_slow([(("q", "k", "ids"), 1), (("k",), 2)], (("k",), 2))
)
def test_vmap_merges_with_the_rows(batched, rows):
    calls = [arrays(2, rows) for _ in range(3)]
    for n, call in enumerate(calls):
        call |= {name: call[name] + n for name in batched}
    want = jax.tree.map(lambda *x: jnp.stack(x), *map(of_scores, calls))
    stacked = calls[0] | {name: jnp.stack([call[name] for call in calls]) for name in batched}
    in_axes = ({name: 0 if name in batched else None for name in stacked},)
    got = jit(jax.vmap(functools.partial(result_and_gradients, whole), in_axes=in_axes))(stacked)
    assert_close(got, want, 1e-6)


def test_vmap_of_the_cotangent_alone():
    args = arrays(2, 1)
    jacobian = jit(jax.jacrev(lambda q: whole({**args, "q": q})[0, :, 0]))(args["q"])
    want = jit(jax.jacrev(lambda q: scores({**args, "q": q})[0, :, 0]))(args["q"])
    assert_close(jacobian, want, 1e-6)


def of_one_head(args):
    """Its structure differs: as many arrays, of like axes, for one head as for two are wanted."""
    k = args["k"]
    if k.shape[2] > 1:
        return jnp.sin(scores(args))
    return jnp.sin(k[:, :, 0])[:, :, None] * args["q"]


def heads_merged(args):
    shape = args["q"].shape
    return jnp.sin(args["q"].swapaxes(1, 2).reshape(-1, *shape[1::2])).reshape(shape)


def rows_doubled(args):
    shape = args["q"].shape
    return jnp.sin(jnp.concatenate([args["q"], 2 * args["q"]])).reshape(2, *shape).sum(0)


def rows_summed(args):
    return args["q"] * jnp.sin(args["q"].sum(0))


@pytest.mark.parametrize(
    ("function", "kv_heads", "words"),
    [
        (of_one_head, 1, "depends on how many rows and heads"),
        (heads_merged, 2, r"keeps for its backward pass.* mixes rows"),
        (rows_doubled, 2, r"keeps for its backward pass.* mixes rows"),
        (rows_summed, 2, r"keeps for its backward pass.* mixes rows"),
    ],
)
def test_what_is_kept_must_have_its_rows_first(function, kv_heads, words):
    """No other order can be split over devices, or taken for a batch, by sizes alone."""

    def loss(q):
        args = {**arrays(kv_heads), "q": q}
        return differentiable_over_batch_and_heads(function, args, AXES, "b.h.").sum()

    with pytest.raises(NotImplementedError, match=words):
        jax.grad(loss)(arrays(kv_heads)["q"])
