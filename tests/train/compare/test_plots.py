"""Figures: what they show, and that nothing else is overwritten."""

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from matplotlib.patches import Rectangle

from tests.train.small import sum_grid
from train.compare import plots
from train.compare.plots import MARK, Series, heat_maps, line_panels, loss_curves, save


def make_grid(longest=4, trained=2, correct=0.5):
    lengths = tuple(range(1, longest + 1))
    counts = np.full((longest, longest), 10)
    shared = np.add.outer(lengths, lengths) <= 3
    return sum_grid(lengths, lengths, (counts * correct).astype(int), counts, shared, trained)


class TestHeatMaps:
    def test_shows_the_grids(self):
        grids = {"tape": make_grid(correct=0.7), "rope": make_grid(correct=0.2)}
        figure = heat_maps(grids)
        panels = [axes for axes in figure.axes if axes.images]
        assert len(panels) == 2
        for panel, (name, grid) in zip(panels, grids.items(), strict=True):
            np.testing.assert_allclose(panel.images[0].get_array(), 100 * grid.accuracy)
            assert panel.images[0].get_clim() == (0, 100)
            assert panel.images[0].origin == "lower"
            title = panel.get_title()
            assert title.startswith(name)
            assert f"trained range {100 * grid.inside.value:.1f} %" in title
            assert f"beyond {100 * grid.outside.value:.1f} %" in title
            assert [label.get_text() for label in panel.get_xticklabels()] == list("1234")
            (frame,) = (p for p in panel.patches if isinstance(p, Rectangle))
            assert frame.get_bbox().extents.tolist() == [-0.5, -0.5, 1.5, 1.5]
            assert len(panel.lines[0].get_xdata()) == grid.shared.sum() == 3
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == [
            "trained: 1 to 2 digits",
            "too few sums to hold any out: may have been trained on",
        ]

    def test_numbers_are_rounded_down(self):
        grid = sum_grid((1,), (1, 2), [[999, 0]], [[1000, 0]], [[False, False]], trained=1)
        panel = heat_maps({"x": grid}).axes[0]
        assert [text.get_text() for text in panel.texts] == ["99"]

    def test_png(self, tmp_path):
        path = tmp_path / "maps.png"
        save(heat_maps({name: make_grid(30, 15) for name in "abcde"}), path)
        save(heat_maps({"tape": make_grid(2, 2)}), path)
        image = matplotlib.image.imread(path)
        assert image.shape[0] > 400
        assert image.shape[1] > 400
        assert image.std() > 0.1
        assert [p.name for p in tmp_path.iterdir()] == ["maps.png"]

    def test_different_questions(self):
        with pytest.raises(ValueError, match="were not asked the same"):
            heat_maps({"a": make_grid(4), "b": make_grid(5)})


class TestLossCurves:
    def test_shows_the_losses(self):
        tape, again = ([0, 5, 10], [2.0, 1.0, 0.1]), ([0, 5], [2.1, 1.2])
        (axes,) = loss_curves({"tape": [tape, again], "rope": [([0, 5], [2.5, 1.5])]}).axes
        assert axes.get_yscale() == "log"
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["tape", "rope"]
        np.testing.assert_array_equal(axes.lines[0].get_xydata(), np.transpose(tape))
        np.testing.assert_array_equal(axes.lines[1].get_xydata(), np.transpose(again))
        assert axes.lines[0].get_color() == axes.lines[1].get_color() != axes.lines[2].get_color()
        assert axes.get_xlabel() == "training step"
        assert "nats" in axes.get_ylabel()

    @pytest.mark.parametrize(
        ("runs", "message"),
        [({}, "no runs"), ({"a": [([1, 2], [0.5])]}, "'a' has 2 steps but 1 losses")],
    )
    def test_bad_arguments(self, runs, message):
        with pytest.raises(ValueError, match=message):
            loss_curves(runs)


class TestSave:
    def test_interrupted_drawing_leaves_the_old_figure(self, tmp_path, monkeypatch):
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


class TestLinePanels:
    axes = {
        "title": "Perplexity by window length",
        "x_label": "tokens of a window",
        "y_label": "perplexity",
        "trained": 128,
    }

    def test_shows_the_lines(self):
        panels = {
            "left": {"a": Series([128, 256], [5.0, 50.0], [1.0, 2.0])},
            "right": {
                "b": Series([128, 512], [6.0, 7.0], [0.5, np.nan]),
                "a": Series([512], [900.0], [1.0]),
            },
        }
        figure = line_panels(panels, log=True, **self.axes)
        left, right = figure.axes
        assert [panel.get_title() for panel in (left, right)] == ["left", "right"]
        assert left.get_xscale() == right.get_yscale() == "log"
        assert [tick.get_text() for tick in right.get_xticklabels()] == ["128", "256", "512"]
        lines = {line.get_label(): line for line in right.lines}
        np.testing.assert_array_equal(lines["b"].get_xydata(), [[128, 6], [512, 7]])
        assert lines["trained length"].get_xdata() == [128, 128]
        assert lines["a"].get_color() == left.lines[0].get_color() != lines["b"].get_color()
        band = left.collections[0].get_paths()[0].vertices
        assert {tuple(v) for v in band} >= {(128, 4), (128, 6), (256, 48), (256, 52)}
        (legend,) = figure.legends
        texts = [text.get_text() for text in legend.get_texts()]
        assert sorted(texts) == ["a", "b", "trained length"]
        assert left.get_ylabel() == "perplexity"
        assert right.get_xlabel() == "tokens of a window"

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match="no panels"):
            line_panels({}, log=False, **self.axes)
        with pytest.raises(ValueError, match="line 'a' has 2 x, 1 y and 2 spreads"):
            line_panels({"": {"a": Series([1, 2], [1.0], [0.0, 0.0])}}, log=False, **self.axes)
