"""Figures: what they show, and that nothing else is overwritten."""

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from tests.train.small import sum_grid
from train.compare import plots
from train.compare.plots import MARK, Series, heat_maps, line_panels, loss_curves, save


def make_grid(correct):
    lengths = tuple(range(1, 5))
    counts = np.full((4, 4), 10)
    shared = np.add.outer(lengths, lengths) <= 3
    return sum_grid(lengths, lengths, (counts * correct).astype(int), counts, shared, 2)


def test_heat_maps():
    grids = {"tape": make_grid(0.7), "rope": make_grid(0.2)}
    panels = [axes for axes in heat_maps(grids).axes if axes.images]
    for panel, (name, grid) in zip(panels, grids.items(), strict=True):
        np.testing.assert_allclose(panel.images[0].get_array(), 100 * grid.accuracy)
        assert panel.images[0].get_clim() == (0, 100)
        assert panel.images[0].origin == "lower"
        title = panel.get_title()
        assert title.startswith(name)
        assert f"trained range {100 * grid.inside.value:.1f} %" in title
        assert f"beyond {100 * grid.outside.value:.1f} %" in title
        (frame,) = (p for p in panel.patches if isinstance(p, Rectangle))
        assert frame.get_bbox().extents.tolist() == [-0.5, -0.5, 1.5, 1.5]
        assert len(panel.lines[0].get_xdata()) == grid.shared.sum() == 3


def test_numbers_of_a_heat_map_are_rounded_down():
    grid = sum_grid((1,), (1, 2), [[999, 0]], [[1000, 0]], [[False, False]], trained=1)
    panel = heat_maps({"x": grid}).axes[0]
    assert [text.get_text() for text in panel.texts] == ["99"]


def test_an_interrupted_drawing_leaves_the_old_figure(tmp_path, monkeypatch):
    path = tmp_path / "loss.png"
    save(loss_curves({"a": [([0, 1], [2.0, 1.0])]}), path)
    before = path.read_bytes()
    assert MARK.encode() in before[:1000]

    def interrupted(figure, file, **options):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(plots.Figure, "savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(loss_curves({"a": [([0, 1], [3.0, 1.0])]}), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]


def test_line_panels():
    panels = {
        "left": {"a": Series([128, 256], [5.0, 50.0], [1.0, 2.0])},
        "right": {
            "b": Series([128, 512], [6.0, 7.0], [0.5, np.nan]),
            "a": Series([512], [900.0], [1.0]),
        },
    }
    labels = {"title": "", "x_label": "", "y_label": "", "trained": 128}
    left, right = line_panels(panels, log=True, **labels).axes
    assert [panel.get_title() for panel in (left, right)] == ["left", "right"]
    assert left.get_xscale() == right.get_yscale() == "log"
    lines = {line.get_label(): line for line in right.lines}
    np.testing.assert_array_equal(lines["b"].get_xydata(), [[128, 6], [512, 7]])
    assert lines["trained length"].get_xdata() == [128, 128]
    assert lines["a"].get_color() == left.lines[0].get_color() != lines["b"].get_color()
    band = left.collections[0].get_paths()[0].vertices
    assert {tuple(v) for v in band} >= {(128, 4), (128, 6), (256, 48), (256, 52)}


@pytest.mark.parametrize("values", [[np.nan, np.inf], [3.0, np.nan]])
def test_line_panels_of_what_is_not_finite(values, tmp_path):
    panels = {"": {"a": Series([128, 256], values, [0.0, np.inf])}}
    labels = {"title": "", "x_label": "", "y_label": "", "trained": 128}
    figure = line_panels(panels, log=True, **labels)
    save(figure, tmp_path / "figure.png")
    drawn = [x for x in values if np.isfinite(x)]
    assert [y for _, y in figure.axes[0].lines[0].get_xydata() if np.isfinite(y)] == drawn
