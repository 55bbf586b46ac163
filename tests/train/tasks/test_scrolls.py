import collections
import json

import numpy as np
import pytest

from tests.train import small, tokenizer_files
from tests.train.tasks.scrolls_archives import HARBOUR, qa, record, write
from train import experiment
from train.compare.tasks import compare
from train.data import tokenizers
from train.main import main
from train.tasks import get_task
from train.tasks.scrolls import ScrollsEvaluation
from train.tasks.scrolls_metrics import Outcome

EOS, PAD = 256, 257


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "scrolls")


def a_task(data, **options):
    return get_task("scrolls", data=str(data), **{"answer_length": 12, **options})


def text(row):
    """Tokens of a training example without padding."""
    return tokenizers.load("bytes").decode([t for t in row if t != PAD])


class TestPrompts:
    def test_the_answer_follows_the_question(self, data):
        question = a_task(data, sequence_length=200).questions("validation")["c"]
        wanted = f"{HARBOUR}\n\nWhat do fishermen mend?\nAnswer:\n"
        assert tokenizers.load("bytes").decode(question.prompt) == wanted
        assert question.outputs == ["nets", "old nets"]

    def test_the_end_of_the_document_is_cut_off(self, data):
        ending = "\n\nWhat do fishermen mend?\nAnswer:\n"
        for left in (0, 1, 17, len(HARBOUR) - 1, len(HARBOUR)):
            task = a_task(data, sequence_length=len(ending) + 12 + left)
            prompt = task.questions("validation")["c"].prompt
            assert len(prompt) + 12 == task.sequence_length
            assert text(prompt) == HARBOUR[:left] + ending

    def test_summaries(self, tmp_path):
        records = {"gov_report": {"train": [record("g", "A report.\n\nIts end.", "Short.")]}}
        task = a_task(write(tmp_path, records=records), subset="gov_report", sequence_length=60)
        batch = next(iter(task.dataset(0, 1)))
        assert text(batch["inputs"][0]) == "A report.\n\nIts end.\n\nSummary:\nShort.<eos>"

    def test_subwords(self, data, tmp_path):
        """A document is cut at a token, and of a long one not more is read than necessary."""
        path = tokenizer_files.hugging_face(tmp_path / "tokenizer.json")
        codec = tokenizers.load(str(path))
        records = {"qasper": {"test": [qa("x", None), qa("y", None)]}}
        records["qasper"]["test"][1]["input"] += HARBOUR * 100
        folder = write(tmp_path / "long", records=records)
        task = a_task(folder, tokenizer=str(path), sequence_length=96)
        short, long = (question.prompt for question in task.questions("test").values())
        ending = codec.encode("\n\nWhat do fishermen mend?\nAnswer:\n")
        room = 96 - 12 - 1 - len(ending)
        assert long.tolist() == [codec.bos, *codec.encode(HARBOUR * 9)[:room], *ending]
        assert short.tolist() == [codec.bos, *codec.encode(HARBOUR)[:room], *ending]


class TestTraining:
    def test_the_loss_counts_the_answer_only(self, data):
        def counted(batch):
            rows = zip(batch["targets"], batch["weights"], strict=True)
            return [text(targets[weights == 1]) for targets, weights in rows]

        batch = next(iter(a_task(data, sequence_length=128).dataset(3, 3)))
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
            "inputs": ((3, 128), np.int32),
            "targets": ((3, 128), np.int32),
            "weights": ((3, 128), np.float32),
        }
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
        assert sorted(counted(batch)) == ["nets<eos>", "the pier<eos>", "their nets<eos>"]
        assert set(np.unique(batch["weights"])) == {0, 1}
        for inputs, answer in zip(batch["inputs"], counted(batch), strict=True):
            assert text(inputs) == f"{HARBOUR}\n\nWhat do fishermen mend?\nAnswer:\n{answer}"
        # A long answer loses its end.
        batch = next(iter(a_task(data, sequence_length=128, answer_length=4).dataset(0, 3)))
        assert sorted(counted(batch)) == ["nets", "the ", "thei"]

    def test_every_pass_visits_all_in_another_order(self, tmp_path):
        records = [qa(f"{i}", f"{i:02}") for i in range(12)]
        folder = write(tmp_path / "many", records={"qasper": {"train": records}})

        def answers(seed, batches):
            stream = iter(a_task(folder, sequence_length=128).dataset(seed, 4))
            found = [next(stream) for _ in range(batches)]
            return [text(x["targets"][i][x["weights"][i] == 1]) for x in found for i in range(4)]

        two = answers(5, 6)
        assert answers(5, 6) == two
        assert collections.Counter(two[:12]) == collections.Counter(two[12:])
        assert len(set(two)) == 12
        assert two[:12] != two[12:]
        assert answers(6, 3) != two[:12]

    def test_it_goes_on_with_the_same_examples_only(self, tmp_path):
        """Also from a state of before they were checked."""

        def stream(*outputs):
            records = {"qasper": {"train": [qa(f"{i}", text) for i, text in enumerate(outputs)]}}
            folder = write(tmp_path / "".join(outputs), records=records)
            return iter(a_task(folder, sequence_length=128).dataset(0, 2))

        first, same, old = (stream("a", "b", "c") for _ in range(3))
        next(first)
        state = json.loads(json.dumps(first.get_state()))
        wanted = next(first)
        same.set_state(state)
        old.set_state(state["batches"])
        for resumed in (same, old):
            np.testing.assert_equal(next(resumed), wanted)
        for others in (("a", "b", "d"), ("a", "c", "b"), ("a", "b")):
            with pytest.raises(ValueError, match="the text has changed since this state was saved"):
                stream(*others).set_state(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subset": "quasper"}, "did you mean 'qasper'"),
        ({"answer_length": 0}, "answer_length must be a positive integer"),
        ({"sequence_length": 12}, "an answer of 12 tokens leaves no room"),
        ({"sequence_length": 45}, r"line 1: the question of example 'a' takes 34 token"),
        ({"vocab_size": 100}, "vocab_size = 100 is too small for the tokenizer 'bytes'"),
        ({"data": "none"}, "there is neither .* nor "),
        ({"subset": "contract_nli"}, "the training split of contract_nli is empty"),
        ({"tokenizer": "endless.json"}, r"no token that ends a text; .* \['<s>'\]"),
    ],
)
def test_what_cannot_be_trained(data, monkeypatch, options, message):
    monkeypatch.chdir(data)
    tokenizer_files.hugging_face(data / "endless.json", specials=("<s>",))
    (data / "contract_nli" / "train.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=message):
        a_task(**{"data": data, **options}).dataset(0, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"split": "dev"}, "unknown split"), ({"limit": 0}, "limit must be at least 1")],
)
def test_what_cannot_be_asked(options, message):
    with pytest.raises(ValueError, match=message):
        ScrollsEvaluation(**options)


def test_compare(data):
    of_seeds = [Outcome("qasper", "validation", {"c": "nets"}, {"f1": f}) for f in (0.25, 0.75)]
    comparison = compare(a_task(data), {"tape": of_seeds, "rope": of_seeds[:1]})
    assert "| tape | 50.00 |" in comparison.sections["Scores"]
    assert "| rope | 25.00 |" in comparison.sections["Scores"]


@pytest.mark.slow
def test_from_training_to_scores(data, tmp_path, capsys):
    """All training answers are "yes", and a model that has learned this is right twice in three."""
    task = {"name": "scrolls", "subset": "contract_nli", "data": str(data), "sequence_length": 40,
            "answer_length": 6}  # fmt: skip
    model = {"hidden_size": 16, "num_layers": 1, "max_length": 40, "position": {"kind": "rope"}}
    train = {"steps": 40, "learning_rate": 0.02, "save_every": 40}
    config = small.config(tmp_path, task, model, train, evaluation={"batch_size": 2, "shapes": 1})
    folder = tmp_path / "run"
    assert main(["train", f"--config={config}", f"--run={folder}", "--evaluate"]) == 0
    wanted = {"v1": "yes", "v2": "yes", "v3": "yes"}
    assert json.loads((folder / "predictions.json").read_text()) == wanted
    result = json.loads((folder / "evaluation.json").read_text())["result"]
    assert result["predictions"] == wanted
    assert result["scores"] == {"exact_match": pytest.approx(2 / 3)}
    assert "| contract_nli |          66.67 |" in (folder / "evaluation.txt").read_text()

    task = experiment.from_file(config).task
    assert task.read_result(result).summary() == {"exact_match": pytest.approx(2 / 3)}
    capsys.readouterr()
    score = ["score", f"--data={data}", "--subset=contract_nli"]
    assert main([*score, f"--predictions={folder / 'predictions.json'}"]) == 0
    out = capsys.readouterr().out
    assert "66.67" in out
    assert "3 examples of contract_nli, validation." in out

    options = ["--config.evaluation.split=test", "--config.evaluation.limit=1"]
    assert main(["eval", f"--run={folder}", *options]) == 0
    assert "not published" in capsys.readouterr().out
    assert json.loads((folder / "predictions.json").read_text()) == {"s1": "yes"}
    assert main([*score, f"--predictions={folder / 'predictions.json'}"]) == 2
    message = "missing: 'v1', 'v2', 'v3'; unknown: 's1'"
    assert message in capsys.readouterr().err

    (folder / "evaluation.json").unlink()
    (folder / "predictions.json").write_text("mine")
    assert main(["eval", f"--run={folder}"]) == 2
    assert "it is not replaced" in capsys.readouterr().err
    assert (folder / "predictions.json").read_text() == "mine"
