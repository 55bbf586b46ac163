import math

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
@pytest.mark.parametrize(("warmup", "final", "power"), [(0.0, 0.0, 1.0), (0.1, 0.2, 2.0)])
def test_values(kind, warmup, final, power):
    schedule = description.schedule(
        kind, peak=PEAK, steps=STEPS, warmup=warmup, final=final, power=power
    )
    steps = np.arange(0, STEPS + 20, 7)
    expected = [oracle(kind, s, round(warmup * STEPS), final, power) for s in steps]
    np.testing.assert_allclose([float(schedule(s)) for s in steps], expected, atol=1e-6)


def test_one_step_of_warmup_is_already_the_peak():
    schedule = description.schedule("constant", peak=PEAK, steps=10, warmup=0.1)
    assert [float(schedule(s)) for s in range(3)] == [PEAK] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "cosin"}, "unknown schedule 'cosin'.*did you mean 'cosine'"),
        ({"peak": 0.0}, "peak"),
        ({"steps": 0}, "steps"),
        ({"warmup": 1.0}, "warmup"),
        ({"final": 1.5}, "final"),
        ({"power": 0.0}, "power"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {"kind": "cosine", "peak": PEAK, "steps": STEPS} | change
    with pytest.raises(ValueError, match=message):
        description.schedule(arguments.pop("kind"), **arguments)
