"""The page: complete at every moment, and made of nothing but the results."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from research import claims, making, page, place_claims, studies, suites
from research.choosing import Curve
from research.main import main
from research.records import Store
from research.study import Place
from research.trainings import PlannedTrainings
from research.verdicts import Kind, wins
from tests.research.results import BEYOND, INSIDE, choose_all, diverge, finish, finish_all
from train.training.signals import Stopped


@pytest.fixture
def small(design, monkeypatch):
    """The suite of the claims with one study."""
    claim = claims.CLAIMS[0]._replace(
        studies=("copying",),
        judge=lambda s, form: wins(s["copying"], BEYOND, ["rope"], name=form),
        forms=("tape", "none"),
        beside=None,
    )
    one = suites.SUITES["claims"]._replace(designs=(design,), claims=(claim,))
    monkeypatch.setitem(suites.SUITES, "claims", one)
    return design


def studies_at(place):
    return page.studies_at(suites.SUITES["claims"], place)


def text_of(studies, folder, name="claims") -> str:
    path = folder / "docs" / "evidence.md"
    path.parent.mkdir(exist_ok=True)
    page.write(suites.SUITES[name], studies, path)
    text = path.read_text()
    for picture in re.findall(r"!\[.*\]\((.*)\)", text):
        assert (path.parent / picture).read_bytes().startswith(b"\x89PNG")
    return text


def test_from_nothing_to_the_end(small, place, tmp_path):
    studies = studies_at(place)
    text = text_of(studies, tmp_path)
    assert "**0 of at least 33 runs**" in text
    assert "* Not made yet: copying." in text
    assert "* Not run: `tape`, `none`.\n* Runs: [copying](#copying)." in text
    assert PlannedTrainings.caption not in text
    assert "Nothing has been run." in text

    planned = studies["copying"]
    choose_all(planned)
    for job in planned.reports("tape", BEYOND)[:3]:
        finish(planned, job, 0.25)
    text = text_of(studies, tmp_path)
    assert "* Begun: copying." in text
    assert "Unfinished: 21 of at least 33 runs.** Next: `tape-1x-3e-3-seed5`" in text
    assert "`tape`: **unfinished**. Missing: copying, tape: seeds 5, 6; copying, rope: se" in text
    assert "25.00" not in text, "no average is made of fewer than five"

    finish_all(planned, {"tape": 0.6, "rope": 0.3, "none": 0.2})
    text = text_of(studies, tmp_path)
    assert "**33 of at least 33 runs**, 0.6 hours" in text
    assert "`tape` **confirmed**, `none` **contradicted**" in text
    assert re.search(r"\| tape \| 3e-3 \| +0 \| +62\.\d\d \[60\.\d\d, 64\.\d\d\] \|", text)
    assert "| none | rope    | copying, beyond length 3, % | -1" in text
    assert "](images/evidence/copying.png)\n\n" + PlannedTrainings.caption in text

    diverge(planned, planned.reports("none", BEYOND)[2])
    assert re.search(r"\| none \| 3e-3 \| +1 \| ", text_of(studies, tmp_path))


def test_a_page_of_another_hand_is_left_alone(small, place, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "evidence.md").write_text("mine")
    with pytest.raises(ValueError, match="was not written by this program"):
        text_of(studies_at(place), tmp_path)


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

    def test_plan(self, small, place, tmp_path, capsys):
        assert self.call(tmp_path, "--plan") == 0
        said = capsys.readouterr().out
        assert re.search(r"\| copying \| +1 \| 0 of at least 33 \| +0\.60 \|", said)
        assert not (tmp_path / "docs").exists()
        assert self.call(tmp_path, "--page") == 0
        assert (tmp_path / "docs" / "evidence.md").exists()
        assert not place.store.folder.exists()
        assert not place.runs.exists()

    def test_what_is_left_out_and_what_is_not_used_is_said(
        self, small, place, tmp_path, monkeypatch, capsys
    ):
        planned = small.at(place)
        finish_all(planned, {"tape": 0.5, "rope": 0.3, "none": 0.2})
        place.store.path("copying").rename(place.store.path("other"))
        finish(planned, planned.walk("tape", BEYOND)[0][0], 0.25)
        changed = dataclasses.replace(small, fields={"train.batch_size": 8})
        one = suites.SUITES["claims"]._replace(designs=(changed,))
        monkeypatch.setitem(suites.SUITES, "claims", one)
        assert self.call(tmp_path, "--page") == 0
        first, second = capsys.readouterr().err.splitlines()
        assert first == (
            f"left out: {place.store.path('copying')}: tape-1x-1e-3-seed0: "
            "train.batch_size: 4 there, 8 here"
        )
        assert second == f"not used by any study: {place.store.path('other')}"
        assert "**0 of at least 33 runs**" in (tmp_path / "docs" / "evidence.md").read_text()

    def test_what_was_made_before_a_stop_and_in_the_end(self, small, place, tmp_path, monkeypatch):
        """The page has it; in the end the first line of the records has what all runs share."""

        def stopped(study, finished, *, quick):
            for job in study.jobs[:2]:
                finish(study, job, 0.5)
                finished(study.item(job))
            raise Stopped("stopped", 130)

        def run(study, finished, *, quick):
            finish_all(study, {"tape": 0.5, "rope": 0.3, "none": 0.2})
            finished(study.items[0])

        evidence = tmp_path / "docs" / "evidence.md"
        monkeypatch.setattr(PlannedTrainings, "run", stopped)
        assert self.call(tmp_path) == 130
        assert "**2 of at least 33 runs**" in evidence.read_text()
        monkeypatch.setattr(PlannedTrainings, "run", run)
        assert self.call(tmp_path) == 0
        assert "**33 of at least 33 runs**" in evidence.read_text()
        text = place.store.path("copying").read_text()
        assert text.count('"counts"') == 1, "in the first line"
        assert small.at(place).state.unfinished == []

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--only=copyin"], "unknown study 'copyin'.*did you mean 'copying'"),
            (["--config.train.steps=1"], "evidence does not take --config.train.steps=1"),
            (["--suite=place"], "unknown suite 'place'.*did you mean 'places'"),
            (["--jobs=0"], "--jobs must be at least 1; got 0"),
            (["--rivals=tap"], "unknown rival 'tap'.*did you mean 'tape'"),
            (["--rivals=tape", "--page"], "--rivals has no part in --page"),
            (["--rivals=rope", "--suite=measured"], "overhead: no study of trainings"),
        ],
    )
    def test_misuse(self, small, tmp_path, monkeypatch, capsys, arguments, message):
        costs = suites.SUITES["claims"]._replace(
            designs=[one for one in studies.STUDIES if one.name == "overhead"]
        )
        monkeypatch.setitem(suites.SUITES, "measured", costs)
        assert self.call(tmp_path, *arguments) == 2
        assert re.search(message, capsys.readouterr().err)
        assert not (tmp_path / "docs").exists()

    def test_some_rivals_alone(self, small, place, tmp_path, monkeypatch, capsys):
        """What chooses the budget is made too; the page is of all rivals."""
        wide = dataclasses.replace(small, curve=Curve(INSIDE, most=1, rivals=("rope",)))
        one = suites.SUITES["claims"]._replace(designs=(wide,))
        monkeypatch.setitem(suites.SUITES, "claims", one)
        made = []
        monkeypatch.setattr(
            PlannedTrainings, "run", lambda study, *_, **__: made.append(study.rivals)
        )
        assert self.call(tmp_path, "--rivals=none") == 0
        assert made == [["none"]]
        assert "0 of at least 14" in capsys.readouterr().out
        text = (tmp_path / "docs" / "evidence.md").read_text()
        assert re.search(r"\*\*0 of at least 36 runs\*\*", text)

    def test_suites_share_records(self, small, place, tmp_path, monkeypatch, capsys):
        """What only another suite has is used, and what none has is said."""
        fewer = dataclasses.replace(small, rivals={"rope": small.rivals["rope"]})
        one = suites.SUITES["claims"]._replace(designs=(fewer,), name="fewer", claims=())
        monkeypatch.setitem(suites.SUITES, "fewer", one)
        planned = small.at(place)
        finish_all(planned, {"tape": 0.5, "rope": 0.3, "none": 0.2})
        assert self.call(tmp_path, "--suite=fewer", "--page") == 0
        assert capsys.readouterr().err == ""
        monkeypatch.delitem(suites.SUITES, "claims")
        assert self.call(tmp_path, "--suite=fewer", "--page") == 0
        said = capsys.readouterr().err.strip()
        assert said.startswith(f"not used by any study: {place.store.path('copying')}: none-1x-1e-")
        assert said.count(",") == 2 * 11 - 1

    def test_beside_what_is_on_record(self, small, place, tmp_path):
        recorded = small.at(place)
        here = small.at(place._replace(store=Store(tmp_path / "here")))
        first, second = recorded.quick
        for job in (first, second):
            finish(recorded, job, 0.5)
            finish(here, job, 0.25 if job is first else 0.5)
        table = making.compared({"copying": here}, {"copying": recorded})
        assert re.search(r"tape-1x-3e-3-seed0 \| beyond.* \| +25 \| +50 \| DIFFERS", table)
        assert re.search(r"rope-1x-3e-3-seed0 \| beyond.* \| +50 \| +50 \| equal", table)
        diverge(here, second)
        table = making.compared({"copying": here}, {"copying": recorded})
        assert re.search(r"rope-1x-3e-3-seed0 \| beyond.* \| diverged \| +50 \| DIFFERS", table)
        assert "none" not in table


class TestSuites:
    """The suites themselves."""

    @pytest.mark.parametrize("name", suites.SUITES)
    def test_every_claim_names_studies_that_exist(self, name):
        one = suites.SUITES[name]
        names = [design.name for design in itertools.chain(one.designs, *one.read.values())]
        assert len(set(names)) == len(names)
        for other, designs in one.read.items():
            (there,) = (x.designs for x in suites.SUITES.values() if x.name == other)
            assert set(map(id, designs)) <= set(map(id, there)), "as they are described there"
        assert {study for claim in one.claims for study in claim.studies} <= set(names)
        few = ("all", "decay", *place_claims.LONGER)
        few += tuple(n for n in place_claims.QUESTIONS if n.startswith(place_claims.AGAIN))
        forms = [set(claim.forms) for claim in one.claims if claim.name not in few]
        both = ({"tape_head_scale", "tape"} <= names or len(names) == 1 for names in forms)
        assert name == "arena" or all(both)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", suites.SUITES)
    def test_the_page_is_what_the_records_give(self, tmp_path, name):
        one = suites.SUITES[name]
        place = Place(Store(Path("research/records")), tmp_path)
        text = page.markdown(one, page.studies_at(one, place), f"images/{one.name}")
        assert text == Path(f"research/{one.name}.md").read_text()
        for picture in re.findall(r"\]\((images/[^)]+)\)", text):
            assert Path("research", picture).exists()

    @pytest.mark.slow
    @pytest.mark.parametrize("name", suites.SUITES)
    def test_all_is_planned_and_judged(self, tmp_path, name):
        """Every experiment of a suite can be made, and every claim judged, before any has run."""
        one = suites.SUITES[name]
        place = Place(Store(tmp_path), tmp_path / "runs", scale="gpu")
        studies = page.studies_at(one, place)
        found = {claim.judge(studies, f).kind for claim in one.claims for f in claim.forms}
        assert found == {Kind.UNFINISHED}
        text = page.markdown(one, studies, "images")
        assert all(f"\n### {design.name}\n" in text for design in one.designs)
