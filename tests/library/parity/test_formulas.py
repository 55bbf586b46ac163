"""Encodings against formulas in plain numpy, in files of the form of recorded runs.

Gradients are complex steps: ``f(x + ih).imag / h``, exact for functions that are analytic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tape_jax._src.parity import report

Arrays = dict[str, np.ndarray]
# From the inputs: ``o`` and everything else that is recorded.
Formula = Callable[[Arrays], Arrays]

STEP = 1e-30


def write(
    folder: Path, name: str, inputs: Arrays, formula: Formula, meta: dict[str, Any], **fixed: Any
) -> Path:
    """The path of a file with a formula's outputs, and gradients of what is not ``fixed``."""
    found = formula(inputs | fixed)
    do = np.random.default_rng(1).normal(size=found["o"].shape)
    arrays = {**inputs, **fixed, **found, "do": do}
    for given in inputs:
        gradient = np.zeros_like(inputs[given])
        for place in np.ndindex(gradient.shape):
            moved = inputs[given].astype(complex)
            moved[place] += STEP * 1j
            changed = formula(inputs | fixed | {given: moved})["o"]
            gradient[place] = np.sum(changed * do).imag / STEP
        arrays[f"grad_{given}"] = gradient
    meta = meta | {"name": name, "inputs": [*inputs, *fixed], "intermediates": []}
    path = folder / f"{name}_formula.npz"
    np.savez(path, **arrays, meta=np.array(json.dumps(meta)))
    return path


def heads(seed: int, time: int, dim: int, q: int = 2, kv: int = 2) -> Arrays:
    """Queries, keys and values of one row."""
    rng = np.random.default_rng(seed)
    counts = {"q": q, "k": kv, "v": kv}
    return {name: rng.normal(size=(1, time, count, dim)) for name, count in counts.items()}


def turned(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """``x [B, T, H, D]`` with the pairs ``(c, c + r/2)`` turned by angles ``[..., T, r/2]``."""
    planes = angles.shape[-1]
    first, second, rest = np.split(x, [planes, 2 * planes], axis=-1)
    cos, sin = np.cos(angles)[..., None, :], np.sin(angles)[..., None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> Arrays:
    """Causal softmax attention of queries and keys that hold their positions."""
    group = q.shape[2] // k.shape[2]
    keys, values = (np.repeat(x, group, axis=2) for x in (k, v))
    logits = np.einsum("bihd,bjhd->bhij", q, keys) * scale
    seen = np.tri(q.shape[1], dtype=bool)
    weights = np.where(seen, np.exp(logits - logits.real.max(-1, keepdims=True)), 0)
    weights = weights / weights.sum(-1, keepdims=True)
    o = np.einsum("bhij,bjhd->bihd", weights, values)
    return {"o": o, "q_rot": q, "k_rot": k, "logits": np.where(seen, logits, 0)}


def longrope(time: int, dim: int, meta: dict[str, Any]) -> Formula:
    """Frequencies divided one by one, and a magnitude, of the share that rotates."""
    planes = int(dim * meta["partial"]) // 2
    divisors = meta["long_factor" if time > meta["original_max"] else "short_factor"]
    omega = np.array([1 / (x * meta["theta"] ** (c / planes)) for c, x in enumerate(divisors)])
    ratio = meta["max"] / meta["original_max"]
    a = math.sqrt(1 + math.log(ratio) / math.log(meta["original_max"])) if ratio > 1 else 1.0

    def formula(given: Arrays) -> Arrays:
        scale = np.where(np.arange(dim) < 2 * planes, a, 1.0)
        q, k = (turned(given[x], np.arange(time)[:, None] * omega) * scale for x in "qk")
        found = attended(q, k, given["v"], dim**-0.5)
        return found | {"inv_freq": omega, "attention_factor": np.array(a)}

    return formula


def mrope(axis: list[int], theta: float) -> Formula:
    """Each frequency turns by one coordinate of ``pos_ids [3, B, T]``, by its ``axis``."""
    planes = len(axis)

    def formula(given: Arrays) -> Arrays:
        omega = theta ** (-np.arange(planes) / planes)
        angles = np.stack([given["pos_ids"][a] * w for a, w in zip(axis, omega, strict=True)], -1)
        q, k = (turned(given[x], angles) for x in "qk")
        return attended(q, k, given["v"], (2 * planes) ** -0.5) | {"inv_freq": omega}

    return formula


def fope(dim: int, time: int, meta: dict[str, Any]) -> Formula:
    """Sums of sines and cosines in the first planes, 1 + i in the others."""
    omega = [meta["theta"] ** (-2 * c / dim) for c in range(dim // 2)]
    kept = np.array([w for w in omega if w >= 2 * math.pi / meta["max_sequence_length"]])

    def formula(given: Arrays) -> Arrays:
        planes = given["sin_coef"].shape[-1]
        angles = np.arange(time)[:, None] * kept
        sines = np.einsum("tc,hcn->thn", np.sin(angles), given["sin_coef"])
        cosines = np.einsum("tc,hcn->thn", np.cos(angles), given["cos_coef"])
        still = np.ones((*sines.shape[:2], dim // 2 - planes))
        sines, cosines = (np.concatenate([x, still], axis=-1) for x in (sines, cosines))
        found = []
        for x in (given["q"], given["k"]):
            first, second = np.split(x, 2, axis=-1)
            real, imaginary = first * cosines - second * sines, first * sines + second * cosines
            found.append(np.concatenate([real, imaginary], axis=-1))
        return attended(*found, given["v"], dim**-0.5) | {"inv_freq": kept}

    return formula


def rope_pp(time: int, dim: int, theta: float) -> Formula:
    """Two heads of each query: turned, and turned a quarter less."""
    omega = np.array([theta ** (-2 * c / dim) for c in range(dim // 2)])
    angles = np.arange(time)[:, None] * omega

    def formula(given: Arrays) -> Arrays:
        both = np.stack([turned(given["q"], angles - x) for x in (0, np.pi / 2)], axis=3)
        q = both.reshape(1, time, -1, dim)
        return attended(q, turned(given["k"], angles), given["v"], dim**-0.5) | {"inv_freq": omega}

    return formula


def pope(time: int, turning: int, theta: float) -> Formula:
    """The first coordinates as lengths of vectors in planes of their own."""
    omega = np.array([theta ** (-c / turning) for c in range(turning)])
    angles = np.arange(time)[:, None, None] * omega

    def planes(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
        length = np.log(1 + np.exp(x[..., :turning]))
        pairs = [length * np.cos(angles), length * np.sin(angles)]
        found = np.stack(pairs, axis=-1).reshape(*x.shape[:-1], -1)
        return np.concatenate([found, x[..., turning:]], axis=-1)

    def formula(given: Arrays) -> Arrays:
        phase = given["phase_bias"]
        phase = np.where(phase.real > 0, 0, np.where(phase.real < -2 * np.pi, -2 * np.pi, phase))
        q, k = planes(given["q"], angles), planes(given["k"], angles + phase)
        return attended(q, k, given["v"], given["q"].shape[-1] ** -0.5) | {"inv_freq": omega}

    return formula


def assert_parity(path):
    lines, ok = report.report(path)
    assert ok, "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "time", "longest"), [(1.0, 8, 32), (0.5, 9, 8)])
def test_longrope(share, time, longest, tmp_path):
    meta = {"theta": 50.0, "partial": share, "original_max": 8, "max": longest}
    planes = int(4 * share)
    meta |= {"long_factor": [1.5, 2, 3, 9][:planes], "short_factor": [1, 1.2, 2, 3][:planes]}
    formula = longrope(time, 8, meta)
    assert_parity(write(tmp_path, "longrope", heads(0, time, 8), formula, meta))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "interleaved", "axis"),
    [
        ([1, 1, 2], False, [0, 1, 2, 2]),
        ([4, 1, 3], True, [0, 1, 2, 0, 0, 2, 0, 0]),
    ],
)
def test_mrope(section, interleaved, axis, tmp_path):
    name = "mrope_interleaved" if interleaved else "mrope"
    meta = {"theta": 60.0, "section": section, "layout": name.removeprefix("mrope_")}
    pos_ids = np.random.default_rng(0).integers(0, 9, (3, 1, 6)).astype(float)
    inputs = heads(0, 6, 2 * len(axis))
    formula = mrope(axis, 60.0)
    assert_parity(write(tmp_path, name, inputs, formula, meta, pos_ids=pos_ids))


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("dim", "length"), [(8, 64), (8, 8)])
def test_fope(dim, length, tmp_path):
    meta = {"theta": 30.0, "max_sequence_length": length}
    kept = sum(30.0 ** (-2 * c / dim) >= 2 * np.pi / length for c in range(dim // 2))
    inputs, rng = heads(0, 6, dim), np.random.default_rng(1)
    shape = (2, kept, min(kept, dim // 4))
    inputs |= {name: rng.normal(size=shape) for name in ("sin_coef", "cos_coef")}
    formula = fope(dim, 6, meta)
    assert_parity(write(tmp_path, "fope", inputs, formula, meta))


@pytest.mark.slow
def test_rope_pp(tmp_path):
    inputs, formula = heads(0, 6, 8, kv=1), rope_pp(6, 8, 50.0)
    meta = {"theta": 50.0, "imag_mode": "imag2"}
    assert_parity(write(tmp_path, "rope_pp", inputs, formula, meta))


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("turning", "kv"), [(8, 1), (5, 2)])
def test_pope(turning, kv, tmp_path):
    """With phases at both bounds, where they have a gradient, and beyond, where they have none."""
    inputs, formula = heads(0, 6, 8, kv=kv), pope(6, turning, 50.0)
    phase = np.random.default_rng(1).uniform(-6, 0, (kv, turning))
    phase[0, :4] = 0, -2 * np.pi, 0.5, -7
    meta = {"theta": 50.0, "rotate_dim": turning}
    path = write(tmp_path, "pope", inputs | {"phase_bias": phase}, formula, meta)
    assert_parity(path)
