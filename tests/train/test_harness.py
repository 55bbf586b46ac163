"""The lm-evaluation-harness asks our model and transformers the same, and gets the same answers."""

import json
import os
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import tape_jax as tape
from tests.models import random_variables
from tests.paths import ROOT
from tests.train import small, tokenizer_files
from train import harness

reason = "lm_eval is not installed: pip install '.[harness]'"
TapeJax = pytest.importorskip("train.harness_model", reason=reason, exc_type=ImportError).TapeJax
TASKS = ROOT / "tests" / "train" / "harness_tasks"
NAMES = ("tape_choices", "tape_text", "tape_write")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A random Llama folder with a tokenizer; it takes 64 tokens."""
    folder = tmp_path_factory.mktemp("harness") / "llama"
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    config = tape.ModelConfig(**sizes, num_kv_heads=2, intermediate_size=48, position="rope",
                              max_length=64)  # fmt: skip
    model = tape.Transformer(config)
    tape.save_pretrained(folder, model, random_variables(model))
    tokenizer_files.hugging_face(folder / "tokenizer.json")
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles | kind))
    return folder


def test_a_start_token_where_the_tokenizer_adds_one(llama, tmp_path):
    alone = shutil.copytree(llama, tmp_path / "alone")
    config = json.loads((alone / "tokenizer_config.json").read_text())
    (alone / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    found, wanted = (TapeJax(model=str(folder)).tok_encode("fox") for folder in (alone, llama))
    assert [0, *found] == wanted
    assert TapeJax(model=str(alone), add_bos_token=True).tok_encode("fox") == wanted


def test_an_answer_ends_where_the_folder_says(llama, tmp_path):
    copy = shutil.copytree(llama, tmp_path / "copy")
    (copy / "generation_config.json").write_text('{"eos_token_id": [1, 77]}')
    model = TapeJax(model=str(copy))
    assert model._continuer.stops == (1, 77)
    request = SimpleNamespace(args=("fox", {"until": ["\n\n"], "max_gen_toks": 5}))
    whole = TapeJax(model=str(llama)).generate_until([request])
    model._continuer.stops = tuple(range(300))
    assert (model.generate_until([request]), bool(whole[0])) == ([""], True)


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Answers of a model to the local tasks, by task and number of the example."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    harness.register()

    def run(model, tasks=NAMES, **options):
        manager = TaskManager(include_path=str(TASKS), include_defaults=False)
        found = lm_eval.simple_evaluate(
            model=model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options
        )
        return {
            task: [x["filtered_resps"] for x in sorted(samples, key=lambda x: x["doc_id"])]
            for task, samples in found["samples"].items()
        }

    return run


def numbers(answers):
    """Log-likelihoods, and which answers would be written greedily, of all tasks but one."""
    pairs = [pair for resps in answers["tape_choices"] for pair in resps]
    rolling = [x[0] if isinstance(x, list | tuple) else x for x in answers["tape_text"]]
    return [float(x) for x, _ in pairs] + list(map(float, np.ravel(rolling))), [y for _, y in pairs]


def test_answers_are_those_of_transformers(ask, llama):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    theirs = ask("hf", model_args=f"pretrained={llama},dtype=float32", device="cpu", batch_size=1)
    for size, mesh in ((4, ""), (1, ""), (4, ",data=4,tensor=2")):
        ours = ask("tape_jax", model_args=f"model={llama},chunk=8{mesh}", batch_size=size)
        np.testing.assert_allclose(*(numbers(x)[0] for x in (ours, theirs)), atol=1e-4)
        assert numbers(ours)[1] == numbers(theirs)[1]
        assert ours["tape_write"] == theirs["tape_write"]
        assert any(ours["tape_write"])


def test_the_cache_keeps_what_was_answered(ask, llama, tmp_path, monkeypatch):
    from train.evaluation.likelihoods import Scorer

    options = {"model_args": f"model={llama}", "use_cache": str(tmp_path / "answers")}
    first = ask("tape_jax", tasks=["tape_choices"], **options)
    monkeypatch.setattr(Scorer, "run", None)
    assert ask("tape_jax", tasks=["tape_choices"], **options) == first


def test_a_run(ask, tmp_path):
    task, model = {"name": "passkey", "sequence_length": 64}, {"num_layers": 1, "max_length": 96}
    small.saved(tmp_path, task, model=model, train={"batch_size": 2})
    answers = ask("tape_jax", model_args=f"run={tmp_path / 'run'},max_length=48", batch_size=8)
    assert {task: len(x) for task, x in answers.items()} == dict.fromkeys(NAMES, 6)
    assert all(np.isfinite(numbers(answers)[0]))
    with pytest.raises(ValueError, match="takes at most 96 tokens; got max_length=97"):
        TapeJax(run=str(tmp_path / "run"), max_length=97)


def test_a_context_of_white_space_without_a_start_token(llama):
    """The harness moves it into the continuation, as if there were no context."""
    model = TapeJax(model=str(llama), add_bos_token=False)
    pairs = [(" ", "fox jumps"), ("", " fox jumps")]
    (found, _), (wanted, _) = model.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])
    assert found == pytest.approx(wanted, abs=1e-4)


def test_what_cannot_be_answered(llama):
    model = TapeJax(model=str(llama))
    sampled = SimpleNamespace(args=("a", {"do_sample": True, "temperature": 1.0}))
    beams = SimpleNamespace(args=("a", {"num_beams": 4}))
    unset = SimpleNamespace(args=("a", {"do_sample": None, "top_p": None, "max_gen_toks": 1}))
    assert len(model.generate_until([unset])) == 1
    for wrong in (sampled, beams):
        with pytest.raises(NotImplementedError, match="answers greedily, and cannot sample, sear"):
            model.generate_until([wrong])
    with pytest.raises(ValueError, match="takes run=FOLDER or model=FOLDER; got run=None"):
        TapeJax()
    with pytest.raises(ValueError, match="leaves no room for a question in the 64"):
        model.generate_until([SimpleNamespace(args=("a", {"max_gen_toks": 64}))])
    with pytest.raises(ValueError, match="a continuation of 70 tokens is longer than the 64"):
        model._loglikelihood_tokens([(None, [1], [5] * 70)])


def test_the_command_line(llama, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    call = ["harness", "--model", "tape_jax", "--model_args", f"model={llama},data=-1"]
    call += ["--tasks", "tape_choices", "--include_path", str(TASKS), "--limit", "2"]
    monkeypatch.setattr(sys, "argv", call)
    assert harness.main() == 0
    assert "tape_choices" in capsys.readouterr().out
    assert os.environ["HF_HOME"] == str(tmp_path)
