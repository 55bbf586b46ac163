"""The report: what it says, whom it declares the winner, and that nothing else is overwritten."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from train.compare.report import (
    ADJUSTED,
    ONE_SEED,
    PAGE,
    TWO_SEEDS,
    RunRecord,
    fitting_table,
    score_table,
    verdict,
    write_report,
)
from train.compare.tasks import Comparison
from train.evaluation.grids import text_table
from train.tasks import Score


@dataclasses.dataclass(frozen=True)
class FixedResult:
    """A result with a given summary."""

    values: dict

    def summary(self):
        return self.values


class FixedTask:
    """A task whose report is fixed."""

    scores = (Score("loss", "loss, nats", False), Score("right", "right, %", True, 100))


def compared():
    """What is said of two results."""
    figure = Figure()
    figure.subplots().plot([1, 2])
    sections = {"Of its own": "2 results ![x](own.png)"}
    return Comparison("A title", "What was asked.", sections, {"own.png": figure})


def make_run(name="tape", seed=0, **changes):
    fields = {
        "name": name,
        "seed": seed,
        "result": FixedResult({"loss": 1.5}),
        "steps": [0, 10, 20],
        "losses": [2.0, 0.5, 0.1],
        "command": f"python -m train.main train --run=runs/{name}",
        "facts": {"parameters": "12 k"},
        "samples": ["407+85 = 492 (right)"],
    }
    return RunRecord(**{**fields, **changes})


def losses(**by_name):
    """Runs with the given loss for each seed."""
    return [
        make_run(name, seed, result=FixedResult({"loss": value}))
        for name, values in by_name.items()
        for seed, value in enumerate(values)
    ]


def squeezed(text):
    """Without the spaces that align tables."""
    return re.sub(" +", " ", text)


class TestReport:
    def test_content(self, tmp_path):
        folder = tmp_path / "new" / "report"
        runs = [make_run("tape"), make_run("rope", samples=["99+1 = 10 (wrong: it is 100)"])]
        path = write_report(folder, FixedTask(), runs, compared())
        assert path == folder / "report.md"
        assert sorted(p.name for p in folder.iterdir()) == [
            *("loss.png", "own.png", "report.json", "report.md")
        ]
        record = json.loads((folder / "report.json").read_text())
        assert [(r["name"], r["seed"]) for r in record["runs"]] == [("tape", 0), ("rope", 0)]
        assert record["runs"][0]["scores"] == runs[0].result.summary()
        text = path.read_text()
        for part in (
            "# A title\n\nWhat was asked.",
            "## Of its own\n\n2 results ![x](own.png)",
            "![Training loss](loss.png)",
            "| parameters | 12 k | 12 k |",
            "* tape, seed 0: 407+85 = 492 (right)",
            "* rope, seed 0: 99+1 = 10 (wrong: it is 100)",
            "```\n" + runs[0].command + "\n" + runs[1].command + "\n```",
            f"| numpy | {np.__version__}",
        ):
            assert part in squeezed(text)

    def test_of_trainings_that_diverged(self, tmp_path):
        runs = [make_run("tape"), make_run("rope", result=None, steps=[], losses=[], samples=())]
        text = write_report(tmp_path, FixedTask(), runs, compared()).read_text()
        assert "Diverged in training, and without scores: rope, seed 0." in text
        assert [
            r["scores"] for r in json.loads((tmp_path / "report.json").read_text())["runs"]
        ] == [
            {"loss": 1.5},
            {},
        ]

    def test_numbers_that_are_not_finite(self, tmp_path):
        values = {"loss": float("nan"), "right": float("inf")}
        write_report(tmp_path, FixedTask(), [make_run(result=FixedResult(values))], compared())

        def constant(name):
            raise ValueError(f"{name} is no JSON")

        record = json.loads((tmp_path / "report.json").read_text(), parse_constant=constant)
        assert record["runs"][0]["scores"] == {"loss": None, "right": None}

    def test_replaces_its_own(self, tmp_path):
        write_report(tmp_path, FixedTask(), [make_run(command="first")], compared())
        path = write_report(tmp_path, FixedTask(), [make_run(command="second")], compared())
        assert "\nsecond\n" in path.read_text()
        assert len(list(tmp_path.iterdir())) == 4

    @pytest.mark.parametrize("name", ["report.md", "report.json", "own.png", "loss.png"])
    def test_leaves_other_files_alone(self, tmp_path, name):
        (tmp_path / name).write_text("precious")
        with pytest.raises(ValueError, match=f"{name} exists and was not written by this program"):
            write_report(tmp_path, FixedTask(), [make_run()], compared())
        assert [p.name for p in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_text() == "precious"

    def test_folder_is_a_file(self, tmp_path):
        path = tmp_path / "file"
        path.write_text("precious")
        for folder in (path, path / "below"):
            with pytest.raises(ValueError, match="is not a folder and cannot become one"):
                write_report(folder, FixedTask(), [make_run()], compared())
        assert path.read_text() == "precious"

    @pytest.mark.parametrize(
        ("runs", "message"),
        [
            ([], "no runs to report"),
            ([make_run(), make_run()], "runs of the same name and seed"),
            ([make_run("a"), make_run("b", facts={})], "different facts"),
            ([make_run(losses=[1.0])], "has 3 steps but 1 losses"),
        ],
    )
    def test_runs_that_do_not_fit(self, tmp_path, runs, message):
        with pytest.raises(ValueError, match=message):
            write_report(tmp_path / "report", FixedTask(), runs, compared())
        assert not (tmp_path / "report").exists()


class TestVerdict:
    def test_a_clear_winner(self):
        text = verdict(FixedTask.scores, losses(rope=[2.0, 2.1, 2.2], tape=[1.5, 1.6, 1.72]))
        assert text == ("* **loss, nats**: tape wins; clearly better than rope.")

    def test_higher_is_better(self):
        runs = [
            make_run(name, seed, result=FixedResult({"right": value + seed / 1000}))
            for name, value in (("a", 0.5), ("b", 0.9))
            for seed in range(3)
        ]
        runs = [dataclasses.replace(r, result=FixedResult({"right": 0.5})) for r in runs[:3]] + [
            dataclasses.replace(r, result=FixedResult({"right": v}))
            for r, v in zip(runs[3:], (0.90, 0.91, 0.92), strict=True)
        ]
        assert "**right, %**: b wins;" in verdict(FixedTask.scores, runs)

    def test_seeds_that_do_not_suffice(self):
        runs = losses(tape=[1.0, 2.0, 3.0], rope=[1.5, 1.9, 3.1], alibi=[9.0, 9.5, 10.1])
        assert verdict(FixedTask.scores, runs) == (
            "* **loss, nats**: no clear winner. Best on average is tape, with no significant "
            f"difference to rope; clearly better than alibi.\n\n{ADJUSTED}"
        )

    def test_chance_rarely_makes_a_claim(self):
        """Of six rivals that are alike; without the adjustment a third of the reports would."""
        rng, reports = np.random.default_rng(0), 150
        drawn = rng.normal(size=(reports, 6, 3)).tolist()
        found = [
            verdict(FixedTask.scores, losses(**dict(zip("abcdef", x, strict=True)))) for x in drawn
        ]
        assert sum("clearly better" in text for text in found) <= 0.08 * reports

    @pytest.mark.parametrize("worst", [math.nan, math.inf])
    def test_what_is_not_finite_is_the_worst(self, worst):
        text = verdict(FixedTask.scores, losses(tape=[worst], rope=[5.0], alibi=[3.0]))
        assert "**loss, nats**: best is alibi. Without a finite score in every seed: tape." in text
        runs = losses(tape=[1.0, 1.1, worst], rope=[5.0, 5.1, 5.3], alibi=[3.0, 3.2, 3.1])
        text = verdict(FixedTask.scores, runs)
        assert "alibi wins; clearly better than rope. Without a finite score in every" in text
        assert f"| {worst} |" in squeezed(score_table(FixedTask.scores, runs))
        text = verdict(FixedTask.scores, losses(tape=[math.inf], rope=[math.inf]))
        assert "none is finite. Without a finite score in every seed: tape, rope." in text
        higher = [
            make_run(n, result=FixedResult({"right": x})) for n, x in (("a", worst), ("b", 0))
        ]
        assert "best is b. Without" in verdict(FixedTask.scores, higher)

    def test_numbers_too_large_to_be_squared_tell_nothing(self):
        runs = losses(tape=[1e300, 1.1e300, 0.9e300], rope=[1.7e308] * 3)
        assert "Best on average is tape" in verdict(FixedTask.scores, runs)

    def test_what_diverged_is_the_worst_and_is_named(self):
        lost = [make_run("rope", seed, result=None) for seed in range(3)]
        runs = [*losses(tape=[1.0, 1.1, 1.2], alibi=[9.0, 9.1, 9.3]), *lost]
        text = verdict(FixedTask.scores, runs)
        assert "tape wins; clearly better than alibi. Without a finite score in every" in text
        assert text.endswith("scores: rope, seed 0; rope, seed 1; rope, seed 2.")
        assert "right" not in text
        assert verdict(FixedTask.scores, lost).startswith("Diverged in training")

    def test_what_diverged_makes_no_other_one_better(self):
        both = {"tape": [0.1, 0.2, 0.3], "alibi": [0.5, 0.5, 0.5]}
        assert "tape wins; clearly better than alibi." in verdict(FixedTask.scores, losses(**both))
        for other in ([0.4, 0.6, 0.5], [0.4, 0.6, math.nan]):
            text = verdict(FixedTask.scores, losses(**both, rope=other))
            assert "no clear winner. Best on average is tape, with no significant" in text

    def test_seeds_that_only_one_has_tell_nothing(self):
        first = losses(tape=[1.0, 1.1, 1.2])
        second = [make_run("rope", s, result=FixedResult({"loss": 5.0})) for s in (2, 3, 4)]
        assert "no clear winner" in verdict(FixedTask.scores, [*first, *second])

    def test_one_seed_proves_nothing(self):
        text = verdict(FixedTask.scores, losses(tape=[1.0], rope=[5.0]))
        assert text == f"* **loss, nats**: best is tape.\n\n{ONE_SEED}"

    def test_two_seeds_leave_one_degree_of_freedom(self):
        runs = losses(tape=[1.0, 1.1], rope=[2.0, 2.3])
        assert verdict(FixedTask.scores, runs).endswith(f"\n\n{TWO_SEEDS}")
        assert TWO_SEEDS not in verdict(
            FixedTask.scores, losses(tape=[1.0, 1.1, 1.2], rope=[2.0, 2.3, 2.4])
        )

    def test_scores_of_one_outcome_stand_together(self):
        runs = [
            make_run(name, seed, result=FixedResult({"right": x, "loss": 1 - x}))
            for name, x in (("tape", 0.5), ("rope", 0.25))
            for seed in range(3)
        ]
        (line,) = verdict(FixedTask.scores, runs).splitlines()
        labels = "; ".join(score.label for score in FixedTask.scores)
        assert line.startswith(f"* **{labels}**: tape wins")

    def test_equal(self):
        assert "all equal." in verdict(FixedTask.scores, losses(tape=[1.0, 1.0], rope=[1.0, 1.0]))

    def test_nothing_to_compare(self):
        assert verdict(FixedTask.scores, losses(tape=[1.0, 2.0])) == ""


def test_the_table_of_scores():
    """Mean and sample deviation, by hand: 1, 2, 3 give 2 and 1."""
    assert score_table(FixedTask.scores, losses(tape=[1.0, 2.0, 3.0], rope=[2.5, 2.5, 2.5])).split(
        "\n"
    ) == [
        "|      | seeds |    loss, nats |",
        "| ---- | ----: | ------------: |",
        "| tape |     3 | 2.000 ± 1.000 |",
        "| rope |     3 | 2.500 ± 0.000 |",
        "",
        "Mean ± standard deviation over seeds.",
    ]


class TestFittingTable:
    """Names of the columns are as wide as ``label``; their cells are not."""

    @staticmethod
    def table(columns, rows, label):
        header = ["", *(f"{label}{i}" for i in range(columns))]
        body = [[f"row{j}", *(f"{i}.{j}" for i in range(columns))] for j in range(rows)]
        return header, body, fitting_table(header, body)

    def test_stays_as_it_is_where_it_fits(self):
        header, body, found = self.table(3, 2, "x")
        assert found == text_table(header, body)

    def test_is_turned_where_it_is_narrower_so(self):
        header, body, found = self.table(5, 2, "x" * 30)
        turned = [[header[i + 1], *(row[i + 1] for row in body)] for i in range(5)]
        assert found == text_table(["", "row0", "row1"], turned)

    def test_is_cut_into_parts_where_both_are_too_wide(self):
        header, body, found = self.table(40, 40, "column")
        parts = [part.splitlines() for part in found.split("\n\n")]
        assert len(parts) > 1
        assert max(len(line) for part in parts for line in part) <= PAGE
        cells = [[[c.strip() for c in line.split("|")[1:-1]] for line in part] for part in parts]
        for number, line in enumerate([header, *body]):
            row = number + (number > 0)  # Past the rule.
            assert [c for part in cells for c in part[row][1:]] == line[1:]
            assert {part[row][0] for part in cells} == {line[0]}

    def test_a_column_that_never_fits_has_a_table_of_its_own(self):
        *_, found = self.table(2, 60, "x" * 200)
        assert found.count("\n\n") == 1
