"""Two processes under ``jax.distributed`` go by what the first has measured."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tape_jax._src.attention.tuning import records
from tape_jax._src.attention.tuning.records import CallShape, Measured

SHAPE = CallShape(8, 64, "float32", True, 1, 2, 2)
CHILD = """
import dataclasses, json, sys
import jax
address, index = sys.argv[1:]
jax.distributed.initialize(address, 2, int(index), cluster_detection_method="deactivate")
from tape_jax import attention, attention_plan, tune
from tape_jax._src.attention.tuning.records import CallShape
shape = CallShape(8, 64, "float32", True, 1, 2, 2)
def plan():
    q, k, v, e = shape.structs()
    return dataclasses.asdict(attention_plan(q, k, v, state=e, is_causal=True))
before = plan()
tune.agree()
after = plan()
q, k, v, e = shape.arrays()
total = sum(float(x.sum()) for x in attention(q, k, v, state=e, is_causal=True))
print(json.dumps([jax.process_count(), before, after, total]))
"""


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The folder of a machine that has found ``chunked`` fast."""
    folder = tmp_path / "measured"
    monkeypatch.setenv("TAPE_JAX_CACHE", str(folder))
    monkeypatch.setenv("XLA_FLAGS", "")
    records.key.cache_clear()
    records.device.cache_clear()
    fast, slow = Measured("chunked", 1.0, 2.0), Measured("reference", 2.0, 4.0)
    records.write({SHAPE: [fast, slow]})
    return folder


@pytest.mark.slow
def test_both_go_by_the_first_ones_file(measured, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    folders = (measured, tmp_path / "empty")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, address, str(index)],
            env=environment | {"TAPE_JAX_CACHE": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, folder in enumerate(folders)
    ]
    try:
        printed = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], printed
    found = [json.loads(out.splitlines()[-1]) for out, _ in printed]
    assert found[0] == found[1]
    count, before, after, _ = found[0]
    assert count == 2
    assert before["implementation"] == "reference"
    assert "processes might not agree" in before["basis"]
    assert after["implementation"] == "chunked"
    assert after["measured"]["chunked"] == [1.0, 2.0]
