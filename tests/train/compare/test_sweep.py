"""Sweeps: what is trained, which setting is chosen by what, and what is kept."""

import dataclasses
import json
import types
from typing import Any

import pytest

from research.tasks.algorithms import Algorithm
from research.tasks.words import WordEvaluation, Words
from tape_jax import Transformer
from tests.train import small
from train import experiment
from train.compare import sweep
from train.compare.sweep import Setting, Sweep
from train.tasks.arithmetic import Addition, AdditionEvaluation
from train.tasks.passkey import Passkey, PasskeyEvaluation
from train.training import runs


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return small.config(
        tmp_path_factory.mktemp("configs"),
        {"name": "words", "group": "A5", "max_length": 3},
        {"num_heads": 1},
        evaluation={"longest": 4, "samples": 5},
        VARIANTS={
            "wide": {"model.hidden_size": 16},
            "rms": {"model.position.norm": "rms", "seed": 3},
        },
    )


@pytest.mark.parametrize(
    ("text", "field", "values"),
    [
        ("train.learning_rate=1e-4,3e-4", "train.learning_rate", ("1e-4", "3e-4")),
        ("--config.seed=1", "seed", ("1",)),
        ("model.layers=(0, 1),all,[1,2]", "model.layers", ("(0, 1)", "all", "[1,2]")),
        ("task.problem='a,b',c", "task.problem", ("'a,b'", "c")),
    ],
)
def test_parse(text, field, values):
    assert sweep.parse(text) == Sweep(field, values)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["train.learning_rate"], "expected a sweep such as .*; got 'train.learning_rate'"),
        (["seed=1,,2"], "has an empty value"),
        (["seed=1,2,1"], "has values twice: 1"),
        (["layers=(0,1"], "brackets or quotes of '\\(0,1' are not closed"),
        (["seed=1", "config.seed=2"], "a field is swept twice: seed, seed"),
        (["a=(1),[1]"], "cannot be told apart in folder names: a=_1_, a=_1_"),
    ],
)
def test_misuse(texts, message):
    with pytest.raises(ValueError, match=message):
        sweep.settings(texts)


class TestSettings:
    def test_product(self):
        found = sweep.settings(["train.learning_rate=1e-4,3e-4", "seed=0,1"])
        assert [setting.name for setting in found] == [
            "learning_rate=1e-4,seed=0",
            "learning_rate=1e-4,seed=1",
            "learning_rate=3e-4,seed=0",
            "learning_rate=3e-4,seed=1",
        ]
        assert found[1].overrides == ("--config.train.learning_rate=1e-4", "--config.seed=1")
        assert found[0].folder("tape") == "tape-learning_rate=1e-4,seed=0"
        found = sweep.settings(["model.position.layers=(0, 1)", "model.layers=2"])
        assert [s.name for s in found] == ["model.position.layers=_0,_1_,model.layers=2"]
        assert sweep.settings([]) == [Setting()]
        assert Setting().folder("tape") == "tape"

    def test_variants(self, config, tmp_path):
        wide, rms = sweep.variants(config)
        assert (wide.name, rms.name) == ("wide", "rms")
        assert experiment.from_file(config, wide.overrides).model.hidden_size == 16
        made = experiment.from_file(config, rms.overrides)
        assert (made.model.position.norm, made.seed) == ("rms", 3)
        assert sweep.variants(config, ["rms"]) == [rms]
        with pytest.raises(ValueError, match=r"unknown variant of .*small\.py 'wid'.*'wide'"):
            sweep.variants(config, ["wid"])
        plain = tmp_path / "plain.py"
        plain.write_text("def get_config(): pass")
        with pytest.raises(ValueError, match=r"plain\.py has no variants"):
            sweep.variants(plain)


@dataclasses.dataclass
class Scored:
    """A result with these scores."""

    scores: dict[str, float]

    def summary(self) -> dict[str, float]:
        return self.scores


def scored(outside, inside) -> Any:
    return Scored({"exact_match_outside": outside, "exact_match_inside": inside})


class TestBest:
    task = Algorithm("copy", 4)
    a, b, c = (Setting(name) for name in "abc")

    def test_mean_rank_then_the_first_score(self):
        results = {
            self.a: [scored(0.2, 0.9), scored(0.2, 0.9)],
            self.b: [scored(0.1, 0.2), scored(0.5, 0.3)],
        }
        assert sweep.best(self.task, results) == self.b
        results = {self.a: [scored(0, 0.8)], self.b: [scored(0, 0.9)], self.c: [scored(0, 0.1)]}
        assert sweep.best(self.task, results) == self.b
        same = [scored(0.2, 0.9)]
        assert sweep.best(self.task, {self.b: same, self.a: same}) == self.b, "the first"
        lower = [self.task.scores[0]._replace(higher_is_better=False)]
        task: Any = types.SimpleNamespace(scores=lower)
        results = {self.a: [scored(3.0, 0)], self.b: [scored(2.0, 0)]}
        assert sweep.best(task, results) == self.b

    def test_chance_in_one_score_does_not_choose(self):
        task: Any = types.SimpleNamespace(
            scores=[self.task.scores[0]._replace(key=key) for key in ("far", "near", "next")]
        )
        results: Any = {
            self.a: [Scored({"far": 0.02, "near": 0.01, "next": 0.01})],
            self.b: [Scored({"far": 0.01, "near": 0.2, "next": 0.3})],
        }
        assert sweep.best(task, results) == self.b

    def test_missing_or_undefined_scores_are_the_worst(self):
        results = {self.a: [scored(float("nan"), 1)], self.b: [scored(0.0, 0)], self.c: []}
        assert sweep.best(self.task, results) == self.b
        first, second, third = sweep.table(self.task, {"rope": results}).splitlines()[2:]
        assert "yes" in second
        assert (first.count(" - "), third.count("diverged")) == (1, len(self.task.scores))
        results = {self.a: [scored(float("inf"), 0)], self.b: [scored(0.0, 0)]}
        assert sweep.best(self.task, results) == self.b
        with pytest.raises(ValueError, match="a sweep without results"):
            sweep.best(self.task, {})

    def test_nothing_that_is_measured_compares(self):
        """With one result it is an error; if all settings diverged, the first is chosen."""
        message = "expected one of the scores exact_match_outside.*; got exact_match_middle, loss"
        other: Any = Scored({"loss": 1.0, "exact_match_middle": 0.5})
        with pytest.raises(ValueError, match=message):
            sweep.best(self.task, {self.a: [other], self.b: []})
        assert sweep.best(self.task, {self.b: [], self.a: []}) == self.b


class TestValidation:
    def test_asks_other_questions(self):
        for task, options in (
            (Addition(3), AdditionEvaluation(seed=5)),
            (Words("A5", 3), WordEvaluation()),
            (Passkey(), PasskeyEvaluation()),
        ):
            changed = sweep.validation_options(task, options)
            assert changed.seed != options.seed
            assert dataclasses.replace(changed, seed=options.seed) == options
        task = Words("A5", 4)
        test, other = (set(task.ordinary(task.ask([4], 500, seed))) for seed in (0, 2**31))
        assert len(test & other) < 5

    @pytest.mark.slow
    def test_a_run_is_validated_once(self, config, tmp_path, monkeypatch):
        folder, e = tmp_path / "run", experiment.from_file(config)
        runs.create(folder, e)
        trained = runs.TrainedRun(e, 1, Transformer(e.model), runs.init_variables(e))
        monkeypatch.setattr(runs, "restore_model", lambda folder, **_: trained)
        with pytest.raises(ValueError, match="is at step 1 of 2: finish it first"):
            sweep.validate(folder, e.evaluation)
        trained = trained._replace(step=2)
        result = sweep.validate(folder, e.evaluation)
        record = json.loads((folder / "validation.json").read_text())
        assert (record["step"], record["options"]["seed"]) == (2, 2**31)
        assert not (folder / "evaluation.json").exists()
        trained = None
        assert sweep.validate(folder, e.evaluation).to_json() == result.to_json()
        trained = runs.TrainedRun(e, 2, Transformer(e.model), runs.init_variables(e))
        sweep.validate(folder, dataclasses.replace(e.evaluation, seed=1))
        record = json.loads((folder / "validation.json").read_text())
        assert record["options"]["seed"] == 2**31 + 1

        (folder / "validation.json").write_text("{}")
        with pytest.raises(ValueError, match="is not a validation written by this program"):
            sweep.validate(folder, e.evaluation)
