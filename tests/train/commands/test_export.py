"""What has no place in a Llama folder is said in a line, with what can be done instead."""

import chex
import jax
import jax.numpy as jnp
import pytest

import tape_jax as tape
from tests.paths import ROOT
from tests.train.small import BYTES, trained
from train import experiment
from train.main import main
from train.training import runs

LLAMA = ROOT / "tests/golden/hf/llama3_gqa"


@pytest.mark.parametrize("adapter", [True, False])
def test_a_run_of_tape(tmp_path, capsys, adapter):
    small = {"hidden_size": 16, "num_heads": 2, "num_layers": 2}
    wanted = experiment.from_mapping(
        {
            "name": "test",
            "task": {"name": "addition", "max_digits": 2},
            "model": {} if adapter else small,
            "adapt": {"base": str(LLAMA), "method": "tape"} if adapter else None,
            "train": {"steps": 1, "batch_size": 4, "learning_rate": 0.01},
        }
    )
    runs.create(tmp_path / "run", wanted)
    file = tmp_path / "run" / "adapter.safetensors"
    if adapter:
        file.touch()
    assert main(["export", f"--run={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: a Llama folder has no place for the position encoding 'tape': ")
    assert len(said.splitlines()) == 1
    if adapter:
        assert f"generate --model={LLAMA} --adapter={file}" in said
    else:
        assert f"generate --run={tmp_path / 'run'}" in said
    assert not (tmp_path / "out").exists()


def test_a_run_of_tape_on_a_run(tmp_path, capsys):
    """An adapter goes on a Llama folder alone."""

    def make(name, **changes):
        values = {
            "name": "test",
            "task": {"name": "addition", "max_digits": 2},
            "model": {},
            "train": {"steps": 1, "batch_size": 4, "learning_rate": 0.01},
        }
        runs.create(tmp_path / name, experiment.from_mapping(values | changes))

    model = {"hidden_size": 16, "num_heads": 2, "num_layers": 2, "position": "rope"}
    make("base", model=model)
    make("run", adapt={"base": str(tmp_path / "base"), "method": "tape"})
    (tmp_path / "run" / "adapter.safetensors").touch()
    assert main(["export", f"--run={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"]) == 2
    said = capsys.readouterr().err
    assert f"generate --run={tmp_path / 'run'} --prompt" in said
    assert "--adapter" not in said


def test_a_run_in_16_bits(tmp_path, capsys, monkeypatch):
    run = trained("rope")
    run.experiment.task, run.experiment.adapt = BYTES, None
    monkeypatch.setattr(runs, "load", lambda path: run.experiment)
    monkeypatch.setattr(runs, "restore_model", lambda path: run)
    out = tmp_path / "out"
    assert main(["export", "--run=run", f"--out={out}", "--dtype=int7"]) == 2
    assert capsys.readouterr().err == "error: dtype must be a type of numbers; got 'int7'\n"
    assert not out.exists()
    assert main(["export", "--run=run", f"--out={out}", "--dtype=bfloat16"]) == 0
    _, variables = tape.from_pretrained(out)
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), run.variables)
    chex.assert_trees_all_equal(variables, rounded)
