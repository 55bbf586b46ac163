"""The fused kernels alone; their results are tested with all other backends'."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax._src.attention import attention, pallas_blocks
from tape_jax._src.attention.pallas_blocks import Tile, Tiles
from tape_jax._src.core import devices
from tests.library.attention.backends import assert_close, attend, expected, lowered, run
from tests.library.attention.cases import BY_NAME

INTERPRETED = {"implementation": "pallas", "interpret": True}


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("name", "split"), [("decay_grouped", False), ("window_bidirectional", True)]
)
def test_tiles_of_unlike_sizes(name, split):
    """Tiles that are not square, and unlike in each kernel."""
    tiles = Tiles(Tile(16, 32), Tile(32, 16), Tile(16, 64))
    tiles = dataclasses.replace(tiles, value_gradients=Tile(32, 32) if split else None)
    got = run(BY_NAME[name], "float32", **INTERPRETED, options={"tiles": tiles})
    assert_close(got, expected(name), 1e-5)


@pytest.mark.slow
def test_widths_and_table():
    """Widths that are no power of two, by the table's blocks, longer than the call."""
    case = dataclasses.replace(BY_NAME["causal"], batch=(1,), queries=17, dim=24, value_dim=40)
    with jax.enable_x64(True):
        want = run(case, "float64", implementation="reference")
    assert_close(run(case, "float32", **INTERPRETED), want, 1e-5)


@pytest.mark.usefixtures("any_device")
def test_tensor_float_lowers_to_cuda():
    x = jax.ShapeDtypeStruct((1, 64, 2, 64), "float32")

    def kernel(allow_tf32):
        options = {"allow_tf32": allow_tf32}
        f = functools.partial(attend, implementation="pallas", options=options)
        return lowered("cuda", f, x, x, x, x)

    assert kernel(True) != kernel(False)


@pytest.mark.usefixtures("any_device")
@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("dim", "x64", "decay"), [(64, True, True), (64, True, False), (128, False, False)]
)
def test_lowers_to_cuda(dim, x64, decay):
    """One kernel forward; two backward, or three where heads are wide."""
    with jax.enable_x64(x64):
        q = jax.ShapeDtypeStruct((2, 200, 4, dim), "bfloat16")
        kv = jax.ShapeDtypeStruct((2, 200, 2, dim), "bfloat16")
        e = jax.ShapeDtypeStruct((2, 200, 4) if decay else (2, 200, 2, dim), "float32")
        ids = jax.ShapeDtypeStruct((2, 200), "int32")

        def forward(q, k, v, e, ids):
            given = {"log_decay" if decay else "state": e, "segment_ids": ids}
            out = attention(q, k, v, local_window_size=69, implementation="pallas", **given)
            return jax.tree.leaves(out)

        def backward(q, k, v, e, ids):
            loss = lambda *args: sum(jnp.sum(x) for x in forward(*args, ids))  # noqa: E731
            return jax.grad(loss, (0, 1, 2, 3))(q, k, v, e)

        call = "custom_call @__gpu$xla.gpu.triton"
        assert lowered("cuda", forward, q, kv, kv, e, ids).count(call) == 1
        kernels = 4 if dim == 128 else 3
        assert lowered("cuda", backward, q, kv, kv, e, ids).count(call) == kernels


@pytest.mark.slow
def test_state_that_is_not_attended_costs_nothing():
    """The kernels then write no ``a`` and no gradient of it, and read no state they need not."""
    x = jax.ShapeDtypeStruct((1, 32, 2, 16), "float32")

    def kernels(**keywords):
        def loss(*qkv):
            return jnp.sum(attention(*qkv, **keywords, **INTERPRETED)[0])

        text = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x))
        return [text.count(f"{op}[") for op in ("dot_general", "masked_load", "masked_swap")]

    state = jnp.ones((1, 32, 2, 16))
    plain, rotary = kernels(), kernels(state=state, attend_state=False)
    assert plain[0] == rotary[0] < kernels(state=state)[0]
    cached = {"state": state, "query_state": state, "keys_rotated": True}
    without = kernels(query_state=state, keys_rotated=True)
    assert kernels(attend_state=False, **cached) == without


X = np.ones((1, 4, 2, 16), np.float32)
REFUSED = {
    "odd": (dict.fromkeys("qkv", X[..., :15]) | {"state": None}, "even; got 15"),
    "wide": (dict.fromkeys("qkv", X.repeat(9, -1)) | {"state": None}, "at most 128; got 144"),
    "wide_values": ({"v": X.repeat(9, -1)}, "at most 128; got 16 and, of values, 144"),
    "far": ({"query_offset": 2**30}, "at most 536870912: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    keywords, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=message):
        attention(**dict.fromkeys(("q", "k", "v", "state"), X) | keywords, **INTERPRETED)


@pytest.mark.parametrize("wide", [{"state": np.float64(X)}, {"log_decay": np.zeros((4, 1))}])
def test_float64_is_refused(x64, wide):
    with pytest.raises(NotImplementedError, match="got float64"):
        attention(X, X, X, **wide, **INTERPRETED)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="what a machine without a GPU does")
def test_needs_a_gpu_unless_interpreted():
    with pytest.raises(NotImplementedError, match="needs a CUDA GPU, but jax runs on 'cpu'"):
        attention(X, X, X, state=X, implementation="pallas")


def test_old_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(devices, "compute_capability", lambda: (7, 5))
    with pytest.raises(NotImplementedError, match=r"8\.0 \(Ampere\) or later; .* 7\.5"):
        attention(X, X, X, state=X, implementation="pallas")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"queries": 48}, "queries must be a power of two.*got 48"),
        ({"keys": 8}, "keys must be a power of two, at least 16; got 8"),
        ({"warps": 3}, "warps must be 1, 2, 4, 8 or 16; got 3"),
        ({"stages": 0}, "stages must be at least 1; got 0"),
        ({"stages": 2.5}, r"stages must be an integer; got 2\.5"),
        ({"keys": "16"}, "keys must be an integer; got '16'"),
    ],
)
def test_wrong_tiles(sizes, message):
    with pytest.raises(ValueError, match=message):
        Tile(**{"queries": 16, "keys": 16, **sizes})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiles": [[16, 16]] * 2}, r"three or four lists .*; got \[\[16, 16\], \[16, 16\]\]"),
        ({"tiles": [64, 64, 64]}, r"three or four lists .*; got \[64, 64, 64\]"),
        ({"tiles": 5}, "three or four lists .*; got 5"),
        ({"tiles": [[16.0, 16]] * 3}, r"Tile: queries must be an integer; got 16\.0"),
        ({"allow_tf32": "no"}, "allow_tf32 must be True or False; got 'no'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        attention(X, X, X, options=options, **INTERPRETED)


def test_table_of_tiles(monkeypatch):
    """Chips with little shared memory get smaller blocks; every type and width has some."""

    def areas(capability):
        monkeypatch.setattr(devices, "compute_capability", lambda: capability)
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            for width in (16, 64, 66, 128):
                tile = pallas_blocks.default_tiles(dtype, width).forward
                yield tile.queries * tile.keys

    large, small = list(areas((9, 0))), list(areas((8, 6)))
    assert all(x > y for x, y in zip(large, small, strict=True))
    assert list(areas(None)) == large
