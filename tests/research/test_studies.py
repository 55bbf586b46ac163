"""Measurements: made one after another, and read back."""

from pathlib import Path

import pytest

from research.overhead import Cost
from research.stability import Growth


class TestMeasurements:
    def test_growth(self, place, tmp_path, monkeypatch):
        from research.stability import Profile, Trace

        still = Profile((1.0,), (1.0,))
        monkeypatch.setattr(
            "research.stability.trace",
            lambda e, variant, noise: Trace(
                variant, e.model.num_layers, still, still, still, (1.0,), (1.0,), None
            ),
        )
        design = Growth(
            "growth", Path("research/configs/ablations.py"), ["tape", "rope"], [2, 3], steps=1,
            seeds=(2, 3)
        )  # fmt: skip
        planned = design.at(place)
        assert [item.name for item in planned.items[:3]] == [
            "tape-2-seed2", "rope-2-seed2", "tape-3-seed2"
        ]  # fmt: skip
        planned.run(lambda item: None, quick=True)
        assert len(planned.state.finished) == 1
        assert planned.said() is None
        planned.run(lambda item: None)
        assert planned.state.unfinished == []
        assert [t.depth for t in planned.traces(seed=3)] == [2, 2, 3, 3]
        assert len(planned.traces()) == 8
        said = planned.said()
        assert said.startswith("from 2 to 3 layers, the largest state over its start")
        assert said.endswith("`rope` 1 to 1 disturbed, 1 to 1 trained")
        assert planned.growths("tape", 3) == {2: 1.0, 3: 1.0}
        assert planned.hours == 0

    @pytest.mark.slow
    def test_cost(self, place, config):
        sizes = {"model.hidden_size": 8, "model.num_heads": 1, "model.num_layers": 2}
        design = Cost(
            "cost", Path("configs/bytes_demo.py"), {"cpu": sizes}, {"cpu": (16,)}, {"cpu": 32},
            {"heads": {"model.position.attention_mix": "heads"}}, seeds=(2,), repeats=2,
        )  # fmt: skip
        planned = design.at(place)
        planned.run(lambda item: None, quick=True)
        assert planned.state.finished == []
        planned.run(lambda item: None)
        (found,) = planned.measured("heads")[16]
        assert found["parameters"] > 1
        assert found["operations"] > 1
        assert min(found[name] for name in ("time", "noise", "memory", "milliseconds")) > 0

    def test_a_training_that_diverged_has_grown_most(self, place, monkeypatch):
        from research.stability import Profile, Trace

        still, burst = Profile((1.0,), (1.0,)), Profile((None,), (1.0,))

        def trace(e, variant, noise):
            trained = burst if e.seed == 3 else still
            diverged = 5 if e.seed == 4 else None
            return Trace(variant, 2, still, still, trained, (1.0,), (1.0,), diverged)

        monkeypatch.setattr("research.stability.trace", trace)
        planned = Growth(
            "growth", Path("research/configs/ablations.py"), ["tape"], [2], steps=1, seeds=(2, 3, 4)
        ).at(place)
        assert planned.growths("tape", 2) is None
        planned.run(lambda item: None)
        assert planned.growths("tape", 2) == {2: 1.0, 3: 1000.0, 4: 1000.0}
