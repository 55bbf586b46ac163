"""Trainings: what is planned, what is missing, which rate counts, what a run leaves behind."""

import dataclasses
import json
from pathlib import Path

import pytest

from research import protocol, studies, trainings
from research.choosing import Budget, Curve
from research.records import Store
from research.study import Base
from tests.research.results import BEYOND, INSIDE, MADE, choose_all, finish, grid
from tests.train import small
from train.compare import evaluations
from train.compare.processes import EVALUATE, VALIDATE, Ended
from train.tasks.text_evaluation import TextResult
from train.training import runs
from train.training.signals import NON_FINITE_EXIT_CODE, Stopped


def names(jobs):
    return [job.folder.name for job in jobs]


def rates(jobs):
    return [job.folder.name.split("x-")[1].removesuffix("-seed0") for job in jobs[::2]]


class TestRates:
    def test_plan(self, design, place):
        planned = design.at(place)
        jobs, step = planned.walk("tape", BEYOND)
        assert names(jobs) == [
            f"tape-1x-{rate}-seed{seed}" for rate in ("1e-3", "3e-3", "1e-2") for seed in (0, 1)
        ]
        assert (step.chosen, planned.reports("tape", BEYOND)) == (None, None)
        state = planned.state
        assert (state.total, len(state.finished), len(state.unfinished)) == (33, 0, 33)
        assert state.unfinished[-1] == "none, 5 of 5 more"
        assert planned.values("tape", BEYOND) is None
        assert planned.hours == pytest.approx(3 * (7 + 5) / 60)

    def test_the_best_of_two_seeds_is_reported_by_five_others(self, design, place):
        planned = design.at(place)
        choose_all(planned)
        reports = planned.reports("tape", BEYOND)
        assert names(reports) == [f"tape-1x-3e-3-seed{seed}" for seed in (2, 3, 4, 5, 6)]
        assert {job.experiment.train.learning_rate for job in reports} == {3e-3}
        assert planned.state.unfinished[:2] == names(reports)[:2]
        for job in reports[:4]:
            finish(planned, job, 0.5)
        assert planned.values("tape", BEYOND) is None
        assert planned.missing("tape", BEYOND) == "tape: seed 6"
        finish(planned, reports[4], 0.25)
        assert planned.values("tape", BEYOND) == {2: 50.0, 3: 50.0, 4: 50.0, 5: 50.0, 6: 25.0}
        assert planned.values("tape", BEYOND, INSIDE) == dict.fromkeys(range(2, 7), 100.0)

    def test_seeds_of_its_own(self, design, place):
        """They choose, report, and ask what they do; its records say by which version."""
        procedure = protocol.Procedure(2, (7, 8, 9), (10, 11), within=2.0)
        planned = dataclasses.replace(design, curve=None, procedure=procedure).at(place)
        for rival in planned.rivals:
            for job in planned.walk(rival, BEYOND)[0]:
                rate = job.experiment.train.learning_rate
                finish(planned, job, {1e-3: 0.85, 3e-3: 0.86}.get(rate, 0.1))
        assert {job.experiment.seed for job in planned.walk("tape", BEYOND)[0]} == {7, 8, 9}
        assert planned.rate("tape", BEYOND) == "1e-3"
        reports = planned.reports("tape", BEYOND)
        assert names(reports) == [f"tape-1x-1e-3-seed{seed}" for seed in (10, 11)]
        chosen, reported = planned.walk("tape", BEYOND)[0][0], reports[0]
        assert planned.item(chosen).protocol == {"version": 2, "asked": "validation"}
        assert planned.item(reported).protocol == {"version": 2, "asked": "test"}
        for job in reports:
            finish(planned, job, 0.5)
        assert planned.values("tape", BEYOND) == {10: 50.0, 11: 50.0}
        first = design.at(place)
        assert all(first.record(job) is None for job in first.curve_jobs)

    def test_a_walk(self, design, place):
        """A seed's luck does not choose, and it goes on until the best has both neighbours."""
        planned = design.at(place)
        shares = {"1e-3": (0.5, 0.5), "3e-3": (0.9, 0.0), "1e-2": (0.0, 0.0), "3e-4": (0.1, 0.2)}
        for expected in (["1e-3", "3e-3", "1e-2"], ["1e-3", "3e-3", "1e-2", "3e-4"]):
            jobs, step = planned.walk("tape", BEYOND)
            assert rates(jobs) == expected
            assert step.chosen is None
            for job in jobs:
                rate, seed = job.folder.name.removeprefix("tape-1x-").split("-seed")
                finish(planned, job, shares[rate][int(seed)])
        assert planned.rate("tape", BEYOND) == "1e-3"
        assert rates(planned.walk("rope", BEYOND)[0]) == ["1e-3", "3e-3", "1e-2"]

    def test_each_score_has_its_own(self, design, place):
        planned = dataclasses.replace(design, scores=(BEYOND, INSIDE), shown=()).at(place)
        inside = {"1e-3": 0.9, "3e-3": 0.5, "1e-2": 0.4, "3e-4": 0.7, "3e-2": 0.1, "1e-1": 0.3}
        for key in (BEYOND, INSIDE):
            while missing := [j for j in planned.walk("tape", key)[0] if not planned.record(j)]:
                for job in missing:
                    rate = job.folder.name.removeprefix("tape-1x-").rpartition("-")[0]
                    finish(planned, job, 1.0 - inside[rate], inside[rate])
        assert planned.rate("tape", BEYOND) == "3e-2"
        assert planned.rate("tape", INSIDE) == "1e-3"


def test_scale(design, place):
    planned = design.at(place._replace(scale="gpu"))
    jobs, _ = planned.walk("tape", BEYOND)
    assert {job.experiment.task.max_length for job in jobs} == {6}
    assert all("--config.scale=gpu" in job.command for job in jobs)
    assert rates(jobs) == ["1e-4", "3e-4", "1e-3"]
    with pytest.raises(ValueError, match="unknown scale 'tpu'"):
        design.at(place._replace(scale="tpu"))


def test_a_length_that_is_too_long(design, place):
    """Only what diverged, or cannot take a length, has the worst value."""
    trained, kind = design.at(place).task.sequence_length, "model.position.kind"
    rivals = {
        # They take no more tokens than are trained on, and twice as many.
        f"learned_{n}": {kind: "learned", "model.position.size": n * trained}
        for n in (1, 2)
    }
    planned = dataclasses.replace(design, rivals={**design.rivals, **rivals}).at(place)
    beyond, inside = planned.shown

    def without(rival, *lengths):
        """The record of a run that was asked nothing of some lengths."""
        job = planned.walk(rival, BEYOND)[0][0]
        result = grid(job, 0.5)
        for name in ("counts", "correct"):
            result[name] = [[0 if n + 1 in lengths else x for n, x in enumerate(result[name][0])]]
        found = {"result": result, "diverged": None, "losses": []}
        planned.place.store.put(planned.item(job), found, MADE)
        return planned.record(job)

    record = without("learned_1", 4)
    assert (planned.value(record, beyond), planned.value(record, inside)) == (0.0, 100.0)
    worse = beyond._replace(higher_is_better=False)
    assert planned.value(record, worse) == planned.task.vocab_size
    for rival in ("rope", "learned_2"):
        said = f"copying: {rival}-1x-1e-3-seed0 has no {BEYOND}, .* it has {{'{INSIDE}': 1.0}}"
        with pytest.raises(ValueError, match=said):
            planned.value(without(rival, 4), beyond)
    with pytest.raises(ValueError, match=f"has no {INSIDE}"):
        planned.value(without("learned_1", 1, 2, 3), inside)
    with pytest.raises(ValueError, match=f"looked into has no {BEYOND}"):
        planned.of_summary({BEYOND: float("nan")}, beyond)


def test_what_an_encoding_takes(place):
    """On a GPU 1,024 tokens are trained on, and 2,048 positions are learned."""
    text = next(one for one in studies.STUDIES if one.name == "text")
    planned = text.at(place._replace(scale="gpu"))
    learned, rope = (planned._made(rival)[0] for rival in ("learned", "rope"))
    keys = [f"perplexity_{times}x" for times in ("0.5", 1, 2, 4, 8)]
    assert [trainings.takes(learned, key) for key in keys] == [True, True, True, False, False]
    assert all(trainings.takes(rope, key) for key in keys)
    assert trainings.takes(learned, "perplexity_overlapping_2x")
    assert not trainings.takes(learned, "passkey_4x")

    def test_an_end_of_the_ladder(self, design, place, monkeypatch):
        """What may be better beyond it makes no claim."""
        monkeypatch.setattr(trainings.protocol, "RATES", ("1e-3", "3e-3", "1e-2"))
        planned = design.at(place)
        for job in planned.walk("tape", BEYOND)[0]:
            finish(planned, job, float(job.experiment.train.learning_rate))
        assert planned.reports("tape", BEYOND) is None
        expected = "tape: its best rate, 1e-2, is at the end of the ladder"
        assert planned.missing("tape", BEYOND) == expected


class TestBudgets:
    def test_the_curve_comes_first(self, design, place):
        wide = dataclasses.replace(design, curve=Curve(INSIDE, most=4, rivals=("rope", "none")))
        planned = wide.at(place)
        curve = [f"{name}-{m}x-3e-3-seed0" for name in ("rope", "none") for m in (1, 2, 4)]
        assert names(planned.curve_jobs) == curve
        assert [job.experiment.train.steps for job in planned.curve_jobs[:3]] == [2, 4, 8]
        assert planned.walk("tape", BEYOND)[0] == []
        assert planned.missing("tape", BEYOND) == "the budget is not chosen yet"
        for job, inside in zip(planned.curve_jobs, (0.5, 0.9, 0.91, 0.9, 0.9, 0.9), strict=True):
            assert planned.budget is None
            finish(planned, job, 0.1, inside)
        assert planned.budget == Budget(2, False)
        jobs, _ = planned.walk("rope", BEYOND)
        assert names(jobs)[2] == "rope-2x-3e-3-seed0", "a run of the curve chooses too"
        assert {job.experiment.train.steps for job in jobs} == {4}
        assert "--config.train.steps=4" in jobs[0].command


def test_what_is_left_out_is_named(design, place):
    """Results of another config, another protocol, and results that the task does not know."""
    planned = design.at(place)
    first, second, third = planned.walk("tape", BEYOND)[0][:3]
    finish(planned, first, 0.5)
    found = {"result": {"format": "other"}, "diverged": None, "losses": []}
    place.store.put(planned.item(second), found, MADE)
    item = planned.item(third)
    place.store.put(item._replace(protocol={**item.protocol, "version": 0}), found, MADE)
    unknown, old = planned.remarks()
    assert f"{second.folder.name}: ValueError: expected a record of format" in unknown
    assert old.endswith(f"{third.folder.name}: protocol.version: 0 there, 1 here")
    assert len(planned.state.finished) == 1
    changed = dataclasses.replace(design, fields={"train.batch_size": 9}).at(place)
    assert changed.state.finished == []
    said = next(changed.remarks())
    assert said.endswith(f"{first.folder.name}: train.batch_size: 4 there, 9 here")


class TestRunning:
    @pytest.fixture
    def trained(self, monkeypatch):
        """Stands for the processes that train: names of the runs, in order."""
        calls: list[list[str]] = []
        # Only what chooses is validated, only what reports is tested.
        choosing = (0, 1)

        def train_all(jobs, side_by_side, *, same_share, ends, finished, accepted):
            assert accepted == (0, NON_FINITE_EXIT_CODE)
            assert same_share
            for job in jobs:
                assert ends == (VALIDATE if job.experiment.seed in choosing else EVALUATE)
            if jobs:
                calls.append(names(jobs))
            for job in jobs:
                finished(Ended(job, 0, 60.0))

        def kept(ended, validated):
            assert validated == (ended.job.experiment.seed in choosing)
            return result_of(ended.job)

        monkeypatch.setattr(trainings, "train_all", train_all)
        monkeypatch.setattr(trainings, "kept", kept)
        return calls

    def test_order(self, design, place, trained):
        """First the choice of rates, as far as it goes on, then the seeds that report."""
        planned = design.at(place)
        seen: list[str] = []
        planned.run(lambda item: seen.append(item.name))
        three = ("tape", "rope", "none")
        assert [sorted({name.split("-seed")[0] for name in call}) for call in trained] == [
            sorted(f"{name}-1x-{rate}" for name in three for rate in ("1e-3", "3e-3", "1e-2")),
            sorted(f"{name}-1x-3e-4" for name in three),
            sorted(f"{name}-1x-1e-3" for name in three),
        ]
        assert trained[2] == [f"{name}-1x-1e-3-seed{i}" for name in three for i in range(2, 7)]
        assert seen == [name for call in trained for name in call]
        assert planned.state.unfinished == []
        planned.run(lambda item: seen.append(item.name))
        assert len(trained) == 3

    def test_a_kill_anywhere(self, design, place, trained, monkeypatch):
        """What had ended before is kept, and the rest is made by the next call."""
        whole = trainings.train_all

        def killed(jobs, side_by_side, **options):
            whole(jobs[:7], side_by_side, **options)
            raise Stopped("stopped", 143)

        monkeypatch.setattr(trainings, "train_all", killed)
        while design.at(place).state.unfinished:
            with pytest.raises(Stopped):
                design.at(place).run(lambda item: None)
        made = [name for call in trained for name in call]
        assert len(made) == len(set(made)) == 39

    @pytest.mark.parametrize("field", ["steps", "batch_size"])
    def test_folders_of_another_experiment(self, design, place, trained, field):
        """They are renamed: a run is made from its start, and what is there stays."""
        planned = design.at(place)
        first, second, *_ = planned.quick
        other = dataclasses.replace(first.experiment.train, **{field: 3})
        runs.create(first.folder, dataclasses.replace(first.experiment, train=other))
        runs.create(second.folder, second.experiment)
        with runs.guarded(first.folder), pytest.raises(ValueError, match="another process is tr"):
            planned.run(lambda item: None, quick=True)
        assert runs.load(first.folder).train == other
        planned.run(lambda item: None, quick=True)
        assert not first.folder.exists()
        before = runs.load(first.folder.with_name(f"{first.folder.name}-before1"))
        assert before.train == other
        assert runs.load(second.folder) == second.experiment

    def test_code_that_changes_meanwhile(self, design, place, trained, monkeypatch):
        """What was trained then is recorded as of code that no commit has."""
        commits = iter(["0", "0", "1"])
        monkeypatch.setattr(
            trainings, "describe_source", lambda: {"commit": next(commits), "dirty": False}
        )
        planned = design.at(place)
        planned.run(lambda item: None, quick=True)
        first, second, *_ = planned.quick
        assert planned.record(first).code == {"commit": "0", "dirty": False}
        assert planned.record(second).code == {"commit": "0", "dirty": True}

    def test_what_is_not_kept(self, design, place, trained, monkeypatch):
        kept = []
        monkeypatch.setattr(Store, "put", lambda store, item, found, made: kept.append(found))
        fewer = dataclasses.replace(design, not_kept=("counts",)).at(place)
        fewer.run(lambda item: None, quick=True)
        assert [found["result"]["counts"] for found in kept] == [None, None]
        assert all(found["result"]["correct"] for found in kept)

    def test_a_training_that_diverged(self, design, place):
        job = design.at(place).walk("tape", BEYOND)[0][0]
        job.folder.mkdir(parents=True)
        lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, 121)]
        (job.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        found = trainings.kept(Ended(job, NON_FINITE_EXIT_CODE, 1.0), validated=True)
        assert found["diverged"] == {"step": 120}
        assert len(found["losses"]) == 40
        assert found["losses"][-1] == [120, 1.0]

    def test_a_result_that_is_not_finite(self, place):
        """It counts as diverged, so that it can be written; lines may have no loss."""
        text = next(one for one in studies.STUDIES if one.name == "text").at(place)
        job = text.walk("rope", "perplexity_1x")[0][0] if text.budget else text.curve_jobs[0]
        job.folder.mkdir(parents=True)
        lines = [{"step": 1, "loss": 1.0}, {"step": 2, "skipped": 1.0}]
        (job.folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        for loss in (1.0, float("nan"), 800.0):
            described = TextResult(small.result(loss, 1.0, 1.0, 1.0)).to_json()
            record = {"format": evaluations.FORMAT, "step": 2, "options": {}, "result": described}
            (job.folder / "evaluation.json").write_text(json.dumps(record))
            found = trainings.kept(Ended(job, 0, 1.0), validated=False)
            assert found["losses"] == [[1, 1.0]]
            assert found["diverged"] == (None if loss == 1 else {"step": 2})
            place.store.put(text.item(job), found, MADE)
            text.reports = lambda rival, key: [job]
            judged = text.texts("rope", "perplexity_1x")
            assert judged == ({job.experiment.seed: "a"} if loss == 1 else {})

    @pytest.mark.slow
    def test_trainings(self, design, place):
        """Real ones, in processes of their own, one that chooses and one that reports."""
        planned = design.at(place)
        choosing = planned.walk("tape", BEYOND)[0][0]
        reporting = planned._job_once("tape", "3e-3", 2, 1)
        planned._train([choosing, reporting], lambda item: None)
        validated, tested = map(planned.record, (choosing, reporting))
        assert validated.seconds > 0
        assert (reporting.folder / "evaluation.json").exists()
        assert not (choosing.folder / "evaluation.json").exists()
        assert validated.found["result"]["counts"] == tested.found["result"]["counts"]
        assert validated.found["losses"] != tested.found["losses"]


def result_of(job):
    """The best rate is 1e-3."""
    right = 0.5 if "-1e-3-" in job.folder.name else 0.1
    return {"result": grid(job, right), "diverged": None, "losses": []}


def test_base(design, place, monkeypatch):
    """Each run starts from the base that has its seed, which is known before it is trained."""
    sizes = {"model.hidden_size": 8, "model.num_heads": 1, "model.position.kind": "rope"}
    adapted = dataclasses.replace(
        design,
        rivals={name: {"adapt.method": name} for name in ("lora", "tape")},
        base=Base(Path("configs/bytes_demo.py"), sizes, {"cpu": {"train.steps": 4}}),
        config=Path("configs/context_extension_demo.py"),
        scores=("perplexity_overlapping_1x",),
        shown=(),
    )
    for _ in range(2):
        planned = adapted.at(place)
        jobs, _ = planned.walk("lora", "perplexity_overlapping_1x")
        folders = [job.experiment.adapt.base for job in jobs[:2]]
        assert folders == [str(place.runs / f"copying/base-seed{seed}") for seed in (0, 1)]
        assert f"--config.adapt.base={folders[1]}" in jobs[1].command
        items = [planned.item(job) for job in jobs[:2]]
        assert [item.experiment.adapt.base for item in items] == ["base", "base"]
        assert [(item.base.seed, item.base.train.steps) for item in items] == [(0, 4), (1, 4)]
        assert [job.experiment.model.hidden_size for job in jobs[:2]] == [8, 8]
        assert not planned.folder.exists(), "what is planned makes nothing"
    runs.create(Path(folders[0]), planned._base_once(0).experiment)
    wider = adapted.base._replace(fields={**sizes, "model.hidden_size": 16})
    planned = dataclasses.replace(adapted, base=wider).at(place)
    (job, *_), _ = planned.walk("lora", "perplexity_overlapping_1x")
    assert (planned.item(job).base.model.hidden_size, job.experiment.model.hidden_size) == (16, 16)
    monkeypatch.setattr(trainings, "train_all", lambda *_, **__: None)
    for _ in range(2):
        planned._make_bases([job])
        before = place.runs / "copying-before1" / "base-seed0"
        assert runs.load(before).model.hidden_size == 8, "what was made for the other base stays"
        assert planned.folder.exists()
        assert not list(planned.folder.iterdir())
