"""What a new experiment takes over from the base that it adapts, and what it must say to change."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.train import tokenizer_files
from train import experiment
from train.training import runs

RETROFIT = ROOT / "configs/retrofit.py"
GOLDEN = ROOT / "tests/golden/hf/llama3_gqa"


@pytest.fixture
def llama(tmp_path):
    """What a config reads of a Llama with a tokenizer, and with a scaling: llama3 x 8."""
    folder = Path(shutil.copytree(GOLDEN, tmp_path / "llama"))
    change(folder, {"vocab_size": 400, "max_position_embeddings": 8192})
    tokenizer_files.hugging_face(folder / "tokenizer.json")
    return folder


def change(folder, values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def made(llama, *options, config=RETROFIT):
    """The experiment, and what was said of it."""
    notes = []
    given = [f"--config.{option}" for option in (f"adapt.base={llama}", *options)]
    return experiment.from_file(config, given, notes.append), notes


class TestTokenizer:
    def test_and_the_scaling_are_those_of_the_base(self, llama):
        wanted, notes = made(llama)
        assert wanted.task.tokenizer == str(llama)
        assert wanted.task.codec.bos is not None
        position = wanted.model.position
        assert position.kind == "tape"
        assert (position.scaling.kind, position.scaling.factor) == ("llama3", 8)
        assert notes == []
        # What a run records is not refused later.
        values = experiment.to_json(wanted)
        values["task"] |= {"tokenizer": "bytes", "tokenizer_fingerprint": None, "vocab_size": 0}
        assert experiment.from_mapping(values).task.tokenizer == "bytes"

    def test_of_a_run_that_is_the_base(self, llama, tmp_path):
        """It need not be there any more: the run knows its size and its fingerprint."""
        tokenizer = Path(shutil.copy(llama / "tokenizer.json", tmp_path / "own.json"))
        given = [f"--config.task.tokenizer={tokenizer}", "--config.model.position.kind=rope"]
        base = experiment.from_file(ROOT / "configs/bytes_demo.py", given, lambda _: None)
        runs.create(tmp_path / "base", base)
        tokenizer.unlink()
        wanted, notes = made(tmp_path / "base")
        assert wanted.task.tokenizer_fingerprint == base.task.tokenizer_fingerprint
        assert wanted.task.vocab_size == base.task.vocab_size
        assert notes == []

    def test_another_form_of_it_is_taken_and_another_refused(self, llama, tmp_path):
        copy = shutil.copy(llama / "tokenizer.json", tmp_path / "copy.json")
        form = tokenizer_files.sentencepiece_model(llama / "tokenizer.model")
        for same in (copy, form):
            assert made(llama, f"task.tokenizer={same}")[0].task.tokenizer == str(same)
        other = tokenizer_files.hugging_face(tmp_path / "other.json", vocab_size=280)
        with pytest.raises(ValueError, match=f"{other}' is not the tokenizer of the base {llama}"):
            made(llama, f"task.tokenizer={other}")

    def test_a_base_without_one_or_with_a_larger_one(self, llama):
        change(llama, {"vocab_size": 192})
        message = "192 is too small for the task, which has 300 tokens, those of the tokenizer"
        with pytest.raises(ValueError, match=f"{message} '{re.escape(str(llama))}'"):
            made(llama)
        change(llama, {"vocab_size": 400})
        (llama / "tokenizer.json").unlink()
        wanted, notes = made(llama)
        assert wanted.task.tokenizer == "bytes"
        assert notes == [
            f"the base {llama} has no tokenizer: task.tokenizer = 'bytes' is taken for its own"
        ]


@pytest.fixture
def olmo(llama):
    """A base with windows in all layers but every fourth, which alone has a scaling."""
    fields = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_hidden_layers": 4}
    fields |= {"rope_parameters": None, "rope_theta": 50_000.0, "sliding_window": 9}
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    change(llama, fields | {"rope_scaling": scaling})
    return llama


def test_layers_start_as_those_of_the_base(olmo):
    options = "adapt.method=encoding", "model.position.kind=rope+alibi"
    wanted, _ = made(olmo, *options)
    assert wanted.model.position.kind == "/".join(["rope+alibi+window"] * 3 + ["rope+alibi"])
    ropes = [x.members[0] for x in wanted.model.position.encodings]
    assert [x.scaling.kind for x in ropes] == ["none"] * 3 + ["yarn"]
    assert {x.base for x in ropes} == {50_000.0}


def test_a_scaling_of_some_layers_is_not_replaced_unless_told_to(olmo):
    scaling = "adapt.scaling.kind=linear", "adapt.scaling.factor=2"
    for method in ("full", "tape"):
        with pytest.raises(ValueError, match=r"scaling: yarn x 8 -> linear x 2.*replace_scaling"):
            made(olmo, f"adapt.method={method}", *scaling)
    wanted, notes = made(olmo, "adapt.method=full", "adapt.replace_scaling=True", *scaling)
    assert "scaling: yarn x 8 -> linear x 2" in notes
    kinds = [x.members[0].scaling.kind for x in wanted.model.position.encodings]
    assert kinds == ["none"] * 3 + ["linear"]


def test_a_scaling_is_not_replaced_unless_told_to(llama):
    def scaled(*options):
        wanted, notes = made(llama, *options, config=ROOT / "configs/context_extension.py")
        return wanted.model.position.scaling.kind, notes

    with pytest.raises(ValueError, match=r"scaling: llama3 x 8 -> linear x 2.*replace_scaling"):
        scaled()
    replaced = scaled("adapt.replace_scaling=True")
    assert replaced == ("linear", ["scaling: llama3 x 8 -> linear x 2"])
    assert scaled("adapt.method=base") == ("llama3", [])
    change(llama, {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}})
    assert scaled() == ("linear", ["scaling: none -> linear x 2"])
