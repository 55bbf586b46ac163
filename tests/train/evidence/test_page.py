"""The page: complete at every moment, and made of nothing but the results."""

import dataclasses
import re
from pathlib import Path

import pytest

from tests.train.evidence.results import MADE, diverge, finish, finish_all, grid
from train.evaluation.grids import Grid
from train.evidence import claims, making, page, suite
from train.evidence.records import Store
from train.evidence.studies import Place
from train.evidence.trainings import PlannedTrainings
from train.evidence.verdicts import Kind, wins
from train.main import main
from train.tasks.words import WordResult


@pytest.fixture
def small(design, monkeypatch):
    """The suite and the claims with one study."""
    monkeypatch.setattr(page, "STUDIES", (design,))
    claim = claims.CLAIMS[0]._replace(
        studies=("copying",),
        judge=lambda s: wins(s["copying"], "exact_match_outside", ["rope", "none"]),
    )
    monkeypatch.setattr(page, "CLAIMS", (claim,))
    return design


def text_of(studies, folder) -> str:
    path = folder / "docs" / "evidence.md"
    path.parent.mkdir(exist_ok=True)
    page.write(studies, path)
    text = path.read_text()
    for picture in re.findall(r"!\[.*\]\((.*)\)", text):
        assert (path.parent / picture).read_bytes().startswith(b"\x89PNG")
    return text


def test_from_nothing_to_the_end(small, place, tmp_path):
    studies = page.studies_at(place)
    text = text_of(studies, tmp_path)
    assert "**0 of 12 runs**" in text
    assert "**unfinished**" in text
    assert "Nothing has been run." in text

    planned = studies["copying"]
    finish(planned, planned.trials("tape")[0], 0.25)
    text = text_of(studies, tmp_path)
    assert "Unfinished: 11 of 12 runs" in text
    assert "25.00" not in text, "a setting is not chosen yet"

    finish_all(planned, {"tape": 0.6, "rope": 0.3, "none": 0.2})
    diverge(planned, planned.finals("none")[2])
    text = text_of(studies, tmp_path)
    assert "**12 of 12 runs**, which took 0.2 hours" in text
    assert "**confirmed**" in text
    assert re.search(r"\| tape +\| +3 of 3 +\| +61\.00 ± 1\.00 +\| +100\.0 ± 0\.0 \|", text)
    assert re.search(r"\| none \| +3 of 3, 1 diverged at step 7 \|", text)
    assert "Chosen: tape learning_rate=3e-3" in text
    assert "At an end of what was tried: tape, rope, none." in text
    assert "1.0 minutes of processor time for a run" in text
    assert "* 12 runs: devices 1 x none, python 3" in text


def test_lengths(design, place, monkeypatch):
    """Sums stand in the table of the length suite, for its rivals; what diverged does not."""
    named = {"name": "addition", "rivals": {**design.rivals, "t5": {"model.position.kind": "t5"}}}
    problems = [
        dataclasses.replace(design, name=f"length-{problem}", section=page.LENGTHS)
        for problem in ("copy", "sort")
    ]
    monkeypatch.setattr(page, "STUDIES", (dataclasses.replace(design, **named), *problems))
    monkeypatch.setattr(page, "CLAIMS", ())
    studies = page.studies_at(place)

    def rows():
        text = page.markdown(studies, "images")
        found = re.findall(r"^\| (\w+) +\| (?:1 to|beyond) 3", text, re.MULTILINE)
        return found[::2]

    assert rows() == []
    for planned in studies.values():
        finish_all(planned, dict.fromkeys(planned.design.rivals, 0.5))
        if planned.name == "length-sort":
            assert rows() == ["addition", "copy", "sort"]
            diverge(planned, planned.finals("rope")[1])
    assert rows() == ["addition", "copy"]


def test_depths(small, place, config, tmp_path, monkeypatch):
    """Rivals at several depths are shown by depth, without trainings that diverged."""
    words = '"name": "words", "group": "A5", "max_length": 3, "generators": 3'
    text = config.read_text().replace(
        '"name": "algorithm", "problem": "copy", "max_length": 3', words
    )
    config.write_text(text.replace("samples_per_length", "samples"))
    rivals = {
        f"{name}-{depth}": {"model.position.kind": name, "model.num_layers": depth}
        for name in ("tape", "rope")
        for depth in (1, 2)
    }
    changed = {"section": page.WORDS, "rivals": rivals, "sweep": {}, "scores": (), "quick": ()}
    design = dataclasses.replace(small, **changed)
    monkeypatch.setattr(page, "STUDIES", (design,))
    monkeypatch.setattr(page, "CLAIMS", ())
    planned = page.studies_at(place)["copying"]
    for rival in rivals:
        for job in planned.finals(rival):
            part = Grid.from_json(grid(job, 0.5), job.experiment.task.wording)
            found = {"result": WordResult(part, part).to_json(), "validation": None}
            found |= {"diverged": None, "losses": [[1, 2.0]]}
            planned.place.store.put(planned.item(job), found, MADE)
    diverge(planned, planned.finals("rope-2")[0])
    text = text_of({"copying": planned}, tmp_path)
    assert "1 or 2 layers of width 8" in text
    assert re.search(r"\| +3 \| trained \| 1 +\| 1 +\|\n\| +4 \| beyond +\| more than 2", text)
    (figure,) = page.figures(planned).values()
    assert [panel.get_title() for panel in figure.axes] == ["1 layer", "2 layers"]
    for rival in ("tape-1", "tape-2", "rope-1", "rope-2"):
        for job in planned.finals(rival):
            diverge(planned, job)
    assert page.figures(planned)


def test_a_page_of_another_hand_is_left_alone(small, place, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "evidence.md").write_text("mine")
    with pytest.raises(ValueError, match="was not written by this program"):
        text_of(page.studies_at(place), tmp_path)


class TestCommand:
    def call(self, tmp_path, *arguments):
        return main(
            [
                "evidence",
                f"--results={tmp_path / 'results'}",
                f"--runs={tmp_path / 'runs'}",
                f"--out={tmp_path / 'docs' / 'evidence.md'}",
                *arguments,
            ]
        )

    def test_page(self, small, place, tmp_path, capsys):
        assert self.call(tmp_path, "--page") == 0
        assert "evidence.md" in capsys.readouterr().out
        assert not place.store.folder.exists()
        assert not place.runs.exists()

    def test_what_is_left_out_and_what_is_not_used_is_said(
        self, small, place, tmp_path, monkeypatch, capsys
    ):
        planned = small.at(place)
        finish_all(planned, {"tape": 0.5, "rope": 0.3, "none": 0.2})
        place.store.path("copying").rename(place.store.path("other"))
        finish(planned, planned.trials("tape")[0], 0.25)
        changed = dataclasses.replace(small, fields={"train.batch_size": 8})
        monkeypatch.setattr(page, "STUDIES", (changed,))
        assert self.call(tmp_path, "--page") == 0
        first, second = capsys.readouterr().err.splitlines()
        assert first == (
            f"left out: {place.store.path('copying')}: tape-learning_rate=1e-3: "
            "train.batch_size: 4 there, 8 here"
        )
        assert second == f"not used by any study: {place.store.path('other')}"
        assert "**0 of 12 runs**" in (tmp_path / "docs" / "evidence.md").read_text()

    def test_runs_elsewhere(self, small, place, tmp_path, capsys):
        """What is on record needs no runs, wherever they are said to be."""
        planned = small.at(place)
        finish_all(planned, {"tape": 0.5, "rope": 0.3, "none": 0.2})
        assert self.call(tmp_path, f"--runs={tmp_path / 'elsewhere'}") == 0
        assert "**12 of 12 runs**" in (tmp_path / "docs" / "evidence.md").read_text()
        assert not (tmp_path / "elsewhere").exists()

    def test_what_was_made_is_tidied(self, small, place, tmp_path, monkeypatch):
        """In the end the first line has what all runs share."""

        def run(study, finished, *, quick):
            finish_all(study, {"tape": 0.5, "rope": 0.3, "none": 0.2})
            finished(study.items[0])

        monkeypatch.setattr(PlannedTrainings, "run", run)
        assert self.call(tmp_path) == 0
        text = place.store.path("copying").read_text()
        assert text.count('"counts"') == 2, "of the test and the validation, in the first line"
        assert small.at(place).state.unfinished == []

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--only=copyin"], "unknown study 'copyin'.*did you mean 'copying'"),
            (["--config.train.steps=1"], "evidence does not take --config.train.steps=1"),
            (["--config.scale=tpu"], "unknown scale of .*'tpu'"),
            (["--jobs=0"], "--jobs must be at least 1; got 0"),
        ],
    )
    def test_misuse(self, small, tmp_path, capsys, arguments, message):
        assert self.call(tmp_path, *arguments) == 2
        assert re.search(message, capsys.readouterr().err)
        assert not (tmp_path / "docs").exists()

    def test_beside_what_is_on_record(self, small, place, tmp_path):
        here, recorded = small.at(place._replace(store=Store(tmp_path / "here"))), small.at(place)
        first, second = here.quick
        finish(here, first, 0.25)
        finish(recorded, first, 0.5)
        diverge(here, second)
        table = making.compared({"copying": here}, {"copying": recorded})
        assert re.search(r"copying/tape-learning_rate=1e-3 \| beyond.* \| +25 +\| +50 \|", table)
        assert re.search(r"copying/rope-learning_rate=1e-3 \| beyond.* \| diverged \| +- \|", table)
        assert "none" not in table


class TestSuite:
    """The suite itself."""

    def test_every_claim_names_studies_that_exist(self):
        names = [design.name for design in suite.STUDIES]
        assert len(set(names)) == len(names)
        assert {name for claim in claims.CLAIMS for name in claim.studies} <= set(names)
        assert {design.section for design in suite.STUDIES} == set(suite.SECTIONS)
        sections = [suite.SECTIONS.index(design.section) for design in suite.STUDIES]
        assert sections == sorted(sections)

    @pytest.mark.slow
    @pytest.mark.parametrize("scale", ["cpu", "gpu"])
    def test_all_is_planned_and_judged(self, tmp_path, scale):
        """Every experiment of the suite can be made, and every claim judged, before any has run."""
        studies = page.studies_at(Place(Store(tmp_path), tmp_path / "runs", scale=scale))
        assert {claim.judge(studies).kind for claim in claims.CLAIMS} == {Kind.UNFINISHED}
        text = page.markdown(studies, "images")
        assert all(f"### {name}\n" in text for name in studies)

    @pytest.mark.slow
    def test_the_committed_page_is_that_of_the_committed_results(self, tmp_path):
        studies = page.studies_at(Place(Store(Path("benchmarks/results/evidence")), tmp_path))
        assert Path("docs/evidence.md").read_text() == page.markdown(studies, "images/evidence")
