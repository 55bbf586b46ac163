"""Several processes under ``jax.distributed`` on this machine, each with simulated devices."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.paths import ROOT
from train.training import distributed, metrics

STEPS = 12
OPTIONS = {
    "task.max_digits": 2,
    "model.hidden_size": 16,
    "model.intermediate_size": 16,
    "model.num_layers": 2,
    "train.batch_size": 8,
    "train.save_every": 4,
    "train.log_every": 1,
    "sharding.data": 2,
    "sharding.fsdp": -1,
}


class Cluster:
    """Processes that train one run."""

    def __init__(self, run: Path, processes: int, devices: int, steps: int = STEPS, **changes):
        changed = {**OPTIONS, **{name.replace("__", "."): x for name, x in changes.items()}}
        options = [f"--config.{name}={value}" for name, value in changed.items()]
        options += [f"--config.train.steps={steps}", f"--run={run}", "--resume"]
        command = [sys.executable, "-m", "train.main", "train"]
        command += [f"--config={ROOT / 'configs/addition_demo.py'}", *options]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        self.processes = [
            subprocess.Popen(
                [*command, f"--distributed=localhost:{port},{processes},{i}"]
                if processes > 1
                else command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for i in range(processes)
        ]

    def finish(self, code: int = 0, limit: float = 240) -> list[str]:
        """Waits for all; returns what they printed."""
        try:
            outputs = [process.communicate(timeout=limit)[0] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        assert [process.returncode for process in self.processes] == [code] * len(outputs), outputs
        return outputs


def losses(run):
    return np.array([line["loss"] for line in metrics.read(run / "metrics.jsonl")])


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """Two processes of two devices give the losses of one of four, and either continues either."""
    one, two = tmp_path / "one", tmp_path / "two"
    Cluster(one, 1, 4).finish()
    printed = Cluster(two, 2, 2).finish()
    assert ["attention:" in text for text in printed] == [True, False], "the first one speaks"
    assert len(losses(one)) == STEPS
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-5)

    for run, processes, devices in ((one, 2, 2), (two, 4, 1)):
        newest = max((run / "checkpoints").rglob("*.sha256"))
        newest.rename(newest.with_suffix(".aside"))
        printed = Cluster(run, processes, devices).finish()
        assert f"continuing {run} from step 8 of 12" in printed[0]
        np.testing.assert_allclose(losses(run), losses(one), rtol=1e-5)


@pytest.mark.slow
def test_processes_may_share_sequences(tmp_path):
    """Where an axis other than the batch's spans processes, all of them read the same rows."""
    one, two = tmp_path / "one", tmp_path / "two"
    mesh = {"sharding__data": 1, "sharding__fsdp": 1, "sharding__sequence": 2}
    options = {**mesh, "task__max_digits": 4, "model__max_length": 64}
    Cluster(one, 1, 2, **options).finish()
    Cluster(two, 2, 1, **options).finish()
    assert len(losses(one)) == STEPS
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-5)


@pytest.fixture
def pair(tmp_path):
    """Two processes that train without end, after their first checkpoint."""
    cluster = Cluster(tmp_path / "run", 2, 1, steps=100_000)
    checkpoint = tmp_path / "run" / "checkpoints" / "00000004.sha256"
    end = time.monotonic() + 240
    while not checkpoint.exists() and time.monotonic() < end:
        assert all(process.poll() is None for process in cluster.processes), cluster.finish()
        time.sleep(0.05)
    assert checkpoint.exists()
    return cluster


@pytest.mark.slow
def test_preemption_of_one_stops_all(pair, tmp_path):
    """SIGTERM to one process: both save the same step and leave."""
    pair.processes[1].terminate()
    printed = pair.finish(128 + signal.SIGTERM)
    step = int(re.search(r"stopped by SIGTERM after step (\d+)", printed[0])[1])
    assert (tmp_path / "run" / "checkpoints" / f"{step:08d}.sha256").exists()
    assert all(f"after step {step}" in text for text in printed)


@pytest.mark.slow
def test_a_dead_process_brings_the_other_down(pair):
    """SIGKILL to one process: the other ends by itself, and says why."""
    pair.processes[1].kill()
    text, _ = pair.processes[0].communicate(timeout=2 * distributed.HEARTBEAT)
    assert pair.processes[0].returncode == distributed.PEER_LOST, text
    assert "another process has died" in text


@pytest.mark.parametrize("where", ["here", "host:1,2,2", "host:1,2", "host:1,2,1,0"])
def test_a_wrong_place_is_refused(where):
    with pytest.raises(ValueError, match="expected auto, or HOST:PORT,PROCESSES,INDEX"):
        distributed.initialize(where)
