"""Generation from the command line: it says what greedy generation says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tape_jax as tape
from tests.models import random_variables, small_model
from tests.paths import ROOT
from tests.train import small
from tests.train.tokenizer_files import hugging_face, sentencepiece_model
from train import experiment
from train.data import tokenizers
from train.main import main
from train.training import generation, runs

HF = f"--model={ROOT}/tests/golden/hf/llama3_gqa"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    task = {"name": "addition", "max_digits": 2}
    return small.saved(tmp_path_factory.mktemp("generate"), task, step=3, train={"steps": 3})


@pytest.mark.slow
def test_prompts_are_continued_greedily_to_a_stop_or_drawn(run, capsys):
    trained = runs.restore_model(run)
    task = trained.experiment.task
    prompt = task.encode("12+30")
    expected = np.asarray(tape.generate(trained.model, trained.variables, [prompt], 40))
    assert main(["generate", f"--run={run}", "--prompt=12+30", "--new=40"]) == 0
    text, note = capsys.readouterr().out.strip().split("\n")
    assert text == "12+30" + task.decode(expected[0, len(prompt) :])
    assert "[step 3 of 3; cache: keys, values and position states of 47 tokens in float32" in note

    call = ["generate", f"--run={run}", "--prompt=1+2", "--prompt=12+30", "--new=6"]
    assert main(call) == 0
    first = capsys.readouterr().out
    assert "--- 1+2\n" in first
    assert "--- 12+30\n" in first
    assert main([*call, f"--stop={first.splitlines()[1][0]}"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == ""

    def drawn(seed):
        call = ["generate", f"--run={run}", "--prompt=1+2", "--new=20", "--temperature=2"]
        assert main([*call, f"--seed={seed}", "--top-k=9"]) == 0
        return capsys.readouterr().out.rpartition("[step")[0]

    assert drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("parts", "stops", "printed"),
    [
        (["9\nU", "9\nUser: 1"], ["\nUser:"], "9"),
        (["9\nU", "9\nUp"], ["\nUser:"], "9\nUp"),
        (["9\nU"], ["\nUser:"], "9\nU"),
        (["9 ab", "9 abab", "9 ababc"], ["abc", "bb"], "9 ab"),
        (["9\n", "9\n\nUser:"], ["\nUser:"], "9\n"),
        (["9\ufffd", "9\u00e9"], ["x"], "9\u00e9"),
        (["9\nU", "9\nUp"], [], "9\nUp"),
    ],
)
def test_no_part_of_a_stop_is_printed(monkeypatch, capsys, parts, stops, printed):
    """Several tokens come at a time, and what is printed stays."""
    texts = dict(enumerate(parts))
    speaker = generation.Speaker(None, None, lambda text: [], lambda ids: "", ())
    monkeypatch.setattr(generation, "load", lambda *_: speaker)
    monkeypatch.setattr(generation.Speaker, "continuation", lambda self, _, row: texts[row])
    monkeypatch.setattr(generation, "stream", lambda *_, **__: (([i], object()) for i in texts))
    monkeypatch.setattr(generation, "describe_cache", lambda _: "cache")
    call = ["generate", "--model=x", "--prompt=4+5=", *(f"--stop={stop}" for stop in stops)]
    assert main(call) == 0
    text, note = capsys.readouterr().out.rsplit("\n[", 1)
    assert text == f"4+5={printed}"
    assert note.startswith("cache")


@pytest.mark.parametrize("length", [1, 4])
def test_a_prompt_costs_one_cache_and_no_logits(monkeypatch, length):
    """The logits of a prompt that nobody reads may take more memory than its model."""
    made = []

    def prefill(model, variables, tokens, lengths, *, capacity):
        return object(), jnp.full(2, capacity)  # jax.jit would not return the first.

    def init_cache(model, batch, capacity):
        made.append((batch, capacity))
        return jnp.full(2, capacity)

    def decode(model, variables, cache, token, count, **_):
        return jnp.zeros((1, count), jnp.int32), cache

    for function in (prefill, init_cache, decode):
        monkeypatch.setattr(generation, function.__name__, function)
    model = small_model("rope", vocab_size=258)
    speaker = generation.Speaker(model, {}, lambda text: [], lambda ids: "", ())
    ((rows, cache),) = generation.stream(speaker, [np.arange(length)], 3)
    assert rows == [[0, 0, 0]]
    assert cache.tolist() == [length + 3] * 2
    assert made == ([(1, 4)] if length == 1 else [])


@pytest.mark.parametrize("make", [hugging_face, sentencepiece_model])
def test_the_space_behind_a_prompt(tmp_path, make):
    kind = "json" if make is hugging_face else "model"
    codec = tokenizers.load(str(make(tmp_path / f"tokenizer.{kind}")))
    speaker = generation.Speaker(None, None, codec.encode, codec.decode, (), codec)
    whole, before = (codec.encode(text) for text in ("one two three", "one two"))
    assert list(whole[: len(before)]) == list(before)
    new = [int(i) for i in whole[len(before) :]]
    assert speaker.continuation(np.asarray(before), new) == " three"
    assert speaker.continuation(np.asarray(before), []) == ""


@pytest.fixture
def folder(tmp_path):
    """A Llama folder with a tokenizer."""
    model = small_model("rope", vocab_size=300)
    tape.save_pretrained(tmp_path / "llama", model, random_variables(model))
    hugging_face(tmp_path / "llama" / "tokenizer.json")
    return tmp_path / "llama"


def test_a_folder_starts_and_ends_a_text_as_it_says(folder):
    speaker = generation.load(folder)
    first, *rest = speaker.encode("fox")
    assert (first, speaker.ends) == (0, (1,))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": false, "eos_token": "</s>"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    alone = generation.load(folder)
    assert (list(alone.encode("fox")), alone.ends) == (rest, (1, 7))
    (folder / "generation_config.json").write_text('{"eos_token_id": 300}')
    assert generation.load(folder).ends == (1,)
    for wrong in ("[[1]]", "true", '"</s>"'):
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(ValueError, match=r"must be one or several integers; got \["):
            generation.load(folder)


def test_every_end_ends_an_answer(monkeypatch):
    monkeypatch.setattr(generation, "init_cache", lambda *_: jnp.zeros(1))
    tokens = jnp.array([[4, 7, 7], [5, 6, 1]], jnp.int32)
    monkeypatch.setattr(generation, "decode", lambda m, v, cache, *_, **__: (tokens, cache))
    model = small_model("rope", vocab_size=9)
    speaker = generation.Speaker(model, {}, lambda text: [], lambda ids: "", (1, 7))
    ((rows, _),) = generation.stream(speaker, [np.array([2])] * 2, 3)
    assert rows == [[4], [5, 6]]


@pytest.mark.slow
def test_several_calls_give_what_one_gives(run, monkeypatch):
    monkeypatch.setattr(generation, "TOKENS_AT_ONCE", 5)
    speaker = generation.load(run)
    prompts = [speaker.encode("1+2"), speaker.encode("31+45")]
    *_, (rows, cache) = generation.stream(speaker, prompts, 60)
    longest = max(map(len, prompts))
    whole = np.asarray(tape.generate(speaker.model, speaker.variables, prompts, 60))
    np.testing.assert_array_equal(rows, whole[:, longest:])
    assert cache.capacity == longest + 60


@pytest.mark.slow
def test_an_adapter_on_a_folder(tmp_path, capsys):
    folder, adapter = tmp_path / "llama", tmp_path / "tape.safetensors"
    model = small_model("rope", vocab_size=258)
    tape.save_pretrained(folder, model, random_variables(model))
    adapted = tape.adapt.adapt(*tape.from_pretrained(folder), "tape", key=jax.random.key(0))
    tape.adapt.save_adapter(
        adapter, adapted.model, adapted.variables, adapted.rules, base=adapted.base
    )
    call = ["generate", f"--model={folder}", "--tokenizer=bytes", "--prompt=ab", "--new=9"]
    assert main(call) == 0
    plain, note = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert "cache: keys and values of 11 tokens" in note
    assert main([*call, f"--adapter={adapter}"]) == 0
    adapted_text, note = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert "position states" in note
    assert adapted_text == plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt="], "a --prompt is empty"),
        (["--prompt=1+2", "--stop="], "a --stop is empty"),
        (["--prompt=1+2", "--new=0"], "--new must be at least 1"),
        (["--prompt=1+2", "--seed=4294967296"], "--seed must be from 0 to 2**32 - 1"),
        (["--prompt=1+2", "--top-k=3"], "need a positive --temperature"),
        (["--prompt=1+2", "--temperature=-1"], "--temperature must not be negative; got -1"),
        (["--prompt=1+2", "--adapter=x"], "go with a Llama folder"),
        (["--prompt=one"], "is not in the"),
        (["--prompt=1\udcff"], r"the --prompt '1\udcff' is not UTF-8"),
        ([HF, "--tokenizer=bytes", "--prompt=ab"], "'bytes' has 258 tokens, the model 192"),
    ],
)
def test_bad_arguments(run, capsys, arguments, message):
    model = [] if HF in arguments else [f"--run={run}"]
    assert main(["generate", *model, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_run_of_text_takes_no_questions_and_is_pointed_to_generate(tmp_path, capsys):
    runs.create(tmp_path / "run", experiment.from_file(ROOT / "configs/bytes_demo.py"))
    assert main(["ask", f"--run={tmp_path / 'run'}", "def main("]) == 2
    said = capsys.readouterr().err
    assert f"generate --run={tmp_path / 'run'} --prompt 'def main('" in said
