"""Suites from the command line: a table, JSON, a picture, and errors of one line."""

import json

import pytest

from tests.train import small_runs
from train.main import USER_ERROR, main
from train.suites.results import SuiteResult

CONFIG = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({
        "task": {"name": "passkey", "sequence_length": 64},
        "model": {"hidden_size": 8, "num_heads": 2, "num_layers": 1, "max_length": 512,
                  "position": {"kind": "rope"}},
        "train": {"steps": 2, "batch_size": 2, "learning_rate": 1e-2},
    })
"""
ASKED = ["--form=short", "--samples=2", "--batch-size=2", "--tasks", "vt", "cwe"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_runs.train(tmp_path_factory.mktemp("eval"), CONFIG)


def test_a_suite(run, capsys):
    call = ["eval", f"--run={run}", "--suite=ruler", *ASKED, "--lengths", "512", "400"]
    assert main(call) == 0
    out = capsys.readouterr().out
    assert "| task |" in out
    assert "tokens/s" in out
    result = SuiteResult.from_json(json.loads((run / "evaluation_ruler.json").read_text()))
    assert result.lengths == [400, 512]
    assert list(result.scores) == ["vt", "cwe"]
    assert result.table() in (run / "evaluation_ruler.txt").read_text()
    assert (run / "evaluation_ruler.png").read_bytes().startswith(b"\x89PNG")
    assert main(call) == 0
    assert "nothing was left to ask" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite=rulr", "--lengths", "512"], "unknown suite 'rulr'"),
        (["--suite=ruler"], "a suite needs lengths"),
        (["--suite=ruler", "--lengths", "1024"], "the model takes at most 512 tokens"),
        (["--lengths", "512"], "--lengths goes with --suite"),
        (["--suite=ruler", "--lengths", "512", "--cut-updates"], "does not go with --suite"),
    ],
)
def test_wrong_calls(run, options, message, capsys):
    before = sorted(run.iterdir())
    assert main(["eval", f"--run={run}", *options]) == USER_ERROR
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(run.iterdir()) == before


def test_files_of_others_are_left_alone(run, capsys):
    path = run / "evaluation_babilong.json"
    path.write_text("mine")
    call = ["eval", f"--run={run}", "--suite=babilong", "--lengths", "512"]
    assert main(call) == USER_ERROR
    assert "is not replaced" in capsys.readouterr().err
    assert path.read_text() == "mine"
    path.unlink()
