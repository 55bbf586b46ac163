"""Records: read back as written, left out and named where they are of anything else."""

import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest

from research import records
from research.records import Item, Store, describe_source, portable, rounded
from tests.research.results import MADE
from train import experiment
from train.experiment.adaptation import Adaptation


@pytest.fixture
def item(config):
    return Item(
        "copying",
        "tape-seed1",
        "tape",
        experiment.from_file(config, ["--config.seed=1"]),
        protocol={"repeats": 20},
    )


def change(place, edit):
    """Changes the file of the records: ``edit`` takes its first line and the last."""
    path = place.store.path("copying")
    values = [json.loads(line) for line in path.read_text().splitlines()]
    edit(values[0]["shared"], values[-1])
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def test_round_trip(place, item):
    assert place.store.get(item) is None
    assert place.store.misfit(item) is None
    place.store.put(item, {"result": [1]}, MADE._replace(seconds=12.34))
    record = place.store.get(item)
    assert (record.name, record.rival, record.seed) == ("tape-seed1", "tape", 1)
    assert (record.found, record.seconds) == ({"result": [1]}, 12.3)
    assert (record.environment, record.code) == (MADE.environment, MADE.code)
    assert (record.base, record.protocol) == (None, {"repeats": 20})
    assert place.store.misfit(item) is None
    assert place.store.names("copying") == ["tape-seed1"]
    assert place.store.problems("copying") == []
    place.store.put(item, {"result": [2]}, MADE)
    assert place.store.get(item).found == {"result": [2]}, "the newer one counts"
    place.store.tidy("copying")
    assert place.store.get(item).found == {"result": [2]}
    # A field that was added to configs later has a default, which is what was run then.
    change(place, lambda shared, _: shared["experiment"]["train"].pop("spike"))
    assert place.store.get(item) is not None


def test_only_results_are_rounded(place, item):
    """What was run is kept to the last digit, or it would not be known again."""
    train = dataclasses.replace(item.experiment.train, learning_rate=0.00123456789)
    item = item._replace(experiment=dataclasses.replace(item.experiment, train=train))
    place.store.put(item, {"loss": 0.00123456789, "a": [1234567.0, True, 12345678]}, MADE)
    record = place.store.get(item)
    assert record.experiment["train"]["learning_rate"] == 0.00123456789
    assert record.found == {"loss": 0.00123457, "a": [1234570.0, True, 12345678]}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda shared, _: shared["experiment"]["train"].update(steps=3),
            "train.steps: 3 there, 2 here",
        ),
        (lambda _, line: line.update(rival="rope"), "rival: 'rope' there, 'tape' here"),
        (
            lambda shared, _: shared["protocol"].update(repeats=9),
            "protocol.repeats: 9 there, 20 here",
        ),
        (
            lambda shared, _: shared.update(base=shared["experiment"]),
            "only one of them adapts a base",
        ),
        (lambda shared, _: shared["experiment"].pop("adapt"), "experiment: KeyError: 'adapt'"),
    ],
)
def test_of_another_run(place, item, edit, message):
    """It is left out, it is said in what it differs, and the run can be made again."""
    place.store.put(item, {}, MADE)
    change(place, edit)
    assert place.store.get(item) is None
    assert place.store.misfit(item).startswith(message)
    assert place.store.names("copying") == ["tape-seed1"]
    place.store.put(item, {"result": 1}, MADE)
    assert place.store.get(item).found == {"result": 1}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda shared, _: shared.pop("code"), "a Record has the fields .* got"),
        (lambda shared, _: shared.update(protocol=3), "protocol: expected fields, got 3"),
    ],
)
def test_unreadable(place, item, edit, message):
    place.store.put(item, {}, MADE)
    change(place, edit)
    assert place.store.get(item) is None
    (problem,) = place.store.problems("copying")
    assert problem.startswith(f"{place.store.path('copying')}: tape-seed1: ")
    with pytest.raises(ValueError, match=message):
        raise ValueError(problem)


def test_a_commit(tmp_path, monkeypatch):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True)

    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe_source() == {"commit": None, "dirty": None}, "which no git knows"
    (tmp_path / "tape_jax" / "deep").mkdir(parents=True)
    (tmp_path / "tape_jax" / "deep" / "a.py").write_text("1")
    git("init")
    git("add", ".")
    git("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-m", "x")
    found = describe_source()
    assert re.fullmatch("[0-9a-f]{40}", found["commit"])
    assert found["dirty"] is False
    (tmp_path / "tape_jax" / "page.md").write_text("written by the run itself")
    assert describe_source()["dirty"] is False
    (tmp_path / "tape_jax" / "deep" / "a.py").write_text("2")
    assert describe_source()["dirty"] is True


def test_wherever_the_base_is(place, item):
    """Runs can be moved; which run is adapted, and how, cannot."""

    def adapted(folder, method="lora", seed=1):
        e = dataclasses.replace(item.experiment, adapt=Adaptation(folder, method))
        base = dataclasses.replace(item.experiment, seed=seed)
        return item._replace(experiment=portable(e), base=base)

    place.store.put(adapted("runs/base"), {}, MADE)
    assert place.store.get(adapted("/elsewhere/base")) is not None
    assert place.store.misfit(adapted("runs/base", seed=2)) == "base.seed: 1 there, 2 here"
    assert "adapt.method: 'lora' there" in place.store.misfit(adapted("runs/base", "full"))


@pytest.mark.slow
def test_those_of_the_repository():
    """No wording, six digits, and the code that made it; each file is read once."""
    store = Store(Path("research/records"))
    for study in sorted(path.stem for path in store.folder.glob("*.jsonl")):
        assert all(
            re.fullmatch("[0-9a-f]{40}", record.code["commit"]) for record in store.records(study)
        )
        assert store.problems(study) == []
        assert store._study(study) is store._study(study)
        text = store.path(study).read_text()
        assert '"wording"' not in text
        header, *lines = map(json.loads, text.splitlines())
        for record in lines:
            assert all(rounded(v) == v for k, v in record.items() if k.startswith("found"))
        # States are looked into in runs of several tasks.
        assert study == "states" or header["shared"]["experiment"]["task"]
