"""Suites from the command line: a table, JSON, a picture, and errors of one line."""

import json

import pytest

from tests.train import small
from train.evaluation.journal import alone
from train.evaluation.programs import KeptResults, Programs
from train.main import USER_ERROR, main
from train.suites.results import SuiteResult

ROPE = {"num_layers": 1, "position": {"kind": "rope"}}
ASKED = ["--form=short", "--samples=2", "--batch-size=2", "--tasks", "vt", "cwe"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, task = tmp_path_factory.mktemp("eval"), {"name": "passkey", "sequence_length": 64}
    return small.saved(folder, task, model=ROPE | {"max_length": 512})


@pytest.mark.slow
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
    ("options", "file"),
    [
        ("", "evaluation.partial.jsonl"),
        ("--suite=ruler --lengths 256 --form short --tasks vt", "evaluation_ruler.jsonl"),
    ],
)
def test_a_second_evaluation_is_told_of_the_first(run, options, file, capsys):
    with alone(run / file):
        assert main(["eval", f"--run={run}", *options.split()]) == USER_ERROR
    assert f"another evaluation is writing {run / file}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("Some words of a text that goes on and on. " * 400)
    task = {"name": "text", "source": f"{folder}/text.txt", "sequence_length": 64, "held_out": 0.2,
            "cache": f"{folder}/cache", "passkeys": 0.5, "passkey_form": "short"}  # fmt: skip
    asked = {"factors": (1, 2), "tokens": 1024, "batch_tokens": 256, "passkey_lengths": (64, 128),
             "passkey_depths": 2, "passkey_trials": 3}  # fmt: skip
    return small.saved(folder, task, model=ROPE, evaluation=asked)


def scores_of(run):
    return json.loads((run / "evaluation.json").read_text())["result"]


@pytest.mark.slow
def test_a_killed_evaluation_goes_on(text_run, capsys, monkeypatch):
    """Of perplexity and passkeys: what was computed is not computed again."""
    call, partial = ["eval", f"--run={text_run}"], text_run / "evaluation.partial.jsonl"
    asked, computed = [], Programs.run

    def counted(self, function, *given):
        asked.append(type(function).__name__)
        return computed(self, function, *given)

    monkeypatch.setattr(Programs, "run", counted)
    assert main(call) == 0
    whole, wanted = list(asked), scores_of(text_run)
    assert set(whole) == {"TokenLosses", "_AllRight"}
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert not partial.exists()

    kept = KeptResults.add

    def killed(self, key, result):
        kept(self, key, result)
        if len(self.found) == len(whole) - 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(KeptResults, "add", killed)
        assert main(call) != 0
    lines = partial.read_bytes()
    partial.write_bytes(lines[:-30])
    (text_run / "evaluation.json").unlink()
    asked.clear()
    assert main(call) == 0
    assert len(asked) == 3
    assert scores_of(text_run) == wanted
    assert not partial.exists()

    partial.write_bytes(lines)
    asked.clear()
    assert main([*call, "--fresh"]) == 0
    assert asked == whole
    partial.write_text("mine")
    assert main(call) == USER_ERROR
    assert "was not written by this program: it is left alone" in capsys.readouterr().err
    assert partial.read_text() == "mine"
    partial.unlink()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--suite=rulr --lengths 512", "unknown suite 'rulr'"),
        ("--lengths 512", "go with --suite only, got --lengths; the task's own options"),
        ("--tasks vt --samples 20", "go with --suite only, got --tasks, --samples;"),
        (
            "--suite=ruler --lengths 512 --config.evaluation.trials=3",
            "takes the place of the task's own evaluation; got --config.evaluation.trials=3",
        ),
        ("--suite=ruler --lengths 512 --cut-updates", "does not go with --suite"),
        ("--cut-updates --fresh", "does not go with --fresh"),
        ("--suite=babilong --lengths 512", "is not replaced"),
    ],
)
def test_wrong_calls(run, options, message, capsys):
    """Files of others are left alone."""
    (run / "evaluation_babilong.json").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    assert main(["eval", f"--run={run}", *options.split()]) == USER_ERROR
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in run.iterdir()} == before
