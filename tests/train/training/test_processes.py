"""Several processes under ``jax.distributed`` on this machine, each with simulated devices."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar
from unittest import mock

import chex
import jax
import numpy as np
import pytest

from tape_jax.adapt import load_adapter
from tests.paths import ROOT
from train.compare import evaluations
from train.training import distributed, metrics, runs

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

    # Those of all clusters, until the end of the test.
    begun: ClassVar[list[subprocess.Popen]] = []

    def __init__(
        self,
        run: Path,
        processes: int,
        devices: int,
        steps: int = STEPS,
        program: tuple[str, ...] = ("-m", "train.main"),
        then: tuple[str, ...] = (),
        **changes,
    ):
        changed = {**OPTIONS, **{name.replace("__", "."): x for name, x in changes.items()}}
        changed = {name: x for name, x in changed.items() if x is not None}
        config = ROOT / f"configs/{changed.pop('config', 'addition_demo')}.py"
        options = [f"--config.{name}={value}" for name, value in changed.items()]
        options += [f"--config.train.steps={steps}", f"--run={run}", "--resume"]
        command = [sys.executable, *program, "train"]
        command += [f"--config={config}", *then, *options]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        flags = re.sub(r"\S+device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
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
        self.begun.extend(self.processes)

    def finish(self, code: int = 0, limit: float = 240) -> list[str]:
        """Waits for all; returns what they printed."""
        try:
            outputs = [process.communicate(timeout=limit)[0] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        assert [process.returncode for process in self.processes] == [code] * len(outputs), outputs
        return outputs


@pytest.fixture(autouse=True)
def nothing_is_left():
    """A process that a failed test leaves would train on beside the other tests."""
    yield
    while Cluster.begun:
        process = Cluster.begun.pop()
        process.kill()
        process.wait()
        process.stdout.close()


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
def test_what_a_crash_left_is_replaced(tmp_path):
    """By all alike: also by one that sees late whether there is anything."""
    run = tmp_path / "run"
    Cluster(run, 1, 2).finish()
    newest = max((run / "checkpoints").rglob("*.sha256"))
    newest.unlink()
    lines = [
        "import asyncio; from orbax.checkpoint.experimental.v1._src.saving import path_utils",
        "exists = path_utils.async_path.exists",
        "async def late(path):",
        "    await asyncio.sleep(2 * int(index))",
        "    return await exists(path)",
        "path_utils.async_path.exists = late",
    ]
    printed = Cluster(run, 2, 1, program=program("\n".join(lines))).finish(limit=120)
    assert "from step 8 of 12" in printed[0]
    assert newest.exists()


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
def test_the_first_evaluates_what_all_hold(tmp_path):
    """Of parameters split over processes, also where an adapter of them is trained."""
    base, adapted = tmp_path / "base", tmp_path / "adapted"
    options = {
        **{"sharding__data": 1, "steps": 4, "then": ("--evaluate", "--validate")},
        **{"evaluation__longest": 2, "evaluation__samples_per_pair": 2},
    }
    Cluster(base, 2, 1, **options).finish()
    Cluster(adapted, 2, 1, adapt__base=base, adapt__method="lora", **options).finish()
    for run in (base, adapted):
        written = evaluations.saved(run)
        assert (run / "validation.json").exists()
        evaluations.evaluate(run, runs.load(run).evaluation)  # In one process, on one device.
        for name in ("step", "options", "result"):
            assert evaluations.saved(run)[name] == written[name]

    trained, below = runs.restore_model(adapted), runs.restore_model(base)
    model, variables = load_adapter(adapted / runs.ADAPTER, below.model, below.variables)
    assert model == trained.model
    chex.assert_trees_all_equal(variables, trained.variables)


def program(setting: str) -> tuple[str, str]:
    """The command line after a line of Python, in which ``index`` is the process's."""
    lines = ["import sys; from train import main", "index = sys.argv[-1][-1]", setting]
    return "-c", "\n".join([*lines, "sys.exit(main.main())"])


@pytest.mark.slow
def test_all_read_the_same_text(tmp_path):
    for index in range(2):
        (tmp_path / f"{index}").mkdir()
        (tmp_path / f"{index}" / "text.txt").write_text(f"{index}. What is read here. " * 4000)
    setting = (
        f"import os; sys.path.insert(0, {str(ROOT)!r}); os.chdir({str(tmp_path)!r} + '/' + index)"
    )
    options = {"config": "bytes_demo", "task__source": "text.txt", "task__max_digits": None}
    for text in Cluster(tmp_path / "run", 2, 1, program=program(setting), **options).finish(2):
        assert "train on the same text: process 0 sees something else than process 1" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_folder_of_one_host_is_refused(tmp_path):
    setting = "from train.training import runs; runs.APPEARANCE = 1\nsys.argv[-3] += index"
    for text in Cluster(tmp_path / "run", 2, 1, program=program(setting)).finish(2):
        assert "it must be shared: process 0 sees something else than process 1" in text


@pytest.mark.slow
def test_an_error_of_one_ends_all(tmp_path):
    setting = "from train.training.loop import Trainer\n"
    setting += "if index == '1': Trainer.run = lambda *_: {}['no such name']"
    cluster = Cluster(tmp_path / "run", 2, 1, program=program(setting))
    zero, one = cluster.processes
    failed, _ = one.communicate(timeout=240)
    printed = [zero.communicate(timeout=2 * distributed.HEARTBEAT)[0], failed]
    assert "KeyError: 'no such name'" in printed[1]
    assert [p.returncode for p in cluster.processes] == [distributed.PEER_LOST, 1], printed


@pytest.mark.slow
def test_nobody_leaves_before_the_manifest(tmp_path):
    setting = "from train.training import checkpoint; import time; digest = checkpoint._sha256\n"
    setting += "checkpoint._sha256 = lambda path: (time.sleep(0.3), digest(path))[1]"
    pair = started(Cluster(tmp_path / "run", 2, 1, 100_000, program=program(setting)), tmp_path)
    pair.processes[1].terminate()
    text, _ = pair.processes[1].communicate(timeout=240)
    step = int(re.search(r"stopped by SIGTERM after step (\d+)", text)[1])
    assert (tmp_path / "run" / "checkpoints" / f"{step:08d}.sha256").exists()
    pair.finish(128 + signal.SIGTERM)


@pytest.fixture
def pair(tmp_path):
    """Two processes that train without end, after their first checkpoint."""
    # A shell ignores SIGINT for what it runs in the background, and so would they.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cluster = Cluster(tmp_path / "run", 2, 1, steps=100_000)
    finally:
        signal.signal(signal.SIGINT, before)
    return started(cluster, tmp_path)


def started(cluster: Cluster, tmp_path: Path) -> Cluster:
    """The processes, after their first checkpoint."""
    folder, end = tmp_path / "run" / "checkpoints", time.monotonic() + 240
    # Of any step that was trained: the first ones make room for later ones.
    while not any(int(path.stem) > 0 for path in folder.glob("*.sha256")):
        assert time.monotonic() < end
        assert all(process.poll() is None for process in cluster.processes), cluster.finish()
        time.sleep(0.05)
    return cluster


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_preemption_of_one_stops_all(pair, tmp_path, number):
    """SIGTERM or Ctrl-C to one process: both save the same step and leave."""
    pair.processes[1].send_signal(number)
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


def test_the_others_wait_while_the_first_evaluates(monkeypatch):
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: given.update(options))
    monkeypatch.setattr(distributed.ctypes, "CDLL", mock.MagicMock())
    distributed.initialize("localhost:1,2,0")
    assert given["shutdown_timeout_seconds"] >= 24 * 3600


@pytest.mark.parametrize("where", ["here", "host:1,2,2", "host:1,2", "host:1,2,1,0"])
def test_a_wrong_place_is_refused(where):
    with pytest.raises(ValueError, match="expected auto, or HOST:PORT,PROCESSES,INDEX"):
        distributed.initialize(where)
