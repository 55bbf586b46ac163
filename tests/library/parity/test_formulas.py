"""Encodings against formulas in numpy."""

import numpy as np
import pytest

from tape_jax._src.parity import report
from tests.library.parity import formulas


def assert_parity(path):
    lines, ok = report.report(path)
    assert ok, "\n".join(lines)


@pytest.mark.parametrize("longest", [8, 32])
@pytest.mark.parametrize("time", [8, 9])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_longrope(share, time, longest, tmp_path):
    meta = {"theta": 50.0, "partial": share, "original_max": 8, "max": longest}
    planes = int(4 * share)
    meta |= {"long_factor": [1.5, 2, 3, 9][:planes], "short_factor": [1, 1.2, 2, 3][:planes]}
    formula = formulas.longrope(time, 8, meta)
    assert_parity(formulas.write(tmp_path, "longrope", formulas.heads(0, time, 8), formula, meta))


@pytest.mark.parametrize(
    ("section", "interleaved", "axis"),
    [
        ([1, 1, 2], False, [0, 1, 2, 2]),
        ([2, 1, 1], True, [0, 1, 2, 0]),
        ([4, 2, 2], False, [0, 0, 0, 0, 1, 1, 2, 2]),
        ([4, 1, 3], True, [0, 1, 2, 0, 0, 2, 0, 0]),
        ([0, 8, 0], False, [1] * 8),
    ],
)
def test_mrope(section, interleaved, axis, tmp_path):
    name = "mrope_interleaved" if interleaved else "mrope"
    meta = {"theta": 60.0, "section": section, "layout": name.removeprefix("mrope_")}
    pos_ids = np.random.default_rng(0).integers(0, 9, (3, 1, 6)).astype(float)
    inputs = formulas.heads(0, 6, 2 * len(axis))
    formula = formulas.mrope(axis, 60.0)
    assert_parity(formulas.write(tmp_path, name, inputs, formula, meta, pos_ids=pos_ids))


@pytest.mark.parametrize(("dim", "length"), [(8, 64), (8, 8), (16, 4096)])
def test_fope(dim, length, tmp_path):
    meta = {"theta": 30.0, "max_sequence_length": length}
    kept = sum(30.0 ** (-2 * c / dim) >= 2 * np.pi / length for c in range(dim // 2))
    inputs, rng = formulas.heads(0, 6, dim), np.random.default_rng(1)
    shape = (2, kept, min(kept, dim // 4))
    inputs |= {name: rng.normal(size=shape) for name in ("sin_coef", "cos_coef")}
    formula = formulas.fope(dim, 6, meta)
    assert_parity(formulas.write(tmp_path, "fope", inputs, formula, meta))


@pytest.mark.parametrize("kv", [1, 2])
def test_rope_pp(kv, tmp_path):
    inputs, formula = formulas.heads(0, 6, 8, kv=kv), formulas.rope_pp(6, 8, 50.0)
    meta = {"theta": 50.0, "imag_mode": "imag2"}
    assert_parity(formulas.write(tmp_path, "rope_pp", inputs, formula, meta))


@pytest.mark.parametrize("kv", [1, 2])
@pytest.mark.parametrize("turning", [8, 5])
def test_pope(turning, kv, tmp_path):
    """With phases at both bounds, where they have a gradient, and beyond, where they have none."""
    inputs, formula = formulas.heads(0, 6, 8, kv=kv), formulas.pope(6, turning, 50.0)
    phase = np.random.default_rng(1).uniform(-6, 0, (kv, turning))
    phase[0, :4] = 0, -2 * np.pi, 0.5, -7
    meta = {"theta": 50.0, "rotate_dim": turning}
    path = formulas.write(tmp_path, "pope", inputs | {"phase_bias": phase}, formula, meta)
    assert_parity(path)
