"""Trainings in processes of their own: their cores, their environment, and how they fail."""

import dataclasses
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tape_jax.sharding import ShardingConfig
from train import experiment
from train import main as program
from train.compare import processes
from train.compare.jobs import ENCODINGS, Job, plan
from train.compare.sweep import Setting
from train.training.signals import NON_FINITE_EXIT_CODE, Stopped


def test_a_training_that_fails_is_reported(config, tmp_path):
    wanted = experiment.from_file(config)
    job = Job("tape", Setting(), tmp_path / "tape", wanted, command=("--config=nowhere.py",))
    with pytest.raises(
        Stopped, match=r"tape, seed 0 failed(.|\n)*no config file nowhere"
    ) as stopped:
        processes.train_all([job], 1)
    assert stopped.value.exit_code == program.USER_ERROR


CHILD = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], "began").touch()
time.sleep(60 if sys.argv[2] == "waits" else 0)
"""


@pytest.fixture
def children(config, tmp_path, monkeypatch):
    """Two jobs: ``rope`` ends at once, once ``none`` has begun, which goes on until it is told."""
    jobs = plan(config, tmp_path, ENCODINGS, ["none", "rope"], 1, [])
    started = {}

    def start(job, *_, **__):
        job.folder.mkdir()
        what = "waits" if job.name == "none" else "ends"
        if what == "ends":
            while not (tmp_path / "none" / "began").exists():
                assert started["none"].poll() is None
                time.sleep(0.01)
        call = [sys.executable, "-c", CHILD, str(job.folder), what]
        started[job.name] = subprocess.Popen(call)
        return started[job.name]

    monkeypatch.setattr(processes, "_start", start)
    monkeypatch.setattr(processes, "SECONDS_BETWEEN_LOOKS", 0.01)
    yield jobs, started
    for process in started.values():
        process.kill()


@pytest.mark.parametrize("error", [OSError("no room"), KeyboardInterrupt()])
def test_an_exception_leaves_nothing_running(children, tmp_path, error):
    """What runs beside has saved and ended before the exception goes on."""
    jobs, started = children

    def finished(ended):
        assert ended.job.name == "rope"
        raise error

    expected = Stopped if isinstance(error, KeyboardInterrupt) else OSError
    with pytest.raises(expected):
        processes.train_all(jobs, 2, finished=finished)
    assert started["none"].returncode == 143
    assert (tmp_path / "none" / "saved").exists()


@pytest.mark.parametrize("same_share", [False, True])
def test_the_last_one_gets_all_cores_unless_told_otherwise(
    config, tmp_path, monkeypatch, same_share
):
    shares = []

    def start(job, share, **_):
        shares.append(share)
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(processes, "_start", start)
    monkeypatch.setattr(processes, "SECONDS_BETWEEN_LOOKS", 0.01)
    processes.train_all(
        plan(config, tmp_path, ENCODINGS, ["rope"], 1, []), 2, same_share=same_share
    )
    assert shares == processes.shares(2 if same_share else 1)[:1]


def test_on_a_tpu_trainings_follow_one_another(config, tmp_path, monkeypatch):
    """It serves one process, so the parent must not take it, and the trainings not share it."""
    running = []

    def start(job, share, **_):
        assert all(process.poll() is not None for process in running)
        running.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.1)"]))
        return running[-1]

    monkeypatch.setattr(processes, "_start", start)
    monkeypatch.setattr(processes, "SECONDS_BETWEEN_LOOKS", 0.01)
    jobs = plan(config, tmp_path, ENCODINGS, ["rope", "none"], 1, [])
    for platforms, expected in (("tpu,cpu", True), ("cpu", False), (None, False)):
        config_of_jax = SimpleNamespace(values={"jax_platforms": platforms})
        monkeypatch.setattr(processes, "jax", SimpleNamespace(config=config_of_jax))
        assert processes.on_tpu() == expected
    monkeypatch.setattr(processes, "on_tpu", lambda: True)
    processes.train_all(jobs, 2)
    assert len(running) == 2


@pytest.mark.slow
def test_seeds_share_compiled_programs(config, tmp_path, monkeypatch):
    """Each is compiled once, by whoever comes first; the others find it."""
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_DEBUG_LOG_MODULES", "jax._src.compiler")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("TAPE_JAX_CACHE", str(tmp_path))
    # As many for both: the number is a part of what is compiled.
    monkeypatch.setattr(processes, "shares", lambda n: [sorted(os.sched_getaffinity(0))[:1]] * n)
    jobs = plan(config, tmp_path / "runs", ENCODINGS, ["rope"], 2, [])
    (tmp_path / "runs").mkdir()
    processes.train_all(jobs, 2)
    assert all(job.finished for job in jobs)
    printed = "".join(job.log.read_text() for job in jobs)
    for name in ("init_state", "step", "_call"):
        compiled = len(list((tmp_path / "compiled").glob(f"jit_{name}-*-cache")))
        assert compiled >= 1
        assert printed.count(f"PERSISTENT COMPILATION CACHE MISS for 'jit_{name}'") == compiled
        assert printed.count(f"Persistent compilation cache hit for 'jit_{name}'") == compiled


def test_programs_come_before_seeds(config, tmp_path):
    jobs = plan(config, tmp_path, ENCODINGS, ["none", "rope"], 3, [])
    order = processes._distinct_first(jobs)
    assert [(job.name, job.experiment.seed) for job in order] == [
        ("none", 0), ("rope", 0), ("none", 1), ("none", 2), ("rope", 1), ("rope", 2),
    ]  # fmt: skip


def test_how_far_an_evaluation_is(config, tmp_path):
    job = Job("tape", Setting(), tmp_path / "tape", experiment.from_file(config), command=())
    job.log.write_text("tape: 200/200 loss 2.5\n")
    assert processes._evaluating(job) == "evaluating, 0 %"
    with job.log.open("a") as log:
        log.write(300 * " " + "evaluating tape: 9/1000\nevaluating tape: 163/1000\n")
    assert processes._evaluating(job) == "evaluating, 16 %"


def test_damaged_metrics_are_no_matter_of_progress(config, tmp_path):
    job = Job("tape", Setting(), tmp_path / "tape", experiment.from_file(config), command=())
    job.folder.mkdir()
    (job.folder / "metrics.jsonl").write_bytes(b'\0\0\n{"step": 1}\n')
    with processes._progress() as show:
        show(job)


def test_every_trial_must_have_a_validation(config, tmp_path, monkeypatch):
    wanted = experiment.from_file(config)
    tasks = [dataclasses.replace(wanted.task, max_digits=n) for n in (2, 3, 3)]
    trials = [
        Job("tape", Setting(), tmp_path / str(i), dataclasses.replace(wanted, task=task), ())
        for i, task in enumerate(tasks)
    ]
    checked = []
    monkeypatch.setattr(processes.sweep, "check", lambda e: checked.append(e.task.max_digits))
    monkeypatch.setattr(processes, "claim", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        processes.tune(tmp_path, trials, 1)
    assert checked == [2, 3]


def test_one_that_diverges_does_not_stop_the_rest(config, tmp_path, monkeypatch, capsys):
    jobs = plan(config, tmp_path, ENCODINGS, ["none", "rope", "tape"], 1, [])
    codes = {"none": NON_FINITE_EXIT_CODE, "rope": 0}

    def start(job, *_, ends, **__):
        assert ends == processes.VALIDATE
        return subprocess.Popen([sys.executable, "-c", f"exit({codes[job.name]})"])

    monkeypatch.setattr(processes, "_start", start)
    monkeypatch.setattr(processes, "SECONDS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(Job, "finished", property(lambda job: job.name == "tape"))
    assert processes.train_missing(jobs, 1, processes.VALIDATE) == {jobs[0]}
    assert capsys.readouterr().err == (
        f"2 of 3 runs done; none, seed 0 diverged, as {jobs[0].log} says\n3 of 3 runs done\n"
    )


def test_cores_are_divided():
    cores = sorted(os.sched_getaffinity(0))
    assert processes.shares(1) == [cores]
    assert processes.shares(len(cores)) == [[core] for core in cores]
    assert all(len(share) == 1 for share in processes.shares(len(cores) + 1))


def test_trainings_take_gpus_in_turn(config, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5d")
    jobs = plan(config, tmp_path, ENCODINGS, ["none", "rope", "tape"], 1, [])
    split = dataclasses.replace(jobs[2].experiment, sharding=ShardingConfig(data=2))
    jobs[2] = dataclasses.replace(jobs[2], experiment=split)
    given = {}

    def start(call, *, env, **_):
        given[call[call.index("train") + 1]] = env["CUDA_VISIBLE_DEVICES"]
        return subprocess.Popen([sys.executable, "-c", ""])

    popen = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    monkeypatch.setattr(processes, "subprocess", popen)
    monkeypatch.setattr(processes, "SECONDS_BETWEEN_LOOKS", 0.01)
    processes.train_all(jobs, 3)
    assert list(given.values()) == ["3", "GPU-5d", "3,GPU-5d"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0", "1"]), ("", []), ("1", ["1"]), ("0,3,-1,1", ["0", "3"]), ("-1", [])],
)
def test_gpus_of_this_process(tmp_path, monkeypatch, visible, expected):
    smi = tmp_path / "nvidia-smi"
    parts = "  MIG 1g.18gb     Device  0: (UUID: MIG-1)"
    smi.write_text(f"#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-1)\n{parts}\nGPU 1: H200'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert processes.gpus() == expected
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert processes.gpus() == ([] if visible is None else expected)
