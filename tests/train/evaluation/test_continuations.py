import jax
import numpy as np
import pytest

import tape_jax as tape
from tape_jax.sharding import ShardingConfig
from tests.models import random_variables, small_model
from train.evaluation import programs as module
from train.evaluation.continuations import Continuer, continuations
from train.evaluation.journal import Journal
from train.evaluation.programs import KeptResults, Memory, Programs

PAD = 12


@pytest.fixture(scope="module")
def trained():
    """A model, prompts of several lengths, and what it writes after each of them."""
    model = small_model("tape", num_layers=2, vocab_size=14)
    variables = random_variables(model)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, PAD, n).astype(np.int32) for n in (3, 9, 2, 9, 5)]
    lists = [prompt.tolist() for prompt in prompts]
    return model, variables, prompts, np.asarray(tape.generate(model, variables, lists, 6))[:, -6:]


@pytest.mark.slow
def test_are_those_of_all_at_once(trained):
    """With few at a time, in chunks, up to a stop, on a mesh."""
    model, variables, prompts, alone = trained
    sharding = ShardingConfig(data=2, tensor=2).build(jax.devices()[:4])
    model = tape.Transformer(model.config, sharding=sharding)
    variables = jax.device_put(variables, sharding.of(model, variables))
    # The token that one of them writes second ends a continuation.
    stop = int(alone[1][1])
    wanted = [a[: [*a.tolist(), stop].index(stop)].tolist() for a in alone]
    calls = []
    continuer = Continuer(model, variables, pad=PAD, stop=stop, batch_size=2, chunk=3)
    found = continuations(
        continuer, prompts, 6, shapes=2, progress=lambda *call: calls.append(call)
    )
    assert [answer.tolist() for answer in found] == wanted
    assert calls == [(2, 5), (4, 5), (5, 5)]
    assert continuer.speed.tokens == sum(map(len, [*prompts, *wanted]))
    assert 0 < continuer.speed.compiling < continuer.speed.seconds
    assert continuer.programs.memory.parameters > 0


def test_what_does_not_fit_is_refused(trained, monkeypatch):
    model, variables, prompts, _ = trained
    monkeypatch.setattr(module, "_memory", lambda program: Memory(50, 100, 100))
    continuer = Continuer(model, variables, pad=PAD, batch_size=4)
    with pytest.raises(ValueError, match=r"4 texts of 9 tokens at a time .* at most 1 at a time"):
        continuations(continuer, prompts, 2, shapes=1)
    Memory(50, 40, 100).check(4, 9)
    Memory(50, 400, None).check(4, 9)


def test_a_killed_one_goes_on(trained, tmp_path):
    """With the batches that it has not, and only where the same is asked."""
    model, variables, prompts, alone = trained
    path = tmp_path / "kept.jsonl"

    def again(length=6, **options):
        programs = Programs(kept=KeptResults(Journal(path, "mine", {"step": 1})))
        continuer = Continuer(model, variables, pad=PAD, batch_size=2, programs=programs, **options)
        found = continuations(continuer, prompts, length, shapes=2)
        return [answer.tolist() for answer in found], continuer.speed.tokens

    wanted = alone.tolist()
    assert again() == (wanted, 28 + 5 * 6)
    whole = path.read_bytes().split(b"\n")
    # A kill in the line of the second batch, of the prompts of 5 and 3 tokens.
    path.write_bytes(b"\n".join([*whole[:2], whole[2][:30]]))
    assert again() == (wanted, 5 + 3 + 2 + 3 * 6)
    assert again() == (wanted, 0)
    assert again(4) == ([x[:4] for x in wanted], 28 + 5 * 4)
    lines = len(path.read_bytes().split(b"\n"))
    assert again(enough=lambda rows: True)[1] == 0
    assert again(5, enough=lambda rows: True)[1] > 0
    assert len(path.read_bytes().split(b"\n")) == lines
