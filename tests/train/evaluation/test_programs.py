"""Passes of a model that are planned, kept and gone on with."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from train.evaluation import programs as module
from train.evaluation.journal import Journal, alone
from train.evaluation.programs import KeptResults, Memory, Programs

BATCHES = [((np.full((2, 3), i, np.int32),), 6) for i in range(4)]


@dataclasses.dataclass(frozen=True)
class Sums:
    factor: float = 1.0

    def __call__(self, variables, tokens):
        return self.factor * variables * tokens.sum(axis=1)


def opened(path, **options):
    return Programs(kept=KeptResults(Journal(path, "mine", {"step": 1}, **options)))


def results(programs, name="sums", function=None, batches=BATCHES):
    found = programs.results(name, function or Sums(), jnp.float32(0.1), iter(batches))
    return [x.tolist() for x in found]


WANTED = [[np.float32(0.1) * 3 * i] * 2 for i in range(4)]


def test_what_is_kept_is_not_computed_again(tmp_path):
    path = tmp_path / "kept.jsonl"
    first = opened(path)
    np.testing.assert_allclose(results(first), WANTED, rtol=1e-6)
    assert first.speed.tokens == 24
    assert first.memory.parameters > 0
    lines = path.read_bytes().split(b"\n")
    assert len(lines) == 6
    # A kill in the third line.
    path.write_bytes(b"\n".join([*lines[:3], lines[3][:20]]))
    again = opened(path)
    assert results(again) == results(first)
    assert again.speed.tokens == 12
    assert sorted(path.read_bytes().split(b"\n")) == sorted(lines)
    # Found again by the name and by what is asked, not by the place.
    assert results(again, batches=BATCHES[::-1]) == results(first)[::-1]
    assert again.speed.tokens == 12
    other = results(again, "twice", Sums(2.0))
    np.testing.assert_allclose(other, 2 * np.array(WANTED), rtol=1e-6)
    assert again.speed.tokens == 12 + 24


def test_results_of_another_checkpoint_are_forgotten(tmp_path):
    path = tmp_path / "kept.jsonl"
    results(opened(path))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="answers to other questions"):
        Journal(path, "mine", {"step": 2}, replace=["seed"])
    journal = Journal(path, "mine", {"step": 2}, replace=["step"])
    assert list(journal.read(dict)) == []
    assert path.read_bytes() == before
    journal.add([{"x": 1}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"format": "mine", "step": 2},
        {"x": 1},
    ]
    with pytest.raises(ValueError, match=r"answers to other questions \(step was 2, and is 1\)"):
        opened(path)
    assert opened(path, fresh=True).kept.found == {}


def test_one_evaluation_at_a_time(tmp_path):
    path = tmp_path / "kept.jsonl"
    with alone(path):
        said = pytest.raises(ValueError, match=r"another evaluation is writing .*kept\.jsonl")
        with said, alone(path):
            pass
        with alone(tmp_path / "other.jsonl"):
            pass
    (tmp_path / ".kept.jsonl.lock").touch()  # One that was killed leaves it.
    with alone(path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("mine\n", "was not written by this program: it is left alone; move it away"),
        ("", "was not written by this program"),
        ('{"format": "mine", "step": 1}\n{"batch": "a"}\n', "damaged in line 2: move it away, or"),
        (
            '{"format": "mine", "step": 1}\n'
            '{"batch": "a", "dtype": "<f4", "shape": [3], "values": "AAAA"}\n',
            "damaged in line 2",
        ),
    ],
)
def test_files_of_others_and_damaged_ones(tmp_path, content, message):
    path = tmp_path / "kept.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        opened(path)
    assert path.read_text() == content


def test_what_does_not_fit_is_refused_before_anything_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_memory", lambda program: Memory(50, 100, 100))
    with pytest.raises(ValueError, match=r"2 texts of 3 tokens at a time .* at most 1 at a time"):
        results(opened(tmp_path / "kept.jsonl"))
    assert not list(tmp_path.iterdir())
    Memory(50, 40, 100).check(4, 9)
    Memory(50, 400, None).check(4, 9)
