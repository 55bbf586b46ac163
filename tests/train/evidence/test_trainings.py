"""Trainings: what is planned, what is missing, which setting counts, what a run leaves behind."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.train.evidence.results import MADE, all_trials, diverge, finish, finish_all, grid
from train.comparison.processes import Ended
from train.evidence import trainings
from train.evidence.trainings import Base, Diverged
from train.training.signals import NON_FINITE_EXIT_CODE, Stopped


def names(jobs):
    return [job.folder.name for job in jobs]


class TestTrainings:
    def test_plan(self, design, place):
        planned = design.at(place)
        assert names(all_trials(planned)) == [
            f"{kind}-learning_rate={rate}"
            for kind in ("tape", "rope", "none")
            for rate in ("1e-3", "3e-3")
        ]
        state = planned.state
        assert (state.total, len(state.finished), len(state.unfinished)) == (12, 0, 12)
        assert state.unfinished[-1] == "none, seed 3 of 3"
        assert planned.finals("tape") is None
        assert planned.results() == {"tape": [], "rope": [], "none": []}

    def test_the_best_setting_counts(self, design, place):
        planned = design.at(place)
        first, second = planned.trials("tape")
        finish(planned, first, right=0.9, validated=0.2)
        assert planned.finals("tape") is None
        finish(planned, second, right=0.1, validated=0.6)
        finals = planned.finals("tape")
        assert names(finals) == [
            f"tape-learning_rate=3e-3{end}" for end in ("", "-seed1", "-seed2")
        ]
        assert finals[0] == second
        (run,) = planned.results()["tape"]
        assert (run.seed, run.result.summary()["exact_match_outside"]) == (0, 0.1)
        state = planned.state
        assert (state.total, len(state.finished)) == (12, 2)
        assert "tape-learning_rate=3e-3-seed1" in state.unfinished

    def test_finished(self, design, place):
        planned = design.at(place)
        finish_all(planned, {"tape": 0.5, "rope": 0.3, "none": 0.2})
        assert planned.state.unfinished == []
        assert [run.seed for run in planned.results()["rope"]] == [0, 1, 2]

    def test_diverged(self, design, place):
        """It is a result: a setting at which training diverged is the worst."""
        planned = design.at(place)
        bad, good = planned.trials("tape")
        diverge(planned, bad)
        finish(planned, good, right=0.1, validated=0.0)
        assert planned.finals("tape")[0] == good
        assert planned.read(planned.record(bad)) == Diverged(7)

    def test_without_a_sweep(self, design, place):
        planned = dataclasses.replace(design, sweep={}).at(place)
        assert names(all_trials(planned)) == ["tape", "rope", "none"]
        assert names(planned.finals("tape")) == ["tape", "tape-seed1", "tape-seed2"]

    def test_a_sweep_goes_on_where_its_last_is_the_best(self, design, place):
        wide = {"cpu": "train.learning_rate=1e-4,3e-4,1e-3,3e-3,1e-2"}
        planned = dataclasses.replace(design, wider=wide).at(place)

        def rates(rival):
            return [job.setting.name.partition("=")[2] for job in planned.trials(rival)]

        def validate(validated):
            for job in planned.trials("tape"):
                value = validated.get(job.setting.name.partition("=")[2])
                if value is not None:
                    finish(planned, job, right=0.3, validated=value)

        assert rates("tape") == ["1e-3", "3e-3"]
        validated = {"1e-3": 0.4, "3e-3": 0.2, "3e-4": 0.6, "1e-4": 0.5}
        for tried in (["3e-4"], ["3e-4", "1e-4"]):
            validate(validated)
            assert rates("tape") == ["1e-3", "3e-3", *tried]
            assert planned.finals("tape") is None
            assert planned.state.total == 12 + len(tried)
        validate(validated)
        assert {job.setting.name for job in planned.finals("tape")} == {"learning_rate=3e-4"}
        assert rates("rope") == ["1e-3", "3e-3"]

    def test_a_sweep_ends_where_the_ladder_does(self, design, place):
        planned = dataclasses.replace(
            design, wider={"cpu": "train.learning_rate=3e-4,1e-3,3e-3"}
        ).at(place)
        for job, value in zip(planned.trials("tape"), (0.1, 0.2), strict=True):
            finish(planned, job, right=0.3, validated=value)
        assert planned.finals("tape")[0] == planned.trials("tape")[1]

    def test_a_ladder_without_the_first_settings(self, design, place):
        wide = {"cpu": "train.learning_rate=3e-4,1e-3"}
        with pytest.raises(ValueError, match=r"=3e-4,1e-3 lacks learning_rate=3e-3, with which"):
            dataclasses.replace(design, wider=wide).at(place)

    def test_several_seeds_choose(self, design, place):
        """What one seed learns by luck is not chosen, and no seed counts unless it validated."""
        planned = dataclasses.replace(design, choosing=3).at(place)
        slow, fast = planned.trials("tape")[:3], planned.trials("tape")[3:]
        assert names(fast) == [f"tape-learning_rate=3e-3{end}" for end in ("", "-seed1", "-seed2")]
        assert (planned.state.total, len(planned.state.unfinished)) == (18, 18)
        for job in slow:
            finish(planned, job, right=0.3, validated=0.6)
        for job, value in zip(fast, (0.9, 0.1, 0.1), strict=True):
            finish(planned, job, right=0.3, validated=value)
        assert planned.finals("tape") == slow

    def test_scale(self, design, place):
        planned = design.at(place._replace(scale="gpu"))
        assert {job.experiment.task.max_length for job in all_trials(planned)} == {6}
        assert all("--config.scale=gpu" in job.command for job in all_trials(planned))
        with pytest.raises(ValueError, match=r"unknown scale of .*small\.py 'tpu'"):
            design.at(place._replace(scale="tpu"))

    def test_what_is_left_out_is_named(self, design, place):
        """Results of another config, and results that the task does not know."""
        planned = design.at(place)
        first, second = planned.trials("tape")
        finish(planned, first, 0.5)
        found = {"result": {"format": "other"}, "validation": None, "diverged": None, "losses": []}
        place.store.put(planned.item(second), found, MADE)
        assert list(planned.remarks()) == [
            f"left out: {place.store.path('copying')}: {second.folder.name}: ValueError: expected "
            "a record of format 'tape-jax exact-match grid, version 2'; got 'other'"
        ]
        assert len(planned.state.finished) == 1
        changed = dataclasses.replace(design, fields={"train.steps": 9}).at(place)
        assert changed.state.finished == []
        said = next(changed.remarks())
        assert said.endswith(f"copying.jsonl: {first.folder.name}: train.steps: 2 there, 9 here")

    def test_what_no_study_uses_is_named(self, design, place):
        planned = design.at(place)
        finish_all(planned, {"tape": 0.5, "rope": 0.3, "none": 0.2})
        assert list(planned.remarks()) == []
        fewer = dataclasses.replace(design, seeds=2, rivals={"tape": design.rivals["tape"]})
        (said,) = fewer.at(place).remarks()
        assert said.startswith(f"not used by any study: {place.store.path('copying')}: rope-")
        assert said.endswith("none-learning_rate=3e-3-seed2")
        assert said.count(",") == 8


class TestRunning:
    @pytest.fixture
    def trained(self, monkeypatch):
        """Stands for the processes that train: names of the runs, in order."""
        calls: list[list[str]] = []

        def train_all(jobs, side_by_side, *, validate, finished, accepted):
            assert accepted == (0, NON_FINITE_EXIT_CODE)
            # Only what is chosen among is validated.
            assert validate == all(
                job.setting.overrides and job.experiment.seed == 0 for job in jobs
            )
            calls.append(names(jobs))
            for job in jobs:
                finished(Ended(job, 0, 60.0))

        monkeypatch.setattr(trainings, "train_all", train_all)
        return calls

    def test_order(self, design, place, trained, monkeypatch):
        """First the sweep, then the other seeds of what it chose, by rivals; then nothing."""
        planned = design.at(place)
        monkeypatch.setattr(trainings, "_found", lambda ended, _: result_of(ended.job))
        seen: list[str] = []
        planned.run(lambda item: seen.append(item.name))
        assert trained[0] == names(all_trials(planned))
        assert trained[1] == [
            f"{kind}-learning_rate=1e-3-seed{seed}"
            for kind in ("tape", "rope", "none")
            for seed in (1, 2)
        ]
        assert seen == trained[0] + trained[1]
        assert planned.state.unfinished == []
        planned.run(lambda item: seen.append(item.name))
        assert len(trained) == 2

    def test_order_of_a_sweep_that_goes_on(self, design, place, trained, monkeypatch):
        """What the last settings call for follows until nothing does."""
        wide = {"cpu": "train.learning_rate=3e-4,1e-3,3e-3"}
        planned = dataclasses.replace(design, wider=wide).at(place)
        monkeypatch.setattr(trainings, "_found", lambda ended, _: result_of(ended.job))
        planned.run(lambda item: None)
        assert trained[1] == [f"{kind}-learning_rate=3e-4" for kind in ("tape", "rope", "none")]
        assert len(trained) == 3
        assert planned.state.unfinished == []

    def test_a_result_without_its_validation(self, design, place, monkeypatch):
        """It does not count until it is validated, and the time that it had taken is kept."""
        planned = dataclasses.replace(design, choosing=2).at(place)
        finish_all(planned, {"tape": 0.5, "rope": 0.3, "none": 0.2})
        job = planned.trials("tape")[1]
        found = {**planned.record(job).found, "validation": None}
        planned.place.store.put(planned.item(job), found, MADE._replace(seconds=30.0))
        assert planned.finals("tape") is None
        assert planned.state.unfinished == [job.folder.name, "tape, seed 3 of 3"]

        def train_all(jobs, side_by_side, *, validate, finished, accepted):
            assert (jobs, validate) == ([job], True)
            finished(Ended(job, 0, 5.0))

        monkeypatch.setattr(trainings, "train_all", train_all)
        monkeypatch.setattr(trainings, "_found", lambda ended, _: result_of(ended.job))
        planned.run(lambda item: None)
        assert planned.record(job).seconds == 35.0
        assert planned.state.unfinished == []

    def test_what_would_be_repeated_is_not_made(self, design, place, trained, monkeypatch):
        """A rival that is the same as another, step for step, refers to it."""
        planned = dataclasses.replace(design, sweep={}, same={"tape": "rope"}).at(place)
        monkeypatch.setattr(trainings, "_found", lambda ended, _: result_of(ended.job))
        seen: list[str] = []
        planned.run(lambda item: seen.append(item.name))
        assert trained == [["rope", "rope-seed1", "rope-seed2", "none", "none-seed1", "none-seed2"]]
        assert seen == [*trained[0], "tape", "tape-seed1", "tape-seed2"]
        assert planned.state.unfinished == []
        records = [planned.record(job) for job in planned.finals("tape")]
        assert [record.same_as for record in records] == ["rope", "rope-seed1", "rope-seed2"]
        assert [record.seconds for record in records] == [0.0] * 3
        tape, rope = (planned.results()[name] for name in ("tape", "rope"))
        assert [run.seed for run in tape] == [run.seed for run in rope] == [0, 1, 2]
        assert [run.result.summary() for run in tape] == [run.result.summary() for run in rope]

    def test_order_without_a_sweep(self, design, place, trained, monkeypatch):
        """One rival after another."""
        monkeypatch.setattr(trainings, "_found", lambda ended, _: result_of(ended.job))
        dataclasses.replace(design, sweep={}).at(place).run(lambda item: None)
        assert trained == [
            [
                "tape",
                "tape-seed1",
                "tape-seed2",
                "rope",
                "rope-seed1",
                "rope-seed2",
                "none",
                "none-seed1",
                "none-seed2",
            ]
        ]

    def test_quick(self, design, place, trained, monkeypatch):
        planned = design.at(place)
        monkeypatch.setattr(trainings, "_found", lambda ended, _: result_of(ended.job))
        planned.run(lambda item: None, quick=True)
        assert trained == [["tape-learning_rate=1e-3", "rope-learning_rate=1e-3"]]

    def test_stopped(self, design, place, monkeypatch):
        """What had ended before is kept."""
        planned = design.at(place)

        def train_all(jobs, side_by_side, *, finished, **_):
            finished(Ended(jobs[0], 0, 60.0))
            raise Stopped("stopped", 143)

        monkeypatch.setattr(trainings, "train_all", train_all)
        monkeypatch.setattr(trainings, "_found", lambda ended, _: result_of(ended.job))
        with pytest.raises(Stopped):
            planned.run(lambda item: None)
        assert len(design.at(place).state.finished) == 1

    def test_a_training_that_diverged(self, design, place):
        job = design.at(place).trials("tape")[0]
        job.folder.mkdir(parents=True)
        lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(1, 121)]
        (job.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        found = trainings._found(Ended(job, NON_FINITE_EXIT_CODE, 1.0), validated=True)
        assert found["diverged"] == {"step": 120}
        assert len(found["losses"]) == 40
        assert found["losses"][-1] == [120, 1.0]

    @pytest.mark.slow
    def test_trainings(self, design, place):
        """Real ones, in processes of their own, resumed by another call."""
        small = dataclasses.replace(design, rivals={"tape": design.rivals["tape"]}, seeds=2)
        seen: list[str] = []
        small.at(place).run(lambda item: seen.append(item.name))
        assert len(seen) == 3
        state = small.at(place).state
        assert (state.total, state.unfinished) == (3, [])
        record = state.finished[0]
        assert record.found["validation"]["counts"] == record.found["result"]["counts"]
        assert record.seconds > 0
        (run, other) = small.at(place).results()["tape"]
        assert run.losses != other.losses


def result_of(job):
    validated = grid(job, 0.5 if "1e-3" in job.folder.name else 0.1)
    return {"result": grid(job, 0.3), "validation": validated, "diverged": None, "losses": []}


def test_base(design, place):
    """What is adapted is known before it is trained, and is not made twice."""
    sizes = {"model.hidden_size": 8, "model.num_heads": 1, "model.position.kind": "rope"}
    adapted = dataclasses.replace(
        design,
        rivals={name: {"adapt.method": name} for name in ("lora", "tape")},
        base=Base(Path("configs/bytes_demo.py"), sizes, {"cpu": {"train.steps": 4}}),
        config=Path("configs/context_extension_demo.py"),
        sweep={},
        scores=(),
    )
    folder = place.runs / "copying/base"
    for _ in range(2):
        planned = adapted.at(place)
        assert [job.experiment.adapt.method for job in all_trials(planned)] == ["lora", "tape"]
        assert {job.experiment.adapt.base for job in all_trials(planned)} == {str(folder)}
        assert [job.experiment.model.hidden_size for job in all_trials(planned)] == [8, 8]
        assert {planned.item(job).experiment.adapt.base for job in all_trials(planned)} == {"base"}
        assert {planned.item(job).base.train.steps for job in all_trials(planned)} == {4}
        assert json.loads((folder / "experiment.json").read_text())["experiment"]["seed"] == 0
        assert planned.state.total == 6
