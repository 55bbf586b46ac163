"""Training on top of a trained model: what trains, what stays, and what is refused."""

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.extend.core import jaxprs_in_params

import tape_jax as tape
from tape_jax import RopeScaling, adapt
from tape_jax.positions import Layers, options_of
from tests.models import random_variables, small_model
from tests.paths import GOLDEN
from tests.train.small import save_run
from train import experiment
from train.compare.jobs import METHODS, plan
from train.experiment import adaptation
from train.main import main
from train.training import loop, runs
from train.training import step as training_step

pytest.importorskip("safetensors")

CONTEXTUAL = GOLDEN / "hf" / "llama2_mha"
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 19, (2, 16)))


def values(base, method="tape", *, model=None, train=None, **section):
    return {
        "name": "test",
        "task": {"name": "addition", "max_digits": 4},
        "model": model or {},
        "adapt": {"base": str(base), "method": method, **section},
        "train": {
            **{"steps": 4, "batch_size": 4, "learning_rate": 0.01},
            **{"save_every": 2, "log_every": 1},
            **(train or {}),
        },
        "evaluation": {"longest": 3, "samples_per_pair": 1},
    }


def an_experiment(*args, **options):
    return experiment.from_mapping(values(*args, **options))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama folder in bfloat16, not to be changed."""
    model = small_model("rope", vocab_size=19, num_layers=2, dtype="bfloat16")
    variables = random_variables(model)
    path = tmp_path_factory.mktemp("llama") / "bfloat16"
    tape.save_pretrained(path, model, variables, dtype="bfloat16")
    return path


@pytest.fixture(scope="module")
def rope_run(tmp_path_factory):
    """A run with RoPE and two checkpoints, not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "rope"
    small = {"hidden_size": 16, "num_heads": 2, "num_layers": 2, "position": "rope"}
    wanted = experiment.from_mapping(values("unused") | {"adapt": None, "model": small})
    return save_run(folder, wanted, 0, 1)


@pytest.fixture
def compiled_once(monkeypatch):
    """Equal steps are compiled once."""
    make_step = training_step.make_step

    @functools.cache
    def make(model, config, *places):
        return make_step(model, training_step.make_optimizer(config), config, *places)

    monkeypatch.setattr(loop, "make_step", lambda model, _, *rest: make(model, *rest))


def state_of(folder, wanted, start):
    optimizer = training_step.make_optimizer(wanted.train)
    template = jax.eval_shape(
        lambda p: training_step.init_state(wanted, optimizer, p), start.params
    )
    with runs.checkpoints(folder) as checkpoints:
        return checkpoints.restore(template)


def flat(variables):
    """Parameters by path, without those that are None."""
    found = flatten_dict(variables["params"], sep="/")
    return {name: x for name, x in found.items() if x is not None}


def logits(model, variables):
    return np.asarray(jax.jit(model.apply)(variables, TOKENS), np.float32)


def load(path):
    """The base itself: model and variables."""
    if runs.read_record(path):
        trained = runs.restore_model(path)
        return trained.model, trained.variables
    return tape.from_pretrained(path)


@pytest.mark.parametrize(
    ("method", "model", "kind"),
    [
        ("lora", {}, "rope+window/rope"),
        ("tape", {"position": {"norm": "rms"}}, "tape+window/tape"),
        ("encoding", {"position": "rope+fox"}, "rope+fox+window/rope+fox"),
        ("tape", {"position": "tape"}, "tape+window/tape"),
        ("encoding", {"position": "rope+window/fox"}, "rope+window/fox"),
        ("tape", {"position": "tape+window/tape"}, "tape+window/tape"),
        ("drope", {}, "window/none"),
        ("theta", {}, "rope+window/rope"),
        ("full", {}, "rope+window/rope"),
    ],
)
def test_a_base_whose_layers_differ(tmp_path, method, model, kind):
    """The record of the run is read as what it was."""
    wanted = an_experiment(GOLDEN / "hf" / "gemma2_tiny", method, model=model)
    assert wanted.model.position.kind == kind
    runs.create(tmp_path / "run", wanted)
    assert runs.load(tmp_path / "run") == wanted


@pytest.mark.parametrize("beside", ["window", "alibi"])
def test_tape_beside_what_the_base_has(tmp_path, beside):
    small = {"hidden_size": 16, "num_heads": 2, "num_layers": 2, "position": f"rope+{beside}"}
    base = experiment.from_mapping(values("unused") | {"adapt": None, "model": small})
    runs.create(tmp_path / "base", base)
    wanted = an_experiment(tmp_path / "base", model={"position": {"kind": "tape", "norm": "rms"}})
    assert wanted.model.position.kind == f"tape+{beside}"
    assert wanted.model.position.members[0].norm == "rms"
    runs.create(tmp_path / "run", wanted)
    assert runs.load(tmp_path / "run") == wanted


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "tape"])
def test_training_on_a_base_whose_layers_differ(tmp_path, method):
    model = {"position": {"norm": "rms"}} if method == "tape" else {}
    base, folder = GOLDEN / "hf" / "gemma2_tiny", tmp_path / "run"
    wanted = an_experiment(base, method, model=model, train={"steps": 1})
    loop.train(wanted, folder)
    trained = runs.restore_model(folder)
    assert trained.model.config == wanted.model
    tapes = [x for x in wanted.model.position.members if isinstance(x, tape.positions.Tape)]
    assert {x.norm for x in tapes} == ({"rms"} if method == "tape" else set())
    exported = main(["export", f"--run={folder}", f"--out={tmp_path / 'new'}"])
    assert exported == (2 if method == "tape" else 0)
    if method == "lora":
        again, variables = tape.from_pretrained(tmp_path / "new")
        merged = adapt.merge_lora(trained.model, trained.variables)
        assert again.config.position == merged[0].config.position
        chex.assert_trees_all_close(variables, merged[1])


@pytest.mark.parametrize(
    ("method", "position", "message"),
    [
        (
            "tape",
            {"nrm": "rms"},
            "unknown field 'nrm' of the encoding 'tape' .did you mean 'norm'",
        ),
        (
            "tape",
            {"base": 3.0},
            r"position.base = 3.0 does not agree .*from which 10000.0 follow",
        ),
        (
            "tape",
            options_of(Layers(["rope", "none"])),
            r"does not agree .* the method 'tape', from which Layers",
        ),
        ("tape", "tape+window", r"kind = 'tape.window' does not agree"),
        ("lora", "rope", r"kind = 'rope' does not agree .*from which 'rope\+window/rope' follows"),
    ],
)
def test_what_does_not_follow_from_a_base_whose_layers_differ(method, position, message):
    with pytest.raises(ValueError, match=message):
        an_experiment(GOLDEN / "hf" / "gemma2_tiny", method, model={"position": position})


@pytest.mark.parametrize(
    ("base", "method"),
    [("run", "tape"), ("llama", "longlora"), ("llama", "encoding")],
)
@pytest.mark.slow
def test_from_training_to_adapter(llama, rope_run, tmp_path, compiled_once, base, method):
    path = {"llama": llama, "run": rope_run}[base]
    options = {"groups": 2, "targets": ["q"]} if method == "longlora" else {}
    model = {"position": "rope+fox"} if method == "encoding" else {}
    scaling = {"kind": "linear", "factor": 2.0}
    wanted = an_experiment(path, method, model=model, options=options, scaling=scaling)
    folder, notes = tmp_path / "run", []
    loop.train(wanted, folder, report=notes.append)
    assert notes[0].startswith(f"method {method}, which trains\nparameter ")
    assert "in all" in notes[0]

    # What does not train is bit for bit the base's; what trains is float32, and has moved.
    base_model, base = load(path)
    trained = runs.restore_model(folder)
    assert trained.step == 4
    assert trained.model == adapt.full_attention(trained.model)
    split = adapt.add_tape(base_model, base, key=jax.random.key(0))[1] if method == "tape" else base
    old, new = flat(split), flat(trained.variables)
    mask = flat({"params": adapt.trainable_mask(trained.model, wanted.adapt.trained)})
    for name, x in new.items():
        if mask[name]:
            assert x.dtype == jnp.float32
            assert name not in old or not np.array_equal(x, old[name]), name
        else:
            chex.assert_trees_all_equal_dtypes(x, old[name])
            chex.assert_trees_all_equal(x, old[name])
    assert all(mask.values()) == (method == "encoding")

    # The adapter makes the run's model out of the base.
    adapter = folder / runs.ADAPTER
    model, variables = adapt.load_adapter(adapter, base_model, base)
    np.testing.assert_array_equal(
        logits(adapt.full_attention(model), variables), logits(trained.model, trained.variables)
    )
    assert adapt.describe_adapter(adapter).startswith(f"method {method}, rules ")

    # Resuming is exact.
    start = runs.start(wanted)
    whole = state_of(folder, wanted, start)
    assert whole[0] == whole[1].step == 4
    assert flat({"params": whole[1].params}).keys() == {n for n in mask if mask[n]}
    shutil.rmtree(folder / "checkpoints" / "00000004")
    (folder / "checkpoints" / "00000004.sha256").unlink()
    adapter.unlink()
    loop.train(wanted, folder, resume=True, report=notes.append)
    assert f"continuing {folder} from step 2 of 4" in notes
    chex.assert_trees_all_equal(state_of(folder, wanted, start), whole)
    assert adapter.exists()


class TestOfARun:
    @pytest.fixture
    def own(self, rope_run, tmp_path):
        return Path(shutil.copytree(rope_run, tmp_path / "base"))

    @pytest.mark.slow
    def test_a_base_that_is_not_what_it_was(self, own, tmp_path):
        wanted = an_experiment(own, model={"position": {"norm": "rms"}})
        assert wanted.model.hidden_size == 16
        assert wanted.model.position == tape.positions.Tape(norm="rms")
        assert experiment.from_mapping(experiment.to_json(wanted)) == wanted
        wanted, folder = an_experiment(own, "scaled"), tmp_path / "adapted"
        loop.train(wanted, folder, report=lambda _: None)

        shutil.rmtree(own / "checkpoints" / "00000001")
        (own / "checkpoints" / "00000001.sha256").unlink()
        for call in (
            lambda: runs.restore_model(folder),
            lambda: loop.train(wanted, folder, resume=True),
        ):
            with pytest.raises(ValueError, match=r"is not what it was when the run was started"):
                call()
        shutil.rmtree(own)
        with pytest.raises(ValueError, match=rf"adapt.base: {own} is neither .* nothing there"):
            runs.restore_model(folder)

    @pytest.mark.slow
    def test_the_base_itself_and_scaled(self, rope_run, tmp_path, capsys):
        base = runs.restore_model(rope_run)
        scaling = RopeScaling("linear", 2.0)
        section = {"scaling": {"kind": "linear", "factor": 2.0}, "max_length": 40}
        for method, model in (
            ("base", base.model),
            ("scaled", adapt.with_scaling(base.model, scaling)),
        ):
            folder, wanted = tmp_path / method, an_experiment(rope_run, method, **section)
            assert (wanted.steps, wanted.model.max_length) == (0, 40)
            loop.train(wanted, folder, report=lambda _: None)
            found = runs.restore_model(folder)
            assert found.step == 0
            np.testing.assert_array_equal(
                logits(found.model, found.variables), logits(model, base.variables)
            )
            assert not (folder / runs.ADAPTER).exists()
            assert runs.count_parameters(wanted)[1] == 0

    @pytest.mark.slow
    def test_new_parameters_depend_on_the_seed(self, rope_run):
        wanted = [experiment.from_mapping(values(rope_run) | {"seed": n}) for n in (0, 0, 1)]
        first, same, other = (runs.start(e).params["layers_0"]["position_wx"] for e in wanted)
        np.testing.assert_array_equal(first, same)
        assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"base": "nowhere"}, "adapt.base: nowhere is neither a run nor .*nothing there"),
        ({"base": ""}, "adapt: base must name"),
        ({"method": "lorra"}, "unknown adapt method 'lorra'.*did you mean 'lora'"),
        ({"options": {"rank": 4}}, "rank is no option of the method 'tape'.*model.position"),
        ({"method": "lora", "options": {"rnk": 4}}, "unknown field 'rnk'.*did you mean 'rank'"),
        ({"rules": ["normz"]}, "unknown rule 'normz'.*did you mean 'norms'"),
        ({"rules": ["position", "lora"]}, "the rule 'lora' chooses none of"),
        ({"rules": ["norms"]}, r"not all that the method 'tape' adds: layers/position_down, "),
    ],
)
def test_wrong_sections(section, message):
    with pytest.raises(ValueError, match=message):
        an_experiment(**{"base": CONTEXTUAL, **section})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hidden_size": 32}, r"model.hidden_size = 32 .*llama2_mha and .* 64 follows"),
        ({"num_kv_heads": 2}, r"model.num_kv_heads = 2 .* from which 4 follows"),
        ({"lora": {"rank": 4}}, r"model.lora.rank = 4 .* the method 'tape'"),
        ({"position": "rope"}, r"model.position.kind = 'rope' .* 'tape' follows"),
        ({"position": {"norn": "rms"}}, "unknown field 'norn' of the encoding 'tape'"),
    ],
)
def test_a_model_that_does_not_agree(model, message):
    with pytest.raises(ValueError, match=message):
        an_experiment(CONTEXTUAL, model=model)


def test_what_agrees_or_says_how_to_compute_may_be_stated():
    model = {"hidden_size": 64, "num_kv_heads": None, "dtype": "bfloat16", "remat": "full"}
    found = an_experiment(CONTEXTUAL, "theta", model=model, options={"base": 1e5}).model
    assert (found.dtype, found.remat, found.param_dtype) == ("bfloat16", "full", "float32")
    assert found.position.base == 1e5
    assert found.lora is not None
    with pytest.raises(ValueError, match=r"adapt.base = .* and train.initial = 'runs/x'"):
        an_experiment(CONTEXTUAL, train={"initial": "runs/x"})
    with pytest.raises(ValueError, match="vocab_size = 160 is too small for the task"):
        experiment.from_mapping(
            values(CONTEXTUAL) | {"task": {"name": "passkey"}, "evaluation": {}}
        )


def test_any_encoding_in_place_of_the_bases(config, tmp_path):
    options = ["--config.adapt.method=encoding", "--config.model.position.kind=rope+fox"]
    notes = []
    wanted = experiment.from_file(config, options, report=notes.append)
    rope, fox = wanted.model.position.encodings
    assert (rope.scaling, fox.kind) == (RopeScaling("linear", 2.0), "fox")
    assert wanted.label == "rope+fox"
    assert experiment.from_mapping(experiment.to_json(wanted)) == wanted
    assert notes == [
        f"set in {config} for the method 'tape' and not carried over to 'encoding': norm",
        "encoding: rope -> rope+fox",
        "scaling: none -> linear x 2",
    ]
    model = {"position": {"kind": "fox", "bias": 2.0}}
    other = an_experiment(CONTEXTUAL, "encoding", model=model)
    assert (other.model.position.bias, other.adapt.trained) == (2.0, (adapt.Everything(),))
    with pytest.raises(ValueError, match=r"needs model.position.kind"):
        an_experiment(CONTEXTUAL, "encoding")
    with pytest.raises(ValueError, match=r"frequencies that the model had: 'fox', put in its"):
        experiment.from_file(config, [*options, "--config.model.position.kind=fox"])


@pytest.mark.slow
def test_rules_take_the_place_of_the_methods():
    wanted = an_experiment(CONTEXTUAL, "lora", rules=["lora", "path:layers_*/mlp_norm/scale"])
    assert runs.count_parameters(wanted)[1] == 3 * (64 + 4 * 2 * 8 * 64)
    trained = an_experiment(CONTEXTUAL, "lora", norms=False).adapt.trained
    assert trained == (adapt.LoraFactors(), adapt.Embeddings())


CONFIG = f"""
from ml_collections import ConfigDict

def get_config():
    return ConfigDict({{
        "task": {{"name": "addition", "max_digits": 4}},
        "adapt": {{"base": {str(CONTEXTUAL)!r}, "scaling": {{"kind": "linear", "factor": 2.0}}}},
        "model": {{"position": {{"norm": "rms"}}}},
        "train": {{"steps": 2, "batch_size": 4, "learning_rate": 1e-3}},
        "evaluation": {{"longest": 3, "samples_per_pair": 2}},
    }})
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return path


@pytest.mark.slow
def test_methods_on_the_command_line(config, tmp_path):
    notes = []
    given = ["--config.adapt.method=lora", "--config.adapt.options.rank=2"]
    lora = experiment.from_file(config, given, report=notes.append)
    assert (lora.model.lora.rank, lora.adapt.options.rank) == (2, 2)
    assert lora.adapt.scaling == RopeScaling("linear", 2.0)
    assert f"set in {config} for the method 'tape' and not carried over to 'lora': norm" in notes
    given = ["--config.adapt.scaling.factor=4", "--config.adapt.rules=('position','norms')"]
    other = experiment.from_file(config, given).adapt
    assert (other.scaling.factor, other.trained) == (4, (adapt.Position(), adapt.Norms()))

    names = [name for name in adaptation.METHODS if name != "encoding"]
    jobs = plan(config, tmp_path / "all", METHODS, names, 1, [])
    assert [job.experiment.adapt.method for job in jobs] == names
    assert [job.experiment.model.position.kind for job in jobs].count("tape") == 1


PLANS = """
import sys
from pathlib import Path
from jax._src import xla_bridge
from train.compare.jobs import METHODS, plan
config, folder, *names = sys.argv[1:]
print(len(plan(Path(config), Path(folder), METHODS, names, 1, [])))
print(xla_bridge.backends_are_initialized())
"""


@pytest.mark.slow
def test_a_plan_takes_no_device(config, tmp_path):
    """A TPU serves one process: were it this one, no training could begin."""
    names = [name for name in adaptation.METHODS if name != "encoding"]
    names += ["rope+alibi", "rope+inkling"]
    call = [sys.executable, "-c", PLANS, str(config), str(tmp_path / "all"), *names]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == [str(len(names)), "False"]


def test_drope_trains_at_the_length_of_its_base(tmp_path):
    small = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "position": "rope"}
    text = {"name": "text", "sequence_length": 32}
    base = values("unused") | {"adapt": None, "model": small, "task": text, "evaluation": {}}
    runs.create(tmp_path / "base", experiment.from_mapping(base))
    scaling = {"kind": "linear", "factor": 4.0}
    longer = {"task": {"name": "text", "sequence_length": 128}, "evaluation": {}}
    found = {
        method: experiment.from_mapping(values(tmp_path / "base", method, scaling=scaling) | longer)
        for method in ("drope", "lora")
    }
    assert found["drope"].batch_shape == (16, 32)
    assert found["drope"].model.position.kind == "none"
    assert found["drope"].task.sequence_length == 128
    assert found["lora"].batch_shape == (4, 128)
    again = experiment.from_mapping(experiment.to_json(found["drope"]))
    assert again == found["drope"]
    assert experiment.records.base_length(str(CONTEXTUAL)) == 128
    # A config may leave the task's own length out.
    usual = experiment.from_mapping(
        values(tmp_path / "base", "drope") | {"task": {"name": "text"}, "evaluation": {}}
    )
    assert usual.task.sequence_length == 1024
    assert usual.batch_shape == (4 * 32, 32)


@pytest.mark.slow
def test_compare_methods_and_export(config, tmp_path, capsys):
    folder = tmp_path / "methods"
    call = ["compare", f"--config={config}", f"--run={folder}", "--methods=base,lora", "--jobs=1"]
    assert main(call) == 0
    record = json.loads((folder / "report.json").read_text())
    assert [(r["name"], r["seed"]) for r in record["runs"]] == [("base", 0), ("lora", 0)]
    assert record["runs"][0]["facts"]["of these trained"] == "0 (0.00%)"
    assert all(r["scores"] for r in record["runs"])
    assert main(["export", f"--run={folder / 'lora'}", f"--out={tmp_path / 'merged'}"]) == 0
    trained = runs.restore_model(folder / "lora")
    model, variables = tape.from_pretrained(tmp_path / "merged")
    assert model.config.lora is None
    np.testing.assert_allclose(
        logits(model, variables), logits(trained.model, trained.variables), atol=1e-5
    )


def shapes_made(jaxpr):
    """Shapes of everything that is computed, inside of loops and calls as well."""
    found = set()
    for eqn in jaxpr.eqns:
        found |= {x.aval.shape for x in eqn.outvars if hasattr(x.aval, "shape")}
        for inner in jaxprs_in_params(eqn.params):
            found |= shapes_made(inner)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tape", "lora", "full"])
def test_nothing_is_made_for_frozen_parameters(method):
    """Neither gradient nor moments: no array of such a shape is among what a step computes."""
    wanted = an_experiment(CONTEXTUAL, method, norms=False, embeddings=False)
    start = runs.start(wanted)
    optimizer = training_step.make_optimizer(wanted.train)
    state = jax.eval_shape(lambda p: training_step.init_state(wanted, optimizer, p), start.params)
    batch = next(iter(wanted.task.dataset(0, 4)))
    step = training_step.make_step(tape.Transformer(wanted.model), optimizer, wanted.train)
    made = shapes_made(jax.make_jaxpr(step.__wrapped__)(state, batch, start.frozen).jaxpr)
    made |= {x.shape for x in jax.tree.leaves((state.params, state.opt_state))}
    # The last layer of TAPE is a run of its own.
    kernels = {(layers, 64, 112) for layers in (1, 2, 3)}
    assert bool(made & kernels) == (method == "full")
    bases = sum(x.size for x in jax.tree.leaves(tape.from_pretrained(CONTEXTUAL)[1]))
    moments = sum(x.size for x in jax.tree.leaves(state.opt_state))
    trainable = sum(x.size for x in jax.tree.leaves(state.params))
    assert moments - 2 * trainable in (1, 2)  # the counts of steps
    assert (trainable == bases) == (method == "full")
