"""What is read from the source of the classes is what they are, and it takes no time."""

import subprocess
import sys

import pytest

from tests.paths import ROOT
from train import main as program
from train import outline
from train.experiment import files
from train.tasks import TASKS


def names(fields):
    """Nested names, in order, of what either module knows of a config."""
    return {
        name: names(inner) if isinstance(inner, dict) else None for name, inner in fields.items()
    }


@pytest.mark.parametrize("task", TASKS)
def test_the_fields_are_those_of_the_classes(task):
    assert outline.config_fields(task) == names(files._template(task))


def test_a_task_of_somebody_else_is_not_known():
    assert outline.config_fields("mine") is None


def python(code, *options):
    """Runs code in a process of its own, in the root of the repository."""
    return subprocess.run(
        [sys.executable, *options, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_nothing_heavy_is_loaded_before_the_arguments_are_right(tmp_path):
    config, run = ROOT / "configs/addition_demo.py", tmp_path / "run"
    wrong = [
        ["trian"],
        ["train", f"--run={run}"],
        ["train", f"--run={run}", "--config=nowhere.py"],
        ["train", f"--run={run}", f"--config={config}", "--config.train.stepz=3"],
        ["compare", f"--run={run}", f"--config={config}", "--encodings=rope", "--config.seeed=3"],
    ]
    done = python(
        f"""
import contextlib, sys
from train import main
for command in main.COMMANDS:
    with contextlib.suppress(SystemExit):
        main.main([command, "--help"])
print([main.main(call) for call in {wrong}])
print([name for name in ("jax", "numpy", "matplotlib", "tape_jax") if name in sys.modules])
"""
    )
    assert done.stdout.splitlines()[-2:] == [str([program.USER_ERROR] * len(wrong)), "[]"]
    assert [line.partition("(")[2] for line in done.stderr.splitlines()] == [
        "did you mean 'train'?)",
        "",
        "",
        "did you mean 'steps'?); it has: " + ", ".join(files._template("addition")["train"]),
        "did you mean 'seed'?); it has: " + ", ".join(files._template("addition")),
    ]


def test_fields_of_a_file_and_of_a_run(tmp_path):
    file = tmp_path / "config.py"
    start = "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict("
    file.write_text(
        start + "{'task': {'name': 'text'}, 'model': {'position': 'rope', 'widht': 1}})"
    )
    run = tmp_path / "run"
    run.mkdir()
    (run / "experiment.json").write_text('{"experiment": {"task": {"name": "words"}}}')
    done = python(
        f"""
from pathlib import Path
from train import outline
for config, run, options in (
    (Path({str(file)!r}), None, []),
    (None, Path({str(run)!r}), ["--config.task.group=Z60"]),
    (None, Path({str(run)!r}), ["--config.task.sourc=x"]),
    (None, Path({str(run)!r}), ["--config.task.name=text", "--config.task.sourc=x"]),
    (None, Path("nowhere"), ["--config.task.sourc=x"]),
):
    try:
        outline.check(config, run, options)
        print("fine")
    except ValueError as error:
        print(str(error).partition(";")[0])
"""
    )
    assert done.stdout.splitlines() == [
        "unknown field 'widht' of config.model",
        "fine",
        "unknown field 'sourc' of config.task",
        "unknown field 'sourc' of config.task (did you mean 'source'?)",
        "fine",
    ]


def test_a_python_without_the_environment_is_told_where_it_is(tmp_path):
    """Without packages of its own, as the system's Python is."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from train.main import main; "
    code += "sys.exit(main(['ask', '--run=x', '1+2']))"
    done = python(code, "-S")
    assert done.returncode == program.USER_ERROR
    assert done.stderr.startswith("error: No module named 'jax' in this Python")
    assert ".venv" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("made", "active", "advice"),
    [
        (False, False, "`make .venv/.ready` sets up an environment"),
        (True, False, "call .venv/bin/python"),
        (True, True, "`make -B .venv/.ready` installs"),
    ],
)
def test_what_to_do_where_a_module_is_missing(tmp_path, monkeypatch, made, active, advice):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".venv").mkdir()
    if made:
        (tmp_path / ".venv" / ".ready").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv" if active else "/usr"))
    error = ModuleNotFoundError("No module named 'grain'", name="grain")
    assert advice in program.without_environment(error)
