"""The examples run, learn what they claim to, and change as few lines as they claim to."""

import importlib
import re
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tape_jax as tape
from tape_jax import testing
from tests.paths import ROOT

FOLDER = ROOT / "examples"
MODELS = ("plain_jax", "flax_linen", "flax_nnx", "qwen3_nnx", "equinox_module")
CLASSIFIERS = {"vision": 300, "audio": 100}


def run(name, steps, capsys):
    result = importlib.import_module(f"examples.{name}").main(steps=steps)
    assert f"in {steps} steps" in capsys.readouterr().out
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_learn_to_repeat(name, capsys):
    """Without attention to the right place no loss below log 16 = 2.77 nats is possible."""
    losses = run(name, 40, capsys)
    assert losses[0] > 2.7
    assert losses[-1] < 1.5


@pytest.mark.parametrize("name", MODELS)
def test_at_most_ten_lines_differ_from_rope(name):
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert 0 < sum(line.endswith("# TAPE") for line in lines) <= 10
    assert any("# With RoPE: q, k = tape.rotate" in line for line in lines)
    updates = [
        line for line in lines if re.search(r"tape\.(nnx\.)?(update_state|UpdateState)\(", line)
    ]
    assert updates
    assert all(line.endswith("# TAPE") for line in updates)


@pytest.mark.slow
def test_the_linen_decoder_sees_no_future():
    """By value and by gradient. Each token occurs once, so a row of the table is one place."""
    decoder = importlib.import_module("examples.flax_linen").Decoder()
    tokens = jnp.arange(16)[None]
    params = testing.random_params(None, jax.jit(decoder.init)(jax.random.key(0), tokens)["params"])

    def logits(table):
        embedding = {"embedding": {"embedding": table}}
        return decoder.apply({"params": params | embedding}, tokens)

    table = params["embedding"]["embedding"]
    testing.assert_causal(logits, table, in_axes=0, out_axes=1)


@pytest.mark.slow
def test_the_qwen3_decoder_writes_with_its_cache_what_it_writes_without():
    example = importlib.import_module("examples.qwen3_nnx")
    model = example.Decoder(nnx.Rngs(0))
    nnx.update(model, testing.random_params(None, nnx.state(model, nnx.Param)))
    prompt = whole = jnp.arange(16).reshape(2, 8)
    for _ in range(4):
        whole = jnp.concatenate([whole, model(whole)[0][:, -1:].argmax(-1)], axis=-1)
    assert (example.write(model, prompt, 4) == whole[:, -4:]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), CLASSIFIERS.items())
def test_classifiers_learn_the_relation(name, steps, capsys):
    """The last bit of rounding decides whether a single training ends at 87 % or at 100 %."""
    before, after = run(name, steps, capsys)
    assert before < 0.7
    assert after > 0.8


def train(folder, *options):
    """The losses of four steps of ``train.py`` on the mesh of the options."""
    small = ["--steps=4", "--save-every=2", "--batch=8", "--length=32", "--width=32", "--layers=2"]
    program = importlib.import_module("examples.train")
    return program.main([f"--text={ROOT}/tape_jax/*.py", f"--out={folder}", *small, *options])


@pytest.mark.slow
def test_train_is_the_same_on_a_mesh_and_goes_on(tmp_path, capsys):
    """On eight devices as on one, and stopped halfway as undisturbed."""
    whole = train(tmp_path / "mesh", "--data=2", "--fsdp=2", "--tensor=2")
    assert whole[0] == pytest.approx(np.log(256), abs=0.5)
    assert whole[3] < whole[0] - 0.1
    other = train(tmp_path / "other", "--fsdp=8")
    np.testing.assert_allclose(other, whole, atol=1e-4)
    shutil.rmtree(tmp_path / "mesh" / "4")
    again = train(tmp_path / "mesh", "--data=2", "--fsdp=2", "--tensor=2")
    assert again == whole[2:]
    assert "bits per byte" in capsys.readouterr().out
    with pytest.raises(ValueError, match="'nothing' has 0 bytes; at least 2560 are needed"):
        train(tmp_path / "none", "--text=nothing")


def test_train_is_one_file_of_public_names():
    text = (FOLDER / "train.py").read_text()
    assert len(text.splitlines()) <= 150
    assert not re.search(r"_src|(import|from) (examples|train)\b", text)


def test_all_are_listed_and_tested():
    programs = {p.stem for p in FOLDER.glob("*.py") if "__main__" in p.read_text()}
    assert programs == {*MODELS, *CLASSIFIERS, "ray_train", "train"}
    text = (FOLDER / "README.md").read_text()
    assert all(f"`{name}.py`" in text for name in programs)


def test_ray_train_hands_on_what_it_does_not_know(monkeypatch):
    """With a stand-in for Ray, which is not installed here."""
    seen = {}

    class JaxTrainer:
        def __init__(self, work, **options):
            seen.update(options, work=work)

        def fit(self):
            seen["work"](seen["train_loop_config"])

    ray_train = types.SimpleNamespace(FailureConfig=dict, RunConfig=dict, ScalingConfig=dict)
    for name, module in {
        "ray": types.SimpleNamespace(train=ray_train),
        "ray.train": ray_train,
        "ray.train.v2": types.SimpleNamespace(),
        "ray.train.v2.jax": types.SimpleNamespace(JaxTrainer=JaxTrainer),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    program = importlib.import_module("examples.ray_train")
    given = ["--topology=4x4", "--accelerator=TPU-V6E", "--hosts=4", "train", "--run=nowhere"]
    monkeypatch.setattr(sys, "argv", ["ray_train", *given])
    with pytest.raises(RuntimeError, match="exit code 2"):
        program.main()
    assert seen["scaling_config"] == {
        "use_tpu": True, "num_workers": 4, "topology": "4x4", "accelerator_type": "TPU-V6E",
    }  # fmt: skip
    assert seen["train_loop_config"] == {"arguments": ["train", "--run=nowhere"]}


def test_the_model_to_try_reads_python():
    """The file holds the trained model: without training a byte would take 5.5 nats."""
    model, variables = tape.from_pretrained(ROOT / "examples" / "byte_llama", dtype="float32")
    code = (ROOT / "examples" / "train.py").read_bytes()[: 512 * 8]
    tokens = np.frombuffer(code, np.uint8).astype(np.int32).reshape(8, 512)
    logits = model.apply(variables, tokens)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    assert 0.5 < losses.mean() < 1.3
