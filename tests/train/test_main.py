import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import chex
import pytest

from tape_jax.sharding import ShardingConfig
from tests.paths import ROOT
from tests.train import small
from tests.train.training.tiny import final_state
from train import experiment
from train import main as program
from train.compare import processes
from train.main import main
from train.training import metrics, runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory, config):
    """A finished run, not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    assert main(["train", f"--config={config}", f"--run={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def ready(tmp_path_factory, config):
    """As ``trained``, but nothing was learned; not to be changed either."""
    folder = tmp_path_factory.mktemp("runs") / "ready"
    small.save_run(folder, experiment.from_file(config), 6)
    return folder


@pytest.fixture
def own(trained, tmp_path):
    """A copy of the finished run."""
    return Path(shutil.copytree(trained, tmp_path / "own"))


def content(folder):
    """All files but the lock, which a training takes before it looks for more."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != runs.LOCK)
    return {p: p.read_bytes() for p in files}


def test_overview(capsys):
    assert main([]) == program.USER_ERROR
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in program.COMMANDS)
    for name in program.COMMANDS:
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0
        assert f"python -m train.main {name} --" in capsys.readouterr().out


def test_ask(ready, capsys):
    assert main(["ask", f"--run={ready}", "7+5", "12+30"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("7+5 = ")
    assert first.endswith(("(right)", "(wrong: it is 12)"))
    assert second.endswith(("(right)", "(wrong: it is 42)"))


def test_what_does_not_fit(monkeypatch, capsys):
    def run(args):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr("train.commands.score.run", run)
    call = ["score", "--data=scrolls", "--subset=qasper", "--predictions=answers.json"]
    assert main(call) == program.USER_ERROR
    told = "error: what is asked for does not fit into this machine: give fewer or smaller numbers "
    assert capsys.readouterr().err.startswith(f"{told}(RuntimeError: RESOURCE_EXHAUSTED")


def test_a_number_that_is_too_large(monkeypatch, capsys):
    monkeypatch.setattr("train.commands.score.run", lambda args: (2**99).to_bytes(8))
    call = ["score", "--data=scrolls", "--subset=qasper", "--predictions=answers.json"]
    assert main(call) == program.USER_ERROR
    told = "error: a number that was given is too large (int too big to convert); --debug shows"
    assert capsys.readouterr().err.startswith(told)


def test_a_full_disk_is_not_too_large_a_model(monkeypatch, capsys):
    """The cause stands at the end of what the library says."""
    said = f"the checkpoint x could not be written: RESOURCE_EXHAUSTED: {400 * '.'} [No space left]"

    def run(args):
        raise OSError(said)

    monkeypatch.setattr("train.commands.score.run", run)
    call = ["score", "--data=scrolls", "--subset=qasper", "--predictions=answers.json"]
    assert main(call) == program.USER_ERROR
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.slow
def test_resuming_a_tape_model_is_exact(own, trained, capsys):
    shutil.rmtree(own / "checkpoints" / "00000006")
    (own / "checkpoints" / "00000006.sha256").unlink()
    assert main(["train", f"--run={own}", "--resume"]) == 0
    assert "from step 3 of 6" in capsys.readouterr().out
    chex.assert_trees_all_equal(final_state(own), final_state(trained))


@pytest.mark.slow
def test_eval(own, capsys, monkeypatch):
    assert main(["eval", f"--run={own}", "--config.evaluation.longest=2"]) == 0
    out = capsys.readouterr().out
    record = json.loads((own / "evaluation.json").read_text())
    assert record["step"] == 6
    assert record["options"]["longest"] == 2
    assert record["result"]["rows"] == [1, 2]
    assert (own / "evaluation.txt").read_text().startswith("step 6\n")
    assert (own / "evaluation_exact_match.png").read_bytes().startswith(b"\x89PNG")
    assert "trained range" in out
    assert str(own / "evaluation_exact_match.png") in out
    # Without the learned updates it writes nothing, and says so where there are none.
    before = content(own)
    command = ["eval", f"--run={own}", "--cut-updates", "--config.evaluation.longest=2"]
    assert main(command) == 0
    assert "trained range" in capsys.readouterr().out
    monkeypatch.setattr("train.compare.evaluations.untrained", lambda trained: None)
    assert main(command) == program.USER_ERROR
    assert "the encoding 'tape' has no parameters" in capsys.readouterr().err
    assert content(own) == before
    # What it did not write it does not replace.
    (own / "evaluation.json").write_text("{}")
    before = content(own)
    assert main(["eval", f"--run={own}"]) == program.USER_ERROR
    assert "not an evaluation written by this program" in capsys.readouterr().err
    assert content(own) == before


@pytest.mark.slow
def test_eval_on_a_mesh(own):
    """By request, or because the run was trained on one that fits the devices here."""
    evaluation = own / "evaluation.json"
    assert main(["eval", f"--run={own}"]) == 0
    alone = json.loads(evaluation.read_text())
    evaluation.unlink()
    assert (
        main(["eval", f"--run={own}", "--config.sharding.fsdp=4", "--config.sharding.data=2"]) == 0
    )
    shared = json.loads(evaluation.read_text())
    assert alone.pop("computing").startswith("Speed: ")
    assert shared.pop("computing").startswith("Speed: ")
    assert shared == alone

    def devices(**sizes):
        wanted = dataclasses.replace(runs.load(own), sharding=ShardingConfig(**sizes))
        trained = runs.restore_model(own, sharding=runs.evaluation_sharding(wanted))
        kernel = trained.variables["params"]["layers_0"]["mlp"]["up"]["kernel"]
        return len(kernel.devices()), kernel.addressable_shards[0].data.size / kernel.size

    assert devices(fsdp=-1, tensor=2) == (8, 1 / 8)
    assert devices(sequence=2, data=4) == (8, 1)
    assert devices(fsdp=3) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", "unknown command 'trian'.*did you mean 'train'"),
        ("train --run={new}", "give --config=FILE, or --resume"),
        ("train --run={new} --config={config} --stepz=3", "train has no option '--stepz'"),
        ("train --run={new} --config={config} --config.train.stesp=3", "'steps'"),
        (
            "train --run={new} --config={config} --encoding=rope",
            "mean '--config.model.position.kind'",
        ),
        ("generate --run={run} --promt=1+2", "mean '--prompt'"),
        ("train --run={new} --config={config}x", "there is no config file"),
        ("train --run={run} --config={config}", "exists already: continue it with --res"),
        ("train --run={other} --config={config}", "exists already: choose another"),
        ("train --run={new} --resume", "there is no run folder"),
        ("train --run={other} --resume", "is not a run"),
        ("train --run={bare} --resume", "no checkpoint in .*bare"),
        (
            "train --run={run} --resume --config.train.batch_size=8",
            r"another experiment .train.batch_size: 4 there, 8 here\)\. .*train\.steps may change",
        ),
        ("eval --run={run} --config.train.steps=9", "cannot be changed after training"),
        ("eval --run={run} --config.sharding.data=3", "needs 3 devices; got 8"),
        ("ask --run={above} 1+2", "is not a run: .* in it are the runs bare"),
        ("ask --run={run} 1+x", "expected a sum of two numbers"),
        ("ask --run={run} 123456789+123456789", "needs .* tokens.* at most 30"),
        ("compare --run={other} --config={config} --encodings=tape", "not a comparison"),
        ("compare --run={new} --config={config} --encodings=tape,rop", "mean 'rope'"),
        ("compare --run={new} --config={config} --encodings=rope,rope", "given twice"),
        (
            "compare --run={new} --config={config} --encodings=rope --seeds=0",
            "--seeds must be at least 1",
        ),
        (
            "compare --run={new} --config={config} --encodings=rope --seeds=0 --sweep=seed=1,2",
            "--seeds must be at least 1",
        ),
    ],
)
def test_wrong_calls_say_why_and_change_nothing(
    ready, config, tmp_path, capsys, arguments, message
):
    places = {name: tmp_path / name for name in ("new", "other", "bare")}
    places["other"].mkdir()
    (places["other"] / "thesis.txt").write_text("mine")
    places["bare"].mkdir()
    shutil.copy(ready / "experiment.json", places["bare"])
    (places["bare"] / "metrics.jsonl").touch()
    places["above"] = tmp_path
    before = {folder: content(folder) for folder in (ready, tmp_path)}

    call = arguments.format(run=ready, config=config, **places).split()
    assert main(call) == program.USER_ERROR
    captured = capsys.readouterr()
    assert re.match(rf"error: .*{message}", captured.err, re.DOTALL), captured.err
    assert "Traceback" not in captured.err
    assert {folder: content(folder) for folder in before} == before
    assert not places["new"].exists()


def test_debug_shows_where(tmp_path, capsys):
    assert main(["eval", f"--run={tmp_path / 'new'}", "--debug"]) == program.USER_ERROR
    assert "Traceback" in capsys.readouterr().err


def test_compare_refuses_a_run_of_another_experiment(ready, config, tmp_path, capsys):
    folder = tmp_path / "comparison"
    shutil.copytree(ready, folder / "tape")
    call = ["compare", f"--run={folder}", f"--config={config}", "--encodings=rope,tape"]
    before = content(folder)
    assert main([*call, "--config.train.steps=7"]) == program.USER_ERROR
    assert "train.steps: 6 there, 7 here" in capsys.readouterr().err
    assert content(folder) == before


@pytest.mark.slow
def test_compare_interrupted_and_continued(config, tmp_path, monkeypatch, capsys):
    """Two trainings side by side are stopped by one signal, saved, and finished by a second."""
    folder, names, steps = tmp_path / "comparison", ("rope", "none"), 800
    call = ["compare", f"--config={config}", f"--run={folder}", "--encodings=rope,none"]
    call += [f"--config.train.steps={steps}", "--config.train.save_every=250"]
    call += ["--config.model.num_layers=1"]
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("TAPE_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

    # Both would be trained soon after.
    monkeypatch.setattr(processes, "SECONDS_BETWEEN_LOOKS", 0.05)
    ended = threading.Event()

    def interrupt_once_both_train():
        while not ended.wait(0.01):
            if all(metrics.read(folder / name / "metrics.jsonl") for name in names):
                return os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt_once_both_train)
    thread.start()
    try:
        code = main(call)
    finally:
        ended.set()
        thread.join()
    assert code == 143
    assert "the same command continues" in capsys.readouterr().err
    reached = {name: final_state(folder / name)[0] for name in names}
    # Under load one of the two may have got to its end before the other was under way.
    interrupted = {name: step for name, step in reached.items() if step < steps}
    assert interrupted
    assert all(step > 0 for step in interrupted.values()), reached

    assert main(call) == 0
    out = capsys.readouterr().out
    for name, step in interrupted.items():
        assert f"from step {step} of {steps}" in (folder / f"{name}.log").read_text()
    for name in names:
        assert final_state(folder / name)[0] == steps
    assert "rope, %" in out
    assert "none, %" in out
    assert f"report: {folder / 'report.md'}" in out
    for name in names:
        answers = re.findall(rf"^\* {name}, seed 0: (\d+)\+\d+ = .*(?:right|wrong)", out, re.M)
        assert [len(operand) for operand in answers] == [2, 2, 3]
    assert f"ask --run={folder / 'rope'} 407+85" in out

    before = content(folder / "none")
    assert main(call) == 0
    assert content(folder / "none") == before


@pytest.mark.slow
def test_a_sweep_compares_what_validated_best(config, tmp_path, capsys):
    """Each value has a run of its own, which is kept."""
    folder = tmp_path / "sweep"
    call = ["compare", f"--config={config}", f"--run={folder}", "--encodings=rope"]
    call += ["--sweep=train.learning_rate=1e30,0.01,0.001", "--config.train.steps=4"]
    assert main(call) == 0
    made = {path.parent.name for path in folder.rglob("experiment.json")}
    assert len(made) == 3
    rates = {runs.load(folder / name).train.learning_rate for name in made}
    assert rates == {1e30, 0.01, 0.001}
    assert "learning_rate=1e30, seed 0 diverged" in capsys.readouterr().err
    report = (folder / "report.md").read_text()
    assert "learning_rate" in report
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.sha256")}
    assert main(call) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.sha256")} == before
    assert main([*call[:-2], "--sweep=train.learning_rat=1"]) == program.USER_ERROR
    assert "learning_rat" in capsys.readouterr().err


def test_the_fields_of_a_config_are_listed(ready, config, capsys):
    """Those of the file's task, of another one, and of a run's."""
    assert main(["train", f"--config={config}", "--help-config"]) == 0
    out = capsys.readouterr().out
    for name in ("learning_rate", "position.kind", "max_digits", "options.rank"):
        assert name in out
    call = ["train", f"--config={config}", "--config.task.name=text", "--help-config"]
    assert main(call) == 0
    assert "tokenizer_fingerprint" in capsys.readouterr().out
    assert main(["eval", f"--run={ready}", "--help-config"]) == 0
    assert "max_digits" in capsys.readouterr().out


@pytest.mark.slow
def test_a_damaged_checkpoint_is_reported_and_not_used(own, capsys):
    path = max((own / "checkpoints" / "00000006").rglob("d/*"), key=lambda p: p.stat().st_size)
    damaged = bytearray(path.read_bytes())
    damaged[50] ^= 4
    path.write_bytes(damaged)
    assert main(["ask", f"--run={own}", "1+2"]) == 0
    out = capsys.readouterr().out
    assert f"checkpoint {own / 'checkpoints' / '00000006'} is damaged and not used" in out


@pytest.mark.parametrize("package", ["train", "research"])
def test_help_loads_nothing_that_takes_long(package):
    """So that it answers at once, and so that jax keeps programs, which is said before it loads."""
    done = python(
        f"""
import contextlib, sys
from {package} import main
for command in main.COMMANDS:
    with contextlib.suppress(SystemExit):
        main.main([command, "--help"])
print([name for name in ("jax", "numpy", "matplotlib", "tape_jax") if name in sys.modules])
"""
    )
    assert done.stdout.splitlines()[-1] == "[]"


def python(code, *options):
    """Runs code in a process of its own, in the root of the repository."""
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_python_without_the_environment_is_told_where_it_is(tmp_path):
    """Without packages of its own, as the system's Python is."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from train.main import main; "
    code += "sys.exit(main(['ask', '--run=x', '1+2']))"
    done = python(code, "-S")
    assert done.returncode == program.USER_ERROR
    assert re.match(r"error: No module named '\w+' in this Python", done.stderr)
    assert ".venv" in done.stderr
    assert len(done.stderr.splitlines()) == 1
