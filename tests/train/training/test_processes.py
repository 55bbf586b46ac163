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


def wait_for(path, cluster, limit=240):
    """Waits until a file is there."""
    end = time.monotonic() + limit
    while not path.exists() and time.monotonic() < end:
        assert all(process.poll() is None for process in cluster.processes), cluster.finish()
        time.sleep(0.05)
    assert path.exists()


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """Two processes of two devices give the losses of one of four, and either continues either."""
    one, two = tmp_path / "one", tmp_path / "two"
    Cluster(one, 1, 4).finish()
    printed = Cluster(two, 2, 2).finish()
    assert ["attention:" in text for text in printed] == [True, False]
    assert len(losses(one)) == STEPS
    np.testing.assert_allclose(losses(two), losses(one), rtol=1e-5)

    for run, processes, devices in ((one, 2, 2), (two, 1, 4), (two, 4, 1)):
        step = (run / "checkpoints").rglob("*.sha256")
        newest = max(step)
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


@pytest.mark.slow
def test_preemption_of_one_stops_all(tmp_path):
    """SIGTERM to one process: both save the same step and leave."""
    run = tmp_path / "run"
    cluster = Cluster(run, 2, 1, steps=100_000)
    wait_for(run / "checkpoints" / "00000004.sha256", cluster)
    cluster.processes[1].terminate()
    printed = cluster.finish(128 + signal.SIGTERM)
    step = int(re.search(r"stopped by SIGTERM after step (\d+)", printed[0])[1])
    assert (run / "checkpoints" / f"{step:08d}.sha256").exists()
    assert all(f"after step {step}" in text for text in printed)


@pytest.mark.slow
def test_a_dead_process_brings_the_other_down(tmp_path):
    """SIGKILL to one process: the other ends by itself, and says why."""
    run = tmp_path / "run"
    cluster = Cluster(run, 2, 1, steps=100_000)
    wait_for(run / "checkpoints" / "00000004.sha256", cluster)
    cluster.processes[1].kill()
    text, _ = cluster.processes[0].communicate(timeout=2 * distributed.HEARTBEAT)
    assert cluster.processes[0].returncode == distributed.PEER_LOST, text
    assert "another process has died" in text


@pytest.mark.parametrize("where", ["here", "host,2,1", "host:1,2,2", "host:1,2", "host:1,2,1,0"])
def test_a_wrong_place_is_refused(where):
    with pytest.raises(ValueError, match="expected auto, or HOST:PORT,PROCESSES,INDEX"):
        distributed.initialize(where)


def test_one_process_agrees_with_itself():
    assert distributed.agreed(lambda: [1, "x"]) == [1, "x"]
    assert distributed.is_main()
    assert not distributed.preempted(3)
