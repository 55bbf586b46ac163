"""Questions that were held out are told from those that were trained, as the tasks tell them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import held_out
from research.tasks.recall import Recall
from train.tasks.arithmetic import Addition
from train.tasks.places import PAD

TASK = Recall(symbols=6, shortest=2, longest=3)


class Model:
    """Has the value of every key right, but where the two together are among the ``wrong``."""

    def __init__(self, wrong):
        self.variables, self.wrong = {}, jnp.asarray(wrong)

    def apply(self, variables, tokens, length):
        key = tokens - TASK.first["q"] + TASK.first["k"]
        said = jnp.zeros(tokens.shape, jnp.int32)
        for place in range(0, tokens.shape[1] - 1, 2):
            found = tokens[:, place, None] == key
            said = jnp.where(found, tokens[:, place + 1, None], said)
        asked, value = tokens - TASK.first["q"], said - TASK.first["v"]
        avoided = self.wrong[jnp.clip(asked, 0, 5), jnp.clip(value, 0, 5)]
        return jax.nn.one_hot(jnp.where(avoided, PAD, said), TASK.vocab_size)


@pytest.fixture
def never_trained():
    """bool [K, V], which keys never have which values in training; learned from batches."""
    seen = np.zeros((6, 6), bool)
    batch = TASK.examples_to_learn(np.random.default_rng(0), 2000)
    trained = batch["weights"] > 0
    asked, values = batch["inputs"][trained], batch["targets"][trained]
    seen[asked - TASK.first["q"], values - TASK.first["v"]] = True
    assert 0 < (~seen).sum() < 10
    return ~seen


def test_what_was_trained_and_what_was_not(never_trained):
    """Also beyond the lengths that were trained."""
    columns = range(3, 6)
    everything = held_out.ask(Model(np.zeros((6, 6), bool)), TASK, columns, 500)
    assert everything.shares() == ("100.0", "100.0")
    avoiding = held_out.ask(Model(never_trained), TASK, columns, 500)
    assert avoiding.shares() == ("100.0", "0.0")
    assert 0 < avoiding.held_out.sum() < 200
    np.testing.assert_array_equal(avoiding.held_out, everything.held_out)


def test_the_table(monkeypatch, tmp_path, never_trained, capsys):
    trained = Model(never_trained)
    trained.experiment = SimpleNamespace(task=TASK)
    monkeypatch.setattr(held_out.runs, "restore_for_evaluation", lambda folder: trained)
    held_out.main([str(tmp_path / "studies" / "avoiding"), "--questions=200"])
    *_, line = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["studies/avoiding", "200", "100.0", "0.0", "100.0", "0.0"]
    trained.experiment.task = Addition(2)
    with pytest.raises(ValueError, match=r"expected a run of a task of places.*'addition'"):
        held_out.main([str(tmp_path)])
