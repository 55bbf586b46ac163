"""Streams of batches: each is a function of its number, whoever reads it and wherever it begins."""

import itertools
import json

import numpy as np
import pytest

from train.tasks import get_task
from train.tasks.arithmetic import Addition

streams = pytest.mark.parametrize("name", ["addition", "recall", "passkey"])


@streams
def test_a_batch_is_a_function_of_seed_and_number(name):
    task = get_task(name)
    first = task.batch(3, 7, 32)
    np.testing.assert_equal(task.batch(3, 7, 32), first)
    for other in ((4, 7), (3, 8)):
        assert np.any(task.batch(*other, 32)["inputs"] != first["inputs"])


@streams
def test_restores_bit_for_bit(name):
    dataset = get_task(name).dataset(seed=2**64 - 1, batch_size=4)
    iterator = iter(dataset)
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    ahead = [next(iterator) for _ in range(3)]
    resumed = iter(dataset)
    resumed.set_state(state)
    for expected in ahead:
        np.testing.assert_equal(next(resumed), expected)


@streams
def test_processes_share_the_stream(name):
    task = get_task(name)
    whole = iter(task.dataset(seed=9, batch_size=6))
    parts = [iter(task.dataset(9, 6, process, 3)) for process in range(3)]
    for batch in itertools.islice(whole, 2):
        shares = [next(part) for part in parts]
        joined = {name: np.concatenate([share[name] for share in shares]) for name in batch}
        np.testing.assert_equal(joined, batch)
    assert len({str(part.get_state()) for part in parts}) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a positive integer; got 0"),
        ({"batch_size": 9, "process_count": 2}, "9 is not a multiple of process_count = 2"),
        ({"batch_size": 4, "process_index": 1}, r"process_index must be in 0\.\.0; got 1"),
        ({"batch_size": 4, "seed": -1}, "seed must be an integer from 0"),
        ({"batch_size": 4, "seed": 0.5}, "seed must be an integer from 0"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Addition(3).dataset(**{"seed": 0, **options})
