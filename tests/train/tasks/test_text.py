"""The text task: from files to batches, and what it says when something does not fit."""

import dataclasses
import itertools
import json
import os
import re

import numpy as np
import pytest

from tests.train import tokenizer_files
from train import experiment
from train.data import held_out, tokenizers
from train.tasks import retrieval, text_evaluation
from train.tasks.questions import VALIDATION_SEED
from train.tasks.text import Text


@pytest.fixture
def folder(tmp_path):
    """40 text files, whose words say which file they are from."""
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"file{i:02} " * (3 + i % 7))
    return tmp_path


def text_task(folder, **options):
    options = {"source": f"{folder}/*.txt", "cache": f"{folder}/cache", "held_out": 0.3, **options}
    return Text(**{"sequence_length": 16, **options})


def held_out_files(share=0.3):
    return {i for i in range(40) if held_out.document(f"{i:02}.txt".encode(), share)}


def files_in(texts):
    return {
        int(word.removeprefix("file")) for text in texts for word in text.split() if len(word) == 6
    }


class TestTraining:
    def test_shorter_sequences(self, folder):
        """As many tokens in more rows, the same as of a task that is judged by them."""
        short = text_task(folder, train_length=8, passkeys=0)
        batch = next(iter(short.dataset(0, 6)))
        expected = next(iter(text_task(folder, sequence_length=8).dataset(0, 12)))
        for name, values in expected.items():
            np.testing.assert_array_equal(batch[name], values)
        assert batch["inputs"].shape == (12, 8)

    @pytest.mark.parametrize("packing", ["concatenated", "documents"])
    def test_trains_on_all_but_the_held_out_files(self, folder, packing):
        task = text_task(folder, packing=packing)
        count = len(task.training_stream().tokens) // task.sequence_length
        batches = list(itertools.islice(task.dataset(0, 4), -(-2 * count // 4)))
        texts = [task.codec.decode(row) for batch in batches for row in batch["inputs"]]
        words = [text.replace("<pad>", " ").replace("<eos>", " ") for text in texts]
        assert files_in(words) == set(range(40)) - held_out_files()

        expected = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}
        if packing == "documents":
            expected |= {"segment_ids": np.int32, "positions": np.int32}
        assert {name: value.dtype for name, value in batches[0].items()} == expected

    def test_order(self, folder):
        in_order = next(iter(text_task(folder, shuffle=False).dataset(0, 8)))["inputs"]
        stream = text_task(folder).training_stream().tokens
        np.testing.assert_array_equal(in_order.reshape(-1), stream[: 8 * 16])
        first, second = (next(iter(text_task(folder).dataset(s, 8)))["inputs"] for s in (0, 1))
        assert np.any(first != second)

    def test_padding(self, folder):
        """Tokenizers without a padding token pad with one that starts or ends documents."""
        name = str(tokenizer_files.hugging_face(folder / "tokenizer.json", ["</s>", "<other>"]))
        task = text_task(folder, tokenizer=name, packing="documents", sequence_length=24)
        batch = next(iter(task.dataset(0, 32)))
        padding = batch["segment_ids"] == 0
        assert padding.any()
        assert set(batch["inputs"][padding].tolist()) == {tokenizers.load(name).eos}

    def test_passkeys_in_place_of_some_sequences(self, folder):
        options = {"sequence_length": 32, "packing": "documents", "passkey_form": "short"}
        task = text_task(folder, passkeys=0.5, **options)
        plain = iter(text_task(folder, **options).dataset(0, 8))
        stream = iter(task.dataset(0, 8))
        codec, seen = task.codec, []
        for batch, other in itertools.islice(zip(stream, plain, strict=True), 4):
            asked = (batch["inputs"] != other["inputs"]).any(axis=1)
            for name in batch:
                np.testing.assert_array_equal(batch[name][~asked], other[name][~asked])
            for targets, weights in zip(
                batch["targets"][asked], batch["weights"][asked], strict=True
            ):
                answer = codec.decode(targets[weights > 0])
                assert re.fullmatch(r"\d{3}>", answer)
                assert f"<key={answer}" in codec.decode(targets)
                np.testing.assert_allclose(weights.sum(), 32)
                seen.append(int(answer[:3]))
        assert 8 <= len(seen) <= 24
        form, keys = task.passkeys_asked
        assert form is retrieval.SHORT
        assert not set(seen) & set(keys)
        assert 50 < len(keys) < 150

        halves = [iter(task.dataset(0, 8, process, 2)) for process in range(2)]
        again = iter(task.dataset(0, 8))
        whole, *parts = map(next, (again, *halves))
        for name in whole:
            joined = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(joined, whole[name])
        again.set_state(json.loads(json.dumps(stream.get_state())))
        for _ in range(2):
            np.testing.assert_equal(next(again), next(stream))

    def test_judged_by_another_text(self, folder, monkeypatch):
        (folder / "other").mkdir()
        (folder / "other" / "a.txt").write_text("something else")
        monkeypatch.setattr(text_evaluation, "evaluate", lambda task, *_: task)
        task = text_task(folder)
        options = text_evaluation.Evaluation(source=f"{folder}/other/*.txt")
        judged = task.evaluate(None, options)
        assert task.decode(judged.evaluation_tokens()) == "something else<eos>"

    def test_subwords_and_lines(self, folder):
        """A corpus of records with a trained tokenizer, document starts and ends included."""
        model = str(tokenizer_files.sentencepiece_model(folder / "tokenizer.model"))
        lines = [json.dumps({"body": f"Position states {i}"}) for i in range(60)]
        (folder / "a.jsonl").write_text("\n".join(lines))
        task = text_task(folder, source=f"{folder}/a.jsonl", text_field="body", tokenizer=model)
        assert task.vocab_size == 320
        codec = task.codec
        texts = {codec.decode(document) for document in task.evaluation_documents()}
        records = [f"Position states {i}" for i in range(60)]
        expected = {f"<s>{r}</s>" for r in records if held_out.document(r.encode(), 0.3)}
        assert texts == expected


class TestHeldOut:
    def test_documents_and_limit(self, folder):
        task = text_task(folder)
        documents = list(task.evaluation_documents())
        assert all(d.dtype == np.int32 and type(d) is np.ndarray for d in documents)
        texts = sorted(task.codec.decode(document) for document in documents)
        assert texts == [f"file{i:02} " * (3 + i % 7) + "<eos>" for i in sorted(held_out_files())]
        stream = np.concatenate(documents)
        np.testing.assert_array_equal(task.evaluation_tokens(), stream)
        for limit in (1, 40, len(documents[0]), len(stream) + 1):
            cut = list(task.evaluation_documents(limit))
            assert all(len(document) for document in cut)
            np.testing.assert_array_equal(np.concatenate(cut), stream[:limit])
            np.testing.assert_array_equal(task.evaluation_tokens(limit), stream[:limit])

    def test_validation_reads_other_documents(self, folder):
        task = text_task(folder)
        documents = [document.tobytes() for document in task.evaluation_documents()]
        limit = sum(len(d) for d in task.evaluation_documents()) // 2 - 20
        test = {d.tobytes() for d in task.evaluation_documents(limit)}
        other = list(task.evaluation_documents(limit, validation=True))
        assert sum(map(len, other)) == limit
        assert [d.tobytes() for d in other[:-1]] == documents[: -len(other) : -1]
        assert not test & {d.tobytes() for d in other}
        options = text_evaluation.Evaluation(tokens=limit, seed=3)
        validation = task.validation(options)
        assert validation == dataclasses.replace(options, validation=True, seed=3 + VALIDATION_SEED)
        whole = sum(map(len, task.evaluation_documents()))
        for tokens in (whole // 2 + 1, None):
            with pytest.raises(ValueError, match="too short for a test and a validation of"):
                task.evaluation_tokens(tokens, validation=True)
        with pytest.raises(ValueError, match="leave no text for a validation"):
            task.validation(text_evaluation.Evaluation(source="stdlib"))

    @pytest.mark.parametrize("source", ["one.text", "*.text"])
    def test_validation_and_test_share_a_document(self, folder, source):
        """Each takes one of its ends, so that all of the text is read once."""
        (folder / "one.text").write_text("abcdefghijklmnopqrstuvw")
        (folder / "two.text").write_text("xyz")
        if source == "one.text":
            (folder / "two.text").unlink()
        task = text_task(folder, held_out_source=f"{folder}/{source}")
        tokens = task.evaluation_tokens()
        half = len(tokens) // 2
        test = task.evaluation_tokens(half)
        validation = task.evaluation_tokens(half, validation=True)
        assert len(test) == len(validation) == half
        assert sorted([*test, *validation]) == sorted(tokens)

    def test_not_in_the_order_of_the_source_and_always_the_same(self, folder):
        tokens = text_task(folder).evaluation_tokens()
        assert np.any(tokens != text_task(folder).held_out_stream().tokens)
        other = text_task(folder, sequence_length=5, packing="documents", shuffle=False)
        np.testing.assert_array_equal(other.evaluation_tokens(), tokens)

    def test_another_source(self, folder):
        (folder / "apart.text").write_text("kept apart")
        task = text_task(folder, held_out_source=f"{folder}/apart.text")
        assert task.codec.decode(task.evaluation_tokens()) == "kept apart<eos>"
        assert len(task.training_stream().offsets) == 41


class TestPrepare:
    """What a training reads is there before it begins."""

    OPTIONS = text_evaluation.Evaluation(factors=(1, 2), tokens=64)

    def test_a_single_file_holds_out_its_end(self, folder):
        (folder / "book.txt").write_text("All is said once.\n" * 50)
        task = text_task(folder, source=f"{folder}/book.txt", held_out=0.2)
        assert task.prepare(self.OPTIONS) == (
            f"{folder}/book.txt: 739 tokens to train on; held out: 163, the end of its one document"
        )
        (folder / "other.md").write_text("Another text. " * 50)
        another = dataclasses.replace(self.OPTIONS, source=f"{folder}/other.md")
        assert not task.prepare(another).endswith("one document")

    def test_held_out_files_are_not_trained_on(self, folder):
        (folder / "b.held").write_text("kept apart " * 50)
        task = text_task(folder, source=f"{folder}/*", held_out_source=f"{folder}/*.held")
        message = (
            r"'.*/\*.held' has files that task.source = '.*/\*' has too \(.*b.held, 1 in all\)"
        )
        with pytest.raises(ValueError, match=f"^task.held_out_source = {message}"):
            task.prepare(self.OPTIONS)
        options = dataclasses.replace(self.OPTIONS, source=f"{folder}/*.held")
        with pytest.raises(ValueError, match=f"^evaluation.source = {message}"):
            dataclasses.replace(task, held_out_source=None).prepare(options)
        with pytest.raises(ValueError, match=f"^task.held_out_source = {message}"):
            task.evaluate(None, self.OPTIONS)
        apart = dataclasses.replace(task, source=f"{folder}/*.txt")
        assert f"of {folder}/*.held" in apart.prepare(self.OPTIONS)

    @pytest.mark.parametrize(
        ("source", "other"),
        [("stdlib", "stdlib"), ("stdlib", os.__file__), ("tfds:c4/en", "tfds:c4/en:train")],
    )
    def test_a_corpus_that_is_trained_on(self, folder, source, other):
        options = dataclasses.replace(self.OPTIONS, source=other)
        with pytest.raises(ValueError, match=f"source = '{other}' has files that .* too"):
            text_task(folder, source=source).evaluate(None, options)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"factors": (1, 9999), "tokens": 999_999}, r"no stretch of 159,985 tokens.*source"),
            ({"tokens": 31}, "tokens = 31 is less than the longest window"),
            ({"passkey_lengths": (9,)}, "passkey: a length of 9 tokens is too small"),
        ],
    )
    def test_what_evaluation_lacks_is_said(self, folder, changes, message):
        with pytest.raises(ValueError, match=message):
            text_task(folder).prepare(dataclasses.replace(self.OPTIONS, **changes))

    def test_the_text_to_judge_by_may_be_another(self, folder):
        (folder / "other").mkdir()
        (folder / "other" / "test.txt").write_text("x" * 99)
        options = dataclasses.replace(self.OPTIONS, source=f"{folder}/other/test.txt")
        none_held_out = text_task(folder, held_out=1e-9)
        with pytest.raises(ValueError, match=r"falls into the held out part.*evaluation\.source"):
            none_held_out.prepare(self.OPTIONS)
        assert none_held_out.prepare(options).endswith(f"held out: 100 of {options.source}")


class TestExperiment:
    def values(self, **task):
        return {
            "name": "x",
            "model": {"hidden_size": 8, "num_layers": 1, "num_heads": 1},
            "task": {"name": "text", **task},
            "train": {"steps": 1, "batch_size": 1, "learning_rate": 1.0},
        }

    def test_records_the_tokenizer(self):
        made = experiment.from_mapping(self.values())
        record = json.loads(json.dumps(experiment.to_json(made)))
        fingerprint = tokenizers.load("bytes").fingerprint
        assert record["task"]["tokenizer_fingerprint"] == fingerprint
        assert record["model"]["vocab_size"] == 258
        assert experiment.from_mapping(record) == made

    def test_nothing_is_read_until_it_is_needed(self, tmp_path):
        absent = self.values(source="absent/*.txt", tokenizer="absent.model", vocab_size=32_000)
        task = experiment.from_mapping(absent).task
        assert (task.vocab_size, task.tokenizer_fingerprint) == (32_000, None)
        with pytest.raises(ValueError, match=r"there is no tokenizer 'absent.model'"):
            task.dataset(0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": "document"}, r"unknown packing 'document'.*did you mean 'documents'"),
        ({"held_out": 0.0}, "held_out must be between 0 and 1; got 0.0"),
        ({"train_length": 5}, "train_length must divide sequence_length = 16"),
        ({"passkeys": 1}, r"passkeys is a share of the sequences in \[0, 1\); got 1"),
        ({"passkeys": 0.5}, "a length of 16 tokens is too small"),
        ({"passkey_form": "shrt"}, "unknown passkey form 'shrt'.*did you mean 'short'"),
        ({"tokenizer_fingerprint": "0"}, r"'bytes' has the fingerprint .*, but 0 was used"),
        ({"tokenizer": "other.json"}, r"no token that starts or ends a document.*<other>"),
        ({"vocab_size": 100}, r"vocab_size = 100 is too small .* has 258 tokens"),
        ({"sequence_length": 0}, "sequence_length must be a positive integer; got 0"),
        ({"sequence_length": 5000}, "shorter than one sequence of 5000 tokens"),
        ({"held_out": 1 - 1e-9}, "no document of .* falls into the train part"),
    ],
)
def test_what_cannot_be_trained(folder, monkeypatch, options, message):
    monkeypatch.chdir(folder)
    tokenizer_files.hugging_face(folder / "other.json", ["<other>"])
    with pytest.raises(ValueError, match=message):
        text_task(folder, **options).dataset(0, 1)
