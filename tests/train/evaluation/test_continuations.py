"""Continuations of many prompts: those of each alone, also after a kill."""

import jax
import numpy as np
import pytest

import tape_jax as tape
from tape_jax.sharding import ShardingConfig
from tests.models import random_variables, small_model
from train.evaluation.continuations import Continuer, continuations
from train.evaluation.journal import Journal
from train.evaluation.programs import KeptResults, Programs

PAD = 12


def writer(kind, num_layers):
    """A model, prompts of several lengths, and what it writes after each of them."""
    model = small_model(kind, num_layers=num_layers, vocab_size=14)
    variables = random_variables(model)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, PAD, n).astype(np.int32) for n in (3, 9, 2, 9, 5)]
    lists = [prompt.tolist() for prompt in prompts]
    return model, variables, prompts, np.asarray(tape.generate(model, variables, lists, 6))[:, -6:]


@pytest.mark.slow
def test_are_those_of_all_at_once():
    """With few at a time, in chunks, up to a stop, on a mesh."""
    model, variables, prompts, alone = writer("tape", 2)
    sharding = ShardingConfig(data=2, tensor=2).build(jax.devices()[:4])
    model = tape.Transformer(model.config, sharding=sharding)
    variables = jax.device_put(variables, sharding.of(model, variables))
    # The token that one of them writes second ends a continuation.
    stop = int(alone[1][1])
    wanted = [a[: [*a.tolist(), stop].index(stop)].tolist() for a in alone]
    calls = []
    continuer = Continuer(model, variables, pad=PAD, stops=(stop,), batch_size=2, chunk=3)
    found = continuations(
        continuer, prompts, 6, shapes=2, progress=lambda *call: calls.append(call)
    )
    assert [answer.tolist() for answer in found] == wanted
    assert calls == [(2, 5), (4, 5), (5, 5)]
    assert continuer.programs.speed.tokens == sum(map(len, [*prompts, *wanted]))
    assert 0 < continuer.programs.speed.compiling < continuer.programs.speed.seconds
    assert continuer.programs.memory.parameters > 0


def test_a_killed_one_goes_on(tmp_path):
    """With the batches that it has not, and only where the same is asked."""
    model, variables, prompts, alone = writer("rope", 1)
    path = tmp_path / "kept.jsonl"

    def again(length=6, **options):
        programs = Programs(kept=KeptResults(Journal(path, "mine", {"step": 1})))
        continuer = Continuer(model, variables, pad=PAD, batch_size=2, programs=programs, **options)
        found = continuations(continuer, prompts, length, shapes=1)
        return [answer.tolist() for answer in found], continuer.programs.speed.tokens

    wanted = alone.tolist()
    assert again() == (wanted, 28 + 5 * 6)
    whole = path.read_bytes().split(b"\n")
    # A kill in the line of the second batch, of the prompts of 5 and 3 tokens.
    path.write_bytes(b"\n".join([*whole[:2], whole[2][:30]]))
    assert again() == (wanted, 5 + 3 + 2 + 3 * 6)
    assert again() == (wanted, 0)
    lines = len(path.read_bytes().split(b"\n"))
    assert again(enough=lambda rows: True)[1] == 0
    assert again(5, enough=lambda rows: True)[1] > 0
    assert len(path.read_bytes().split(b"\n")) == lines
