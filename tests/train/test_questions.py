"""Questions: their curves."""

import numpy as np
import pytest

from train.data.groups import Words
from train.data.questions import depth_curves
from train.grids import Grid


def grid(*correct, counts=(10, 10, 0)):
    """Words of one to three elements, trained to one; none of three is asked."""
    return Grid(
        rows=(1,),
        columns=(1, 2, 3),
        lengths=[[1, 2, 3]],
        correct=[[*correct, 0]],
        counts=[counts],
        shared=[[False] * 3],
        trained=1,
        wording=Words("A5", 1).wording,
    )


def test_depth_curves():
    """Means over seeds; what was not run has no line, what was not asked no point."""
    grids = {"rope": {1: [grid(9, 3), grid(10, 4)], 2: [grid(10, 8)]}, "tape": {2: [], 1: []}}
    figure = depth_curves(grids, title="A5", y_label="right, %")
    assert [panel.get_title() for panel in figure.axes] == ["1 layer", "2 layers"]
    one, two = figure.axes
    np.testing.assert_allclose(one.lines[0].get_xydata(), [[1, 95], [2, 35]])
    np.testing.assert_allclose(two.lines[0].get_xydata(), [[1, 100], [2, 80]])
    assert [line.get_label() for line in two.lines] == ["rope", "trained length"]
    others = {"rope": {1: [grid(9, 3), grid(9, 3, counts=(10, 20, 0))]}}
    with pytest.raises(ValueError, match=r"'rope, 1 layers, seed 1' were not asked the same"):
        depth_curves(others, title="A5", y_label="right, %")
    with pytest.raises(ValueError, match="no grids to compare"):
        depth_curves({}, title="A5", y_label="right, %")
