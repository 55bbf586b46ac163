"""Benchmarks that measure processes of their own: what they print of what these say."""

from __future__ import annotations

import pytest

from benchmarks import demos, first_step
from benchmarks.first_step import Seconds


def test_times_to_the_first_step(monkeypatch, capsys):
    """Medians, and ratios run by run; encodings take turns."""
    calls = []

    def fake(model, encoding, overrides):
        calls.append((model, encoding, *overrides))
        times = [1.0, 2.0, 3.0, 4.0 + len(calls)]
        return Seconds(*(x * (1 if encoding == "rope" else 1.5) for x in times))

    monkeypatch.setattr(first_step, "in_a_new_process", fake)
    first_step.main(["--models", "c4", "--repeats", "1", "--config.train.batch_size=8"])
    assert calls == [("c4", name, "--config.train.batch_size=8") for name in ("rope", "tape")]
    out = capsys.readouterr().out
    assert "c4 (c4_pretrain.py)" in out
    rope, tape = ([x.strip() for x in row.split("|")[1:-1]] for row in out.splitlines()[4:6])
    assert rope == ["rope", "1.00", "2.00", "3.00", "5.00", "11.00", "0 %", "1.000"]
    assert tape == ["tape", "1.50", "3.00", "4.50", "9.00", "18.00", "0 %", "1.636"]


@pytest.mark.slow
def test_a_process_measures_all_its_parts():
    found = first_step.in_a_new_process("demo", "rope", ["--config.model.num_layers=1"])
    assert min(found) > 0
    assert found.total == sum(found)


@pytest.mark.slow
def test_a_process_serves_steps():
    process = demos.started(demos.HERE.parents[1])
    try:
        assert demos.ask(process, "passkeys, rope") > demos.ask(process, "passkeys, rope") > 0
    finally:
        process.kill()
