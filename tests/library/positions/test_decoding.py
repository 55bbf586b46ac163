"""Cached decoding with what no drawn model of test_properties.py has, against the full pass."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import RandomPositions, Transformer, init_cache
from tape_jax.positions import Layers, RandomRope, Tape, Xpos, create
from tests import drawn
from tests.drawn import Batch
from tests.library.positions.test_combined import combined
from tests.models import FLOAT64, encoding, random_variables, small_model
from tests.selection import mostly_slow

# Padding, two segments with gaps between positions, and two in turns.
IDS = np.array([[0, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2], [1, 2, 1, 1, 2, 2]], np.int32)
PLACES = np.array([[0, 0, 1, 3, 4, 7], [2, 3, 4, 0, 1, 5], [0, 0, 2, 3, 1, 4]], np.int32)
CAPACITY = 9


def assert_chunks_equal_the_full_pass(model: Transformer, *, key: int | None = None) -> None:
    """An empty cache is given several tokens, then others behind them, then single ones.

    Args:
      model: in float64.
      key: seed of the random stream ``"positions"``, and of the cache's draw; None: there is none.
    """
    batch = Batch(drawn.tokens(0, *IDS.shape), PLACES, IDS)
    variables = random_variables(model)
    full = drawn.compiled_full_pass(model, variables, batch, length=CAPACITY, key=key)
    # What a model draws follows its random stream by the name of the module.
    stream = None if key is None else stream_key(model, key)
    cache: Any = init_cache(model, len(IDS), CAPACITY, key=stream)
    found = []
    for part in (slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6)):
        logits, cache = drawn.compiled_chunk(model, variables, cache, batch.part(slice(None), part))
        found.append(logits)
    drawn.assert_near(jnp.concatenate(found, 1)[IDS != 0], full[IDS != 0], 1e-10)


def stream_key(model: Transformer, seed: int) -> jax.Array:
    """The key that a model takes from its random stream ``"positions"`` with this seed."""
    key = jax.random.key(seed)
    return model.bind({}, rngs={"positions": key}).make_rng("positions")


# By name the encoding, and what positions are drawn.
CASES = {
    "degree": (Tape(degree=3, norm="unit", head_shift=2.0, attention_mix="heads"), None),
    "tape": (Tape(still_heads=1, head_shift=2.0, attention_mix="heads"), None),
    "xpos": (Xpos(still_heads=1), None),
    "some heads": (create("tape+alibi+fox", alibi_on_heads=1, fox_on_heads=3), None),
    "schedule": (create("tape+window/none/tape+window/rope+fox", size=2, base=50.0), None),
    "schedule, one state": (create("tape+window/tape+alibi/none", size=2), None),
    "schedule by heads": (Layers([Tape(head_shift=2.0), RandomRope(range=16)]), None),
    "shifted": (Tape(), "shifted"),
    "spaced learned": (encoding("learned"), "spaced"),
    "stretched fire": (encoding("fire", threshold=3.0), "stretched"),
}
CASES |= {
    kinds: (combined(kinds, **options), None)
    for kinds, options in {
        "tape+fox": {},
        "fox+alibi+t5": {},
        "wall+fox": {"chunk": 4},
        "tape+dape_kerple": {},
        "inkling_local+stickbreaking": {"reach": 3},
        "fox+grape_path+stickbreaking": {},
        "rope_pp+fox": {},
        "rope_pp+cope": {},
        "path+fox": {},
        # Several coordinates a token for the state, one index for the embedding.
        "mrope+abacus": {},
        "rope+position_coupling": {"axes": 2},
    }.items()
}
QUICK = ("schedule", "tape+fox", "mrope+abacus")


def model_of(name: str) -> Transformer:
    """A model of four query heads on two states."""
    position, draw = CASES[name]
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    drawn_from = None if draw is None else RandomPositions(draw, 40)
    # Of TAPE a third one reads a state that was updated twice.
    layers = 5 if isinstance(position, Layers) else 3 if position.updates(0, 3) else 2
    return small_model(position, num_layers=layers, random_positions=drawn_from, **FLOAT64, **sizes)


@pytest.mark.parametrize("name", mostly_slow(CASES, *QUICK))
def test_chunks_equal_the_full_pass(x64, name):
    drawn_from = CASES[name][1]
    assert_chunks_equal_the_full_pass(model_of(name), key=None if drawn_from is None else 5)


@pytest.mark.slow
def test_without_a_key_positions_are_not_drawn(x64):
    assert_chunks_equal_the_full_pass(model_of("stretched fire"))
