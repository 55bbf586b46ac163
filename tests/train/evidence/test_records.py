"""Results files: read back as written, refused if they are of anything else."""

import json

import pytest

from tests.train.evidence.results import ENVIRONMENT
from train import experiment
from train.evidence.records import Item, read


@pytest.fixture
def item(config):
    return Item("copying", "tape-seed1", "tape", experiment.from_file(config, ["--config.seed=1"]))


def test_round_trip(place, item):
    assert place.store.get(item) is None
    place.store.put(item, {"result": [1]}, ENVIRONMENT, 12.34)
    record = place.store.get(item)
    assert (record.name, record.rival, record.seed) == ("tape-seed1", "tape", 1)
    assert (record.found, record.seconds) == ({"result": [1]}, 12.3)
    assert [path.name for path in place.store.path(item).parent.iterdir()] == ["tape-seed1.json"]


def test_a_record_from_before_a_field_had_been_added(place, item):
    """A new field of a config has a default, which is what was run then."""
    place.store.put(item, {}, ENVIRONMENT, 0)
    path = place.store.path(item)
    content = json.loads(path.read_text())
    del content["experiment"]["train"]["spike"]
    path.write_text(json.dumps(content))
    assert place.store.get(item) is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda record: record["experiment"]["train"].update(steps=3),
            r"tape-seed1\.json holds the results of another experiment \(train\.steps: 3 there, 2 "
            r"here\): remove it",
        ),
        (lambda record: record.update(rival="rope"), "rival: 'rope' there, 'tape' here"),
        (
            lambda record: record.update(format="tape-jax evidence, version 0"),
            r"tape-seed1\.json is not a results file of this version: its format is '.*version 0'",
        ),
        (lambda record: record.pop("found"), r"tape-seed1\.json is damaged: .*got"),
        (lambda record: record.clear(), "its format is None"),
    ],
)
def test_refused(place, item, change, message):
    place.store.put(item, {}, ENVIRONMENT, 0)
    path = place.store.path(item)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        place.store.get(item)


def test_half_a_file(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"format":')
    with pytest.raises(ValueError, match=r"x\.json is not a results file: "):
        read(path)


def test_a_number_that_is_none_is_not_written(place, item):
    with pytest.raises(ValueError, match="not JSON compliant"):
        place.store.put(item, {"loss": float("nan")}, ENVIRONMENT, 0)
    assert place.store.get(item) is None
