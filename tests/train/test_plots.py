"""Figures and reports: what they show, and that nothing else is overwritten."""

from pathlib import Path

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from matplotlib.patches import Rectangle

from train import plots
from train.evaluate import Answer, Grid
from train.plots import MARK, RunRecord, heat_maps, loss_curves, write_report


def make_grid(longest=4, trained=2, correct=0.5):
    lengths = tuple(range(1, longest + 1))
    counts = np.full((longest, longest), 10)
    shared = np.add.outer(lengths, lengths) <= 3
    return Grid(lengths, lengths, (counts * correct).astype(int), counts, shared, trained)


def make_run(name="tape", **changes):
    fields = {
        "name": name,
        "grid": make_grid(),
        "steps": [0, 10, 20],
        "losses": [2.0, 0.5, 0.1],
        "command": f"python -m train.main train --run=runs/{name}",
        "facts": {"parameters": "12 k"},
        "answers": [Answer("407+85", "492", "492")],
    }
    return RunRecord(**{**fields, **changes})


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, by file name."""
    saved, save = {}, plots._save

    def keep(figure, path):
        saved[path.name] = figure
        save(figure, path)

    monkeypatch.setattr(plots, "_save", keep)
    return saved


class TestHeatMaps:
    def test_shows_the_grids(self, tmp_path, figures):
        grids = {"tape": make_grid(correct=0.7), "rope": make_grid(correct=0.2)}
        heat_maps(grids, tmp_path / "maps.png")
        figure = figures["maps.png"]
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

    def test_numbers_are_rounded_down(self, tmp_path, figures):
        grid = Grid((1,), (1, 2), [[999, 0]], [[1000, 0]], [[False, False]], trained=1)
        heat_maps({"x": grid}, tmp_path / "maps.png")
        panel = figures["maps.png"].axes[0]
        assert [text.get_text() for text in panel.texts] == ["99"]

    def test_png(self, tmp_path):
        path = tmp_path / "maps.png"
        heat_maps({name: make_grid(30, 15) for name in "abcde"}, path)
        heat_maps({"tape": make_grid(2, 2)}, path)
        image = matplotlib.image.imread(path)
        assert image.shape[0] > 400
        assert image.shape[1] > 400
        assert image.std() > 0.1
        assert [p.name for p in tmp_path.iterdir()] == ["maps.png"]

    def test_reads_in_greyscale(self):
        colours = matplotlib.colormaps[plots.COLOURS](np.linspace(0, 1, 101))[:, :3]
        luminance = colours @ [0.2126, 0.7152, 0.0722]
        assert np.all(np.diff(luminance) > 0)
        assert luminance[-1] - luminance[0] > 0.6

    def test_no_global_state(self, tmp_path):
        before = dict(matplotlib.rcParams)
        heat_maps({"tape": make_grid()}, tmp_path / "maps.png")
        assert dict(matplotlib.rcParams) == before
        assert "pyplot" not in Path(plots.__file__).read_text()

    def test_different_questions(self, tmp_path):
        with pytest.raises(ValueError, match="were not asked the same"):
            heat_maps({"a": make_grid(4), "b": make_grid(5)}, tmp_path / "maps.png")
        assert not list(tmp_path.iterdir())


class TestLossCurves:
    def test_shows_the_losses(self, tmp_path, figures):
        runs = {"tape": ([0, 5, 10], [2.0, 1.0, 0.1]), "rope": ([0, 5], [2.5, 1.5])}
        loss_curves(runs, tmp_path / "loss.png")
        (axes,) = figures["loss.png"].axes
        assert axes.get_yscale() == "log"
        assert [line.get_label() for line in axes.lines] == ["tape", "rope"]
        np.testing.assert_array_equal(axes.lines[0].get_xydata(), np.transpose(runs["tape"]))
        assert axes.get_xlabel() == "training step"
        assert "nats" in axes.get_ylabel()

    @pytest.mark.parametrize(
        ("runs", "message"),
        [({}, "no runs"), ({"a": ([1, 2], [0.5])}, "'a' has 2 steps but 1 losses")],
    )
    def test_bad_arguments(self, tmp_path, runs, message):
        with pytest.raises(ValueError, match=message):
            loss_curves(runs, tmp_path / "loss.png")
        assert not list(tmp_path.iterdir())


class TestReport:
    def test_content(self, tmp_path):
        folder = tmp_path / "new" / "report"
        wrong = Answer("99+1", "10", "100")
        runs = [make_run("tape"), make_run("rope", answers=[wrong])]
        path = write_report(folder, runs, title="A title")
        assert path == folder / "report.md"
        assert sorted(p.name for p in folder.iterdir()) == [
            "exact_match.png",
            "loss.png",
            "report.md",
        ]
        text = path.read_text()
        for part in (
            "# A title",
            "numbers of 1 to 2 digits",
            "160 in all",
            "![Exact match by operand lengths](exact_match.png)",
            "![Training loss](loss.png)",
            "| parameters | 12 k | 12 k |",
            "* tape: 407+85 = 492 (right)",
            "* rope: 99+1 = 10 (wrong: it is 100)",
            "```\n" + runs[0].command + "\n" + runs[1].command + "\n```",
            f"| numpy            | {np.__version__}",
        ):
            assert part in text

    def test_given_environment(self, tmp_path):
        text = write_report(tmp_path, [make_run()], environment={"gpu": "a big one"}).read_text()
        assert "| gpu  | a big one |" in text
        assert "numpy" not in text

    def test_replaces_its_own(self, tmp_path):
        write_report(tmp_path, [make_run()], title="First")
        path = write_report(tmp_path, [make_run()], title="Second")
        assert "# Second" in path.read_text()
        assert len(list(tmp_path.iterdir())) == 3

    @pytest.mark.parametrize("name", ["report.md", "exact_match.png", "loss.png"])
    def test_leaves_other_files_alone(self, tmp_path, name):
        (tmp_path / name).write_text("precious")
        with pytest.raises(ValueError, match=f"{name} exists and was not written by this program"):
            write_report(tmp_path, [make_run()])
        assert [p.name for p in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_text() == "precious"

    def test_folder_in_the_way(self, tmp_path):
        (tmp_path / "report.md").mkdir()
        with pytest.raises(ValueError, match="exists and is not a file"):
            write_report(tmp_path, [make_run()])

    def test_folder_is_a_file(self, tmp_path):
        path = tmp_path / "file"
        path.write_text("precious")
        for folder in (path, path / "below"):
            with pytest.raises(ValueError, match="is not a folder and cannot become one"):
                write_report(folder, [make_run()])
        assert path.read_text() == "precious"

    @pytest.mark.parametrize(
        ("runs", "message"),
        [
            ([], "no grids to compare"),
            ([make_run(), make_run()], "runs of the same name"),
            ([make_run("a"), make_run("b", facts={})], "different facts"),
            ([make_run("a"), make_run("b", grid=make_grid(5))], "were not asked the same"),
            ([make_run(losses=[1.0])], "has 3 steps but 1 losses"),
        ],
    )
    def test_runs_that_do_not_fit(self, tmp_path, runs, message):
        with pytest.raises(ValueError, match=message):
            write_report(tmp_path / "report", runs)
        assert not (tmp_path / "report").exists()

    def test_interrupted_drawing_leaves_the_old_figure(self, tmp_path, monkeypatch):
        path = tmp_path / "loss.png"
        loss_curves({"a": ([0, 1], [2.0, 1.0])}, path)
        before = path.read_bytes()
        assert MARK.encode() in before[:1000]

        def interrupted(figure, file, **options):
            file.write(b"half")
            raise KeyboardInterrupt

        monkeypatch.setattr(plots.Figure, "savefig", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loss_curves({"a": ([0, 1], [3.0, 1.0])}, path)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]
