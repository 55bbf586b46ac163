"""Measurements: made one after another, and read back."""

from pathlib import Path

import pytest

from train.evidence.overhead import Cost
from train.evidence.stability import Growth


class TestMeasurements:
    def test_growth(self, place, monkeypatch):
        from train.analysis.stability import Profile, Trace

        still = Profile((1.0,), (1.0,))
        monkeypatch.setattr(
            "train.analysis.stability.trace",
            lambda e, variant, noise: Trace(
                variant, e.model.num_layers, still, still, still, (1.0,), (1.0,), None
            ),
        )
        design = Growth(
            "growth", "stability", Path("configs/ablations.py"), ["tape", "rope"], [2, 3], steps=1,
            seeds=2,
        )  # fmt: skip
        planned = design.at(place)
        assert [item.name for item in planned.items[:3]] == [
            "tape-2-seed0", "rope-2-seed0", "tape-3-seed0"
        ]  # fmt: skip
        planned.run(lambda item: None, quick=True)
        assert len(planned.state.finished) == 1
        planned.run(lambda item: None)
        assert planned.state.unfinished == []
        assert [t.depth for t in planned.traces(seed=1)] == [2, 2, 3, 3]
        assert len(planned.traces()) == 8

    @pytest.mark.slow
    def test_cost(self, place, config):
        sizes = {"model.hidden_size": 8, "model.num_heads": 1, "model.num_layers": 2}
        design = Cost(
            "cost", "claims", Path("configs/bytes_demo.py"), {"cpu": sizes}, {"cpu": (16,)},
            {"cpu": 32}, measurements=1, repeats=2,
        )  # fmt: skip
        planned = design.at(place)
        planned.run(lambda item: None, quick=True)
        assert planned.state.finished == []
        planned.run(lambda item: None)
        (found,) = planned.measured()[16]
        assert found["parameters"] > 1
        assert found["operations"] > 1
        assert min(found[name] for name in ("time", "noise", "memory", "milliseconds")) > 0
