import jax
import numpy as np
import pytest

import tape_jax as tape
from tape_jax.sharding import ShardingConfig
from tests.models import random_variables, small_model
from train.evaluation.likelihoods import Given, Scorer, rounded


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("kind", "mesh"), [("rope", None), ("tape", ShardingConfig(data=2, tensor=2))]
)
def test_are_those_of_each_text_alone(kind, mesh):
    """In batches of several lengths; one continuation is what greedy decoding writes."""
    model = small_model(kind, num_layers=2, vocab_size=14)
    variables = random_variables(model)
    rng = np.random.default_rng(0)
    given = [
        Given(rng.integers(0, 13, n), start) for n, start in ((20, 1), (9, 8), (40, 33), (5, 2))
    ]
    written = np.asarray(tape.generate(model, variables, [given[1].tokens.tolist()], 4))[0]
    given.append(Given(written, 9))
    wanted = []
    apply = jax.jit(model.apply)
    for tokens, start in given:
        # Causal, so that what fills the row up to one length for all changes nothing.
        row = np.pad(tokens[:-1], (0, 40 - len(tokens)))[None]
        logits = jax.nn.log_softmax(apply(variables, row)[0])[start - 1 : len(tokens) - 1]
        chosen = tokens[start:]
        right = (logits.argmax(-1) == chosen).all()
        wanted.append((float(logits[np.arange(len(chosen)), chosen].sum()), bool(right)))
    if mesh is not None:
        sharding = mesh.build(jax.devices()[:4])
        model = tape.Transformer(model.config, sharding=sharding)
        variables = jax.device_put(variables, sharding.of(model, variables))
    scorer = Scorer(model, variables, pad=13, batch_size=2)
    found = {}
    for rows, likelihoods in scorer.run(given):
        found.update(zip(rows.tolist(), likelihoods, strict=True))
    ours = [found[i] for i in range(len(given))]
    np.testing.assert_allclose([x.sum for x in ours], [x for x, _ in wanted], atol=1e-4)
    assert [x.greedy for x in ours] == [x for _, x in wanted]
    assert ours[-1].greedy
    assert scorer.programs.speed.tokens == sum(len(x.tokens) for x in given)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("length", [35, 40])
def test_a_limit_that_is_no_round_number(length):
    """A text that fills a model is scored as by one that takes more."""
    assert rounded(length - 1) == 40 if length == 40 else rounded(length - 1) > length
    limited, free = (
        small_model("rope", num_layers=1, vocab_size=14, max_length=limit)
        for limit in (length - 1, None)
    )
    variables = random_variables(free)
    given = [Given(np.random.default_rng(0).integers(0, 13, length), 3)]
    (ours,), (wanted,) = (
        [found for _, found in Scorer(model, variables, pad=13).run(given)]
        for model in (limited, free)
    )
    np.testing.assert_allclose(ours[0].sum, wanted[0].sum, atol=1e-4)
