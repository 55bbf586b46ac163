"""The report: what it says, whom it declares the winner, and that nothing else is overwritten."""

import dataclasses
import json
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from train.compare.report import (
    ONE_SEED,
    PAGE,
    RunRecord,
    fitting_table,
    score_table,
    verdict,
    write_report,
)
from train.compare.tasks import Comparison
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


class TestReport:
    def test_content(self, tmp_path):
        folder = tmp_path / "new" / "report"
        runs = [make_run("tape"), make_run("rope", samples=["99+1 = 10 (wrong: it is 100)"])]
        write_report(folder, FixedTask(), [make_run(command="first")], compared())
        path = write_report(folder, FixedTask(), runs, compared())
        assert path == folder / "report.md"
        assert sorted(p.name for p in folder.iterdir()) == [
            *("loss.png", "own.png", "report.json", "report.md")
        ]
        record = json.loads((folder / "report.json").read_text())
        assert [(r["name"], r["seed"]) for r in record["runs"]] == [("tape", 0), ("rope", 0)]
        assert record["runs"][0]["scores"] == runs[0].result.summary()
        text = re.sub(" +", " ", path.read_text())
        for part in (
            "# A title\n\nWhat was asked.",
            "## Of its own\n\n2 results ![x](own.png)",
            "| parameters | 12 k | 12 k |",
            "* rope, seed 0: 99+1 = 10 (wrong: it is 100)",
            "```\n" + runs[0].command + "\n" + runs[1].command + "\n```",
            f"| numpy | {np.__version__}",
        ):
            assert part in text

    @pytest.mark.parametrize("name", ["report.md", "own.png"])
    def test_leaves_other_files_alone(self, tmp_path, name):
        (tmp_path / name).write_text("precious")
        with pytest.raises(ValueError, match=f"{name} exists and was not written by this program"):
            write_report(tmp_path, FixedTask(), [make_run()], compared())
        assert [p.name for p in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_text() == "precious"

    @pytest.mark.parametrize(
        ("runs", "message"),
        [
            ([make_run(), make_run()], "runs of the same name and seed"),
            ([make_run("a"), make_run("b", facts={})], "different facts"),
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
            make_run(name, seed, result=FixedResult({"right": value}))
            for name, values in (("a", (0.5, 0.5, 0.5)), ("b", (0.90, 0.91, 0.92)))
            for seed, value in enumerate(values)
        ]
        assert "**right, %**: b wins;" in verdict(FixedTask.scores, runs)

    def test_seeds_that_do_not_suffice(self):
        runs = losses(tape=[1.0, 2.0, 3.0], rope=[1.5, 1.9, 3.1], alibi=[9.0, 9.5, 10.1])
        assert verdict(FixedTask.scores, runs) == (
            "* **loss, nats**: no clear winner. Best on average is tape, with no significant "
            "difference to rope; clearly better than alibi."
        )

    def test_seeds_that_only_one_has_tell_nothing(self):
        first = losses(tape=[1.0, 1.1, 1.2])
        second = [make_run("rope", s, result=FixedResult({"loss": 5.0})) for s in (2, 3, 4)]
        assert "no clear winner" in verdict(FixedTask.scores, [*first, *second])

    def test_one_seed_proves_nothing(self):
        text = verdict(FixedTask.scores, losses(tape=[1.0], rope=[5.0]))
        assert text == f"* **loss, nats**: best is tape.\n\n{ONE_SEED}"


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


def test_a_table_that_is_too_wide_is_cut_into_parts():
    header = ["", *(f"column{i}" for i in range(40))]
    body = [[f"row{j}", *(f"{i}.{j}" for i in range(40))] for j in range(40)]
    parts = [part.splitlines() for part in fitting_table(header, body).split("\n\n")]
    assert len(parts) > 1
    assert max(len(line) for part in parts for line in part) <= PAGE
    cells = [[[c.strip() for c in line.split("|")[1:-1]] for line in part] for part in parts]
    for number, line in enumerate([header, *body]):
        row = number + (number > 0)  # Past the rule.
        assert [c for part in cells for c in part[row][1:]] == line[1:]
        assert {part[row][0] for part in cells} == {line[0]}
