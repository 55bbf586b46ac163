"""The fused kernels by Mosaic GPU, interpreted: numbers, and no races between warpgroups."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu

from tape_jax._src.attention import attention, attention_plan, pallas_blocks, pallas_mosaic
from tape_jax._src.attention.mosaic_ampere import AmpereProgram
from tape_jax._src.attention.mosaic_hopper import HopperProgram
from tape_jax._src.attention.mosaic_program import plgpu
from tape_jax._src.attention.pallas_blocks import Tile, Tiles
from tape_jax._src.core import devices
from tests.library.attention.backends import TOLERANCE, assert_close, run
from tests.library.attention.cases import Case
from tests.selection import mostly_slow

X = np.ones((1, 4, 2, 16), jnp.bfloat16)
INTERPRETED = {"implementation": "mosaic", "interpret": True}
needs_interpreter = pytest.mark.skipif(
    not hasattr(mosaic_gpu, "InterpretGPUParams"), reason="needs jax 0.11.1, and so Python 3.12"
)
# Several blocks each, the last ones not full.
CASES = [
    Case("causal", batch=(1,), queries=200, dim=24, value_dim=64),
    Case("short", queries=3),
    Case("all_keys", batch=(1,), queries=70, keys=200, is_causal=False, query_state=True),
    Case("wide", batch=(1,), queries=150, dim=128, value_dim=80),
    Case("grouped", batch=(2,), queries=130, heads=4, kv_heads=2, state_heads=1),
    Case("shared_by_the_batch", queries=70, state_heads=1, state_batch=False),
    Case("window", batch=(1,), queries=300, local_window_size=(90, 20), is_causal=False),
    Case("segments", batch=(1,), queries=200, local_window_size=150, segments="same"),
    Case("cache", batch=(1,), queries=70, keys=200, query_offset=130, keys_rotated=True),
    Case("decay", batch=(1,), queries=200, heads=4, log_decay="same", segments="same"),
    Case("decay_shared", batch=(1,), queries=130, log_decay="shared", form=None),
    Case("state_not_attended", batch=(1,), queries=130, attend_state=False),
]
# What must be waited for before a stage is overwritten; compute capabilities.
FENCES = {"hopper": (plgpu, "commit_smem"), "ampere": (AmpereProgram, "_meet")}
CHIPS = {"hopper": (9, 0), "ampere": (8, 0), "ada": (8, 9)}


@pytest.fixture(params=("hopper", "ampere"))
def chip(request, monkeypatch):
    """The chip whose kernels are interpreted."""
    monkeypatch.setattr(devices, "compute_capability", lambda: CHIPS[request.param])
    return request.param


def assert_right(case, dtype="float16", **keywords):
    got = run(case, dtype, **{**INTERPRETED, **keywords})
    with jax.enable_x64(True):
        want = run(case, "float64", dtype, implementation="reference")
    assert_close(got, want, TOLERANCE[dtype])


@needs_interpreter
@pytest.mark.parametrize("case", mostly_slow(CASES, CASES[4]), ids=str)
def test_outputs_and_gradients(case, chip, capfd):
    assert_right(case, "bfloat16" if case.name == "causal" else "float16")
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled(case):
    try:
        assert_right(case, interpret=False)
    except NotImplementedError as reason:
        pytest.skip(str(reason))


@needs_interpreter
@pytest.mark.slow
def test_a_stage_that_is_overwritten_too_early_is_a_race(chip, monkeypatch, capfd):
    """What the interpreter is asked for, it finds."""
    monkeypatch.setattr(*FENCES[chip], lambda *_: None)
    run(dataclasses.replace(CASES[0], queries=300), "bfloat16", **INTERPRETED)
    assert "RACE" in "".join(capfd.readouterr())


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("tiles", [[(64, 64, 4, 3)] * 4, [(128, 128, 8, 2)] * 3])
def test_tiles(tiles, chip):
    case = dataclasses.replace(CASES[0], queries=150)
    assert_right(case, options={"tiles": tiles})


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["ampere", "ada"], indirect=True)
@pytest.mark.usefixtures("chip")
def test_wide_heads_with_a_decay():
    assert_right(Case("wide", batch=(1,), queries=150, dim=128, log_decay="same"))


@pytest.mark.parametrize("capability", [None, (7, 5), (10, 0)])
def test_other_gpus_interpret_the_kernels_of_hopper(capability, monkeypatch):
    monkeypatch.setattr(devices, "compute_capability", lambda: capability)
    assert pallas_mosaic._program() is HopperProgram
    assert pallas_blocks.mosaic_tiles(64) == pallas_blocks.MOSAIC["hopper"][64]


WRONG_TILES = {
    "hopper": [(128, 128, 4), (64, 32, 4)],
    "ampere": [(128, 128, 4), (128, 16, 8), (64, 64, 4, 4), (64, 64, 4, 1)],
}


@needs_interpreter
@pytest.mark.parametrize(
    ("chip", "tile"), [(x, tile) for x in WRONG_TILES for tile in WRONG_TILES[x]], indirect=["chip"]
)
@pytest.mark.usefixtures("chip")
def test_wrong_tiles(tile):
    tiles = dataclasses.replace(Tiles.same(128, 128, 8), forward=Tile(*tile))
    with pytest.raises(ValueError, match="takes 64 queries with 4 warps or 128 with 8, "):
        attention(X, X, X, state=X, options={"tiles": tiles}, **INTERPRETED)


REFUSED = {
    "float32": (dict.fromkeys("qkv", np.float32(X)), "16 bits; got float32"),
    "wide": (dict.fromkeys("qkv", X.repeat(9, -1)) | {"state": None}, "at most 128; got 144"),
    "wide_decay": (
        dict.fromkeys("qkv", X.repeat(5, -1))
        | {"state": None, "log_decay": np.zeros((1, 4, 2), np.float32)},
        "with a decay heads are at most 64 numbers wide; got 80",
    ),
}


@needs_interpreter
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    keywords, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=message):
        attention(**dict.fromkeys(("q", "k", "v", "state"), X) | keywords, **INTERPRETED)


@needs_interpreter
def test_64_bit_types_are_refused(x64):
    with pytest.raises(NotImplementedError, match="64-bit types"):
        attention(X, X, X, state=X, **INTERPRETED)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="what a machine without a GPU does")
def test_what_it_needs():
    """A newer jax first, then a GPU."""
    rejected = attention_plan(X, X, X, state=X, implementation="mosaic").rejected["mosaic"]
    newer = hasattr(mosaic_gpu, "InterpretGPUParams")
    assert rejected.startswith("needs a CUDA GPU" if newer else "needs jax 0.11.1 or later")


@needs_interpreter
@pytest.mark.parametrize("capability", [(7, 5), (10, 0)])
def test_other_gpus_are_refused(capability, monkeypatch):
    monkeypatch.setattr(devices, "compute_capability", lambda: capability)
    with pytest.raises(NotImplementedError, match=r"capability 8\.x or 9\.0; .*has \d+\.\d"):
        attention(X, X, X, state=X, implementation="mosaic")


@needs_interpreter
def test_a_product_leaves_numbers_where_the_next_one_takes_them():
    """By the fragments of ``mma.m16n8k16`` in the PTX manual; each of four warps has 16 rows.

    What is interpreted has no layouts.
    """
    shape = (64, 32)
    for layout, columns, order in (
        (plgpu.Layout.MMA_ACC("bfloat16"), 8, [(0, 0), (8, 0)]),
        (plgpu.Layout.MMA_LHS("bfloat16"), 16, [(0, 0), (8, 0), (0, 8), (8, 8)]),
    ):
        got = registers(layout.to_mgpu(), shape)
        for warp, lane in np.ndindex(4, 32):
            row, column = 16 * warp + lane // 4, 2 * (lane % 4)
            want = [
                [(row + down) * shape[1] + column + right + start + n for n in (0, 1)]
                for start in range(0, shape[1], columns)
                for down, right in order
            ]
            np.testing.assert_array_equal(got[warp, lane], want)


def registers(layout, shape):
    """Indices into a tile of what each register holds: ``[warps, lanes, registers, 2]``."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        kept, split = x.shape[: x.ndim - len(tile)], x.shape[x.ndim - len(tile) :]
        sizes = [n for pair in zip(split, tile, strict=True) for n in (pair[0] // pair[1], pair[1])]
        x, first = x.reshape(*kept, *sizes), len(kept)
        outer, inner = (range(first + k, first + len(sizes), 2) for k in (0, 1))
        x = x.transpose(*range(first), *outer, *inner)
    warps = [axis for axis in layout.warp_dims if isinstance(axis, int)]
    moved = [*warps, *layout.lane_dims, layout.vector_dim]
    x = np.moveaxis(x, moved, [*range(len(moved) - 1), -1])
    return x.reshape(4, 32, -1, 2)
