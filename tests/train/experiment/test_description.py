import math

import jax
import numpy as np
import pytest

from train.experiment import description

STEPS, PEAK = 200, 0.5


def oracle(kind: str, step: int, rise: int, final: float, power: float) -> float:
    """The learning rate in plain arithmetic."""
    if step < rise:
        return PEAK * (step + 1) / rise
    done = min((step - rise) / (STEPS - rise), 1.0)
    left = {
        "constant": 1.0,
        "linear": final + (1 - final) * (1 - done),
        "polynomial": final + (1 - final) * (1 - done) ** power,
        "cosine": final + (1 - final) * (1 + math.cos(math.pi * done)) / 2,
    }
    return PEAK * left[kind]


@pytest.mark.parametrize("kind", description.DECAYS)
@pytest.mark.parametrize(
    ("warmup", "final", "power"), [(0.0, 0.0, 1.0), (0.005, 0.5, 1.0), (0.1, 0.2, 2.0)]
)
def test_values(kind, warmup, final, power):
    schedule = description.schedule(
        kind, peak=PEAK, steps=STEPS, warmup=warmup, final=final, power=power
    )
    steps = np.arange(0, STEPS + 20, 7)
    expected = [oracle(kind, s, round(warmup * STEPS), final, power) for s in steps]
    found = np.broadcast_to(jax.jit(schedule)(steps), steps.shape)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "cosin"}, "unknown schedule 'cosin'.*did you mean 'cosine'"),
        *(({name: x}, name) for name, x in (("peak", 0.0), ("steps", 0), ("warmup", 1.0))),
        *(({name: x}, name) for name, x in (("final", 1.5), ("power", 0.0))),
    ],
)
def test_bad_arguments(change, message):
    arguments = {"kind": "cosine", "peak": PEAK, "steps": STEPS} | change
    with pytest.raises(ValueError, match=message):
        description.schedule(arguments.pop("kind"), **arguments)
