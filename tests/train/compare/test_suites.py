"""A suite in a comparison: its scores beside the task's, and what is refused before training."""

import dataclasses
import json

import pytest

from tests.train import small
from tests.train.compare.test_report import FixedTask, compared, make_run
from train.compare import evaluations, suites
from train.compare.report import result_section, write_report
from train.experiment import from_file
from train.main import USER_ERROR, main
from train.suites.evaluation import SuiteOptions
from train.suites.results import SuiteResult
from train.training.runs import checkpoints

COMPARE = ["compare", "--encodings=rope"]


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text.txt").write_text("Some words of a text that goes on and on. " * 200)
    task = {"name": "text", "source": f"{tmp_path}/text.txt", "sequence_length": 64,
            "held_out": 0.2, "cache": f"{tmp_path}/cache"}  # fmt: skip
    return small.config(
        tmp_path,
        task,
        {"num_layers": 1, "max_length": 300},
        {"batch_size": 2, "learning_rate": 1e-2},
        evaluation={"factors": (1,), "tokens": 256, "protocols": ("disjoint",)},
    )


def result(*right):
    """Of two tasks at two lengths, the shorter always answered."""
    cells = {512: (1.0, 1.0), 2048: tuple(map(float, right))}
    return SuiteResult("ruler", 7, 512, {}, {"vt": cells, "cwe": cells})


def test_every_option_can_be_said():
    words = "ruler:lengths=2048,512:tasks=vt,cwe:samples=3:form=short:background=x.txt:seed=1"
    assert suites.parse(f"{words}:batch_size=2:chunk=64:squad=a:hotpotqa=b") == SuiteOptions(
        *("ruler", (512, 2048), ("vt", "cwe"), 3, "short", "x.txt", 1, 2, 64, "a", "b")
    )
    for source in ("tfds:wikipedia/en", "tfds:c4/en:validation", r"C:\texts\*.txt"):
        found = suites.parse(f"ruler:background={source}:lengths=512")
        assert (found.background, found.lengths) == (source, (512,))
    assert {"suite", *suites._READ} == {field.name for field in dataclasses.fields(SuiteOptions)}


def test_scores_beside_those_of_the_task(tmp_path):
    answers = [result(1, 1), result(1, 0), result(0, 0), result(0, 0)]
    names = ["tape", "tape", "rope", "rope"]
    assert suites.summary(answers[1]) == {"ruler_512": 1.0, "ruler_2048": 0.5}
    records = [
        make_run(name, seed, suite=suites.summary(answer))
        for name, seed, answer in zip(names, (0, 1, 0, 1), answers, strict=True)
    ]
    found = suites.added(compared(), FixedTask, names, answers)
    assert [score.key for score in found.scores] == ["loss", "right", "ruler_2048", "ruler_512"]
    row = found.sections["Suite ruler"].splitlines()[3].split("|")
    assert [x.strip() for x in row[1:-1]] == ["vt", "2,048", "75.0 ± 35.4", "0.0 ± 0.0"]
    text = result_section(FixedTask, records, found)
    assert "**ruler at 2,048 tokens, %**: no clear winner. Best on average is tape" in text
    write_report(tmp_path / "report", FixedTask, records, found, environment={})
    runs = json.loads((tmp_path / "report" / "report.json").read_text())["runs"]
    assert [run["scores"]["ruler_2048"] for run in runs] == [1.0, 0.5, 0.0, 0.0]
    assert runs[0]["scores"]["loss"] == 1.5


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (["train"], "ruler:lengths=512", "takes at most 300 tokens: a length of 512"),
        (COMPARE, "ruler:lengths=512", "takes at most 300 tokens: a length of 512"),
        (COMPARE, "ruler:512", "expected SUITE:OPTION=VALUE, such as ruler:lengths=512; got"),
        (COMPARE, "ruler:lengths=256:512", "takes whole numbers; got '256:512'"),
        (COMPARE, "ruler:seed=1:lengths=256:seed=1", "each option of a suite once; got seed twice"),
        (COMPARE, "ruler:lengths=many", "lengths of a suite takes whole numbers; got 'many'"),
        (COMPARE, "ruler:length=256", "unknown option of a suite 'length'"),
        (COMPARE, "ruler:lengths=256:tasks=vt,qa_1", "give one with --squad=FILE"),
        (["train"], "ruler:lengths=256:form=short:tasks=qa_1:squad=no.json", "no.json"),
        (["train"], "ruler:lengths=16", "16 tokens leaves no room"),
        ([*COMPARE, "--sweep=seed=0,1"], "ruler:lengths=16", "16 tokens leaves no room"),
    ],
)
def test_what_cannot_be_asked_is_known_before(command, config, tmp_path, options, message, capsys):
    call = [*command, f"--config={config}", f"--run={tmp_path / 'all'}", f"--suite={options}"]
    assert main(call) == USER_ERROR
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "all").exists()


def test_what_cannot_be_validated_is_known_before(config, tmp_path, capsys):
    call = ["train", f"--config={config}", f"--run={tmp_path / 'run'}", "--validate"]
    assert main([*call, "--config.evaluation.tokens=1024"]) == USER_ERROR
    assert "too short for a test and a validation of 1,025 each" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_longer_training_is_asked_again(config, tmp_path):
    """The answers of fewer steps are forgotten."""
    run = tmp_path / "run"
    call = ["train", f"--config={config}", f"--run={run}", "--resume"]
    call += ["--suite=ruler:form=short:tasks=vt:samples=1:lengths=256"]
    for steps in (1, 2):
        assert main([*call, f"--config.train.steps={steps}"]) == 0
        first, *answers = (run / "evaluation_ruler.jsonl").read_text().splitlines()
        assert (json.loads(first)["step"], len(answers)) == (steps, 1)


def test_answers_are_of_a_checkpoint(config, tmp_path, monkeypatch):
    """Other weights at the same step have another digest."""
    asked = {}

    def ask(*_, **options):
        asked.update(options)
        return result(1, 1)

    monkeypatch.setattr(evaluations, "ask_suite", ask)
    folder = small.save_run(tmp_path / "run", from_file(config), 2)
    evaluations.evaluate_suite(folder, SuiteOptions("ruler", (256,), ("vt",)))
    with checkpoints(folder) as kept:
        assert (asked["step"], asked["checkpoint"]) == (2, kept.digest(2))


@pytest.mark.slow
def test_a_comparison_asks_and_goes_on(config, tmp_path, capsys, monkeypatch):
    def of_known_answers(trained, codec, options, path, **more):
        """The trainings have asked, side by side."""
        assert path.exists()
        return ask(trained, codec, options, path, **more)

    ask = evaluations.ask_suite
    monkeypatch.setattr(evaluations, "ask_suite", of_known_answers)
    folder = tmp_path / "all"
    call = ["compare", f"--config={config}", f"--run={folder}", "--encodings=rope", "--seeds=2"]
    call += ["--suite=ruler:form=short:tasks=vt:samples=2:lengths=256"]
    assert main(call) == 0
    assert "Suite ruler" in capsys.readouterr().out
    runs = json.loads((folder / "report.json").read_text())["runs"]
    assert all("ruler_256" in run["scores"] for run in runs)
    path = folder / "rope" / "evaluation_ruler.jsonl"
    lines = path.read_bytes()
    assert main(call) == 0
    assert path.read_bytes() == lines
    assert json.loads((folder / "report.json").read_text())["runs"] == runs
