"""Encodings against formulas in numpy and, where they lie beside the tree, recorded runs."""

import pytest

from tape_jax._src.parity import report
from tests.library.parity import formulas
from tests.paths import ROOT

SHARED = ROOT.parent / "shared" / "golden_contextual"


def assert_parity(path):
    lines, ok = report.report(path)
    assert ok, "\n".join(lines)


@pytest.mark.parametrize("name", formulas.NAMES)
def test_recorded_runs(name):
    path = SHARED / f"{name}_tiny.npz"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside the tree")
    assert_parity(path)


@pytest.mark.parametrize("longest", [8, 32])
@pytest.mark.parametrize("time", [8, 9])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_longrope(share, time, longest, tmp_path):
    meta = {"theta": 50.0, "partial": share, "original_max": 8, "max": longest}
    planes = int(4 * share)
    meta |= {"long_factor": [1.5, 2, 3, 9][:planes], "short_factor": [1, 1.2, 2, 3][:planes]}
    formula = formulas.longrope(time, 8, meta)
    assert_parity(formulas.write(tmp_path, "longrope", formulas.heads(0, time, 8), formula, meta))
