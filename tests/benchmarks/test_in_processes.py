"""Benchmarks that measure processes of their own: these answer."""

from __future__ import annotations

import pytest

from benchmarks import demos, first_step


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
