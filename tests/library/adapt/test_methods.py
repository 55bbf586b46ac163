"""What is put into a model: nothing changes before training, and everything has its place."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tape_jax as tape
from tape_jax import RopeScaling, adapt, positions
from tape_jax._src.model.config import Lora
from tests.models import random_tokens, random_variables, small_model, without
from tests.paths import GOLDEN

HF = GOLDEN / "hf"
KEY = jax.random.key(7)
TOKENS = random_tokens(2, 9)
YARN = RopeScaling("yarn", factor=2.0, original_length=16)
LEARNED = positions.Rope(learn_base=True)
MODEL = small_model("rope")
VARIABLES = random_variables(MODEL)


def logits(model, variables, tokens=TOKENS, **options):
    return jax.jit(lambda v: model.apply(v, tokens, **options))(variables)


def difference(actual, expected):
    """The largest difference, relative to the largest expected value."""
    return float(jnp.abs(actual - expected).max() / jnp.abs(expected).max())


def wanted(model):
    """Shapes and types of the parameters that the model itself would make, by path."""
    axes = model.encoding.coordinate_axes
    places = None if axes == 1 else jnp.zeros((1, 2, axes))
    made = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32), positions=places)
    )
    return described(made)


def described(variables):
    flat = flatten_dict(variables["params"], sep="/")
    return {name: (x.shape, x.dtype) for name, x in flat.items()}


def is_shared(new, old):
    """Whether every parameter of ``old`` that kept its shape is the same array in ``new``."""
    new = flatten_dict(new["params"], sep="/")
    return [
        name
        for name, x in flatten_dict(old["params"], sep="/").items()
        if name in new and new[name].shape == x.shape and new[name] is not x
    ] == []


class TestTape:
    @pytest.mark.mostly_slow
    @pytest.mark.parametrize(
        ("rope", "options", "model"),
        [
            (positions.Rope(base=500.0, scaling=RopeScaling("linear", 2.0)), {"norm": "rms"}, {}),
            (
                positions.Yarn(scaling=YARN),
                {"form": "tensor", "attention_mix": "heads", "learn_alpha": True},
                {"num_kv_heads": 1, "scan_layers": False},
            ),
            (positions.Rope(axes=2), {"layers": (1, 2), "norm": "unit"}, {"num_layers": 4}),
        ],
    )
    def test_the_logits_stay(self, rope, options, model):
        old = small_model(rope, **model)
        variables = random_variables(old)
        new, adapted = tape.add_tape(old, variables, key=KEY, **options)
        places = jnp.stack([jnp.arange(9)] * rope.axes, -1) if rope.axes > 1 else None
        expected = logits(old, variables, positions=places)
        assert difference(logits(new, adapted, positions=places), expected) < 1e-6
        assert new.encoding == positions.Tape(
            base=rope.base, scaling=rope.scaling, axes=rope.axes, **options
        )
        assert described(adapted) == wanted(new)
        assert is_shared(adapted, variables)

    def test_initial_values(self):
        old = small_model("rope", hidden_size=64, num_layers=4)
        _, adapted = tape.add_tape(old, random_variables(old), key=KEY)
        block = adapted["params"]["layers_0"]
        assert not block["position_mix"].any()
        assert not block["position_up"].any()
        np.testing.assert_allclose(block["position_wx"].std(), 64**-0.5, rtol=0.1)
        np.testing.assert_allclose(block["position_down"].std(), 8**-0.5, rtol=0.3)
        for first, second in ((0, 1), (1, 2)):  # every layer has its own draw
            assert (block["position_wx"][first] != block["position_wx"][second]).all()

    def test_shapes_types_and_shardings_alone(self):
        """As for a model too large to be made: nothing is computed."""
        mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
        split = NamedSharding(mesh, PartitionSpec(None, None, "model"))
        old = small_model("rope", dtype="bfloat16", param_dtype="bfloat16")

        def shape(x):
            sharding = split if len(x.shape) == 3 else None
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        made = jax.eval_shape(old.init, jax.random.key(0), TOKENS)
        new, adapted = tape.add_tape(old, jax.tree.map(shape, made), key=KEY, dtype="float32")
        assert {name: x[0] for name, x in described(adapted).items()} == {
            name: x[0] for name, x in wanted(new).items()
        }
        for name, x in flatten_dict(adapted["params"], sep="/").items():
            assert isinstance(x, jax.ShapeDtypeStruct)
            assert x.dtype == ("float32" if "position" in name else "bfloat16")
            assert x.sharding == (split if name.endswith("kernel") and "head" not in name else None)


class TestLora:
    @pytest.mark.mostly_slow
    @pytest.mark.parametrize("scan_layers", [True, False])
    def test_at_first_nothing_changes(self, scan_layers):
        old = small_model("rope", scan_layers=scan_layers, num_layers=1)
        variables = random_variables(old)
        new, adapted = adapt.add_lora(old, variables, key=KEY, rank=3, targets=["q", "down"])
        assert new.config.lora == Lora(3, 16.0, ("q", "down"))
        assert described(adapted) == wanted(new)
        assert is_shared(adapted, variables)
        assert difference(logits(new, adapted), logits(old, variables)) == 0
        factors = {n: x for n, x in flatten_dict(adapted["params"], sep="/").items() if "lora" in n}
        assert all(bool(x.any()) == n.endswith("a") for n, x in factors.items())

    @pytest.mark.slow
    def test_merged_it_is_a_plain_model(self):
        old = small_model("rope", num_kv_heads=1)
        new = dataclasses.replace(old.config, lora=Lora(2, 3.0, ("q", "k", "v", "out", "gate")))
        new = tape.Transformer(new)
        variables = random_variables(new)
        merged, plain = adapt.merge_lora(new, variables)
        assert merged == old
        assert described(plain) == wanted(old)
        assert difference(logits(merged, plain), logits(new, variables)) < 1e-5
        assert difference(logits(merged, plain), logits(old, without(variables, "lora_"))) > 0.01

    def test_merging_rounds_once(self):
        new = small_model("rope", lora=Lora(2, 3.0, ("k",)), param_dtype="bfloat16")
        variables = random_variables(new)
        _, plain = adapt.merge_lora(new, variables)
        old = variables["params"]["layers_0"]["attention"]["k"]
        kernel, a, b = (np.asarray(old[n], np.float64) for n in ("kernel", "lora_a", "lora_b"))
        merged = plain["params"]["layers_0"]["attention"]["k"]["kernel"]
        chex.assert_type(merged, jnp.bfloat16)
        np.testing.assert_allclose(np.asarray(merged, np.float64), kernel + 1.5 * a @ b, rtol=2**-8)


class TestRotation:
    def test_theta(self):
        old = small_model(positions.Rope(scaling=RopeScaling("linear", 2.0)))
        variables = random_variables(old)
        new, same = adapt.scale_theta(old, variables, 1e6)
        assert same is variables
        assert new.encoding == positions.Rope(base=1e6, scaling=RopeScaling("linear", 2.0))
        again, _ = adapt.scale_theta(small_model("tape"), variables, 1e6)
        assert again.encoding == positions.Tape(base=1e6)

    def test_scaling_is_that_of_positions(self):
        old = small_model("rope", max_length=16)
        variables = random_variables(old)
        new = adapt.with_scaling(old, RopeScaling("linear", 2.0), max_length=32)
        assert new.config.max_length == 32
        expected = logits(old, variables)
        assert difference(logits(new, variables, positions=2 * jnp.arange(9)), expected) < 1e-6
        assert difference(logits(new, variables), expected) > 0.01
        assert adapt.with_scaling(old, RopeScaling("linear", 2.0)).config.max_length == 16

    def test_yarn_becomes_rope_with_that_scaling(self):
        for old in (positions.Yarn(base=100.0, scaling=YARN), positions.LongRope(base=100.0)):
            new = adapt.with_scaling(small_model(old), RopeScaling("ntk", 2.0))
            assert new.encoding == positions.Rope(base=100.0, scaling=RopeScaling("ntk", 2.0))

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (("rope+window", "rope"), [1e4, 1e6]),
            (("rope+window", "rope+window+alibi"), [1e6, 1e6]),
            # They share a state that they update, or its base.
            (("tape+window", "tape"), [1e6, 1e6]),
            (({"kind": "rope+window", "learn_base": True}, LEARNED), [1e6, 1e6]),
            # Others stay what they are, and keep what they have learned.
            (("rope+window", "rope", positions.Fope(learn=True)), [1e4, 1e6, 1e4]),
        ],
    )
    def test_layers_of_a_schedule(self, old, new):
        model = small_model(positions.Layers(old), num_layers=5)
        variables = random_variables(model)
        for changed in (
            adapt.scale_theta(model, variables, 1e6)[0],
            adapt.with_scaling(model, RopeScaling("linear", 2.0)),
        ):
            assert described(variables) == wanted(changed)
            layers = changed.encoding.of_layers(5)
            assert [x.updates for x in layers] == [x.updates for x in model.encoding.of_layers(5)]
            logits(changed, variables)
        members = [x.members[0] for x in adapt.scale_theta(model, variables)[0].encoding.encodings]
        assert [x.base for x in members] == new

    def test_a_schedule_that_would_lose_parameters(self):
        model = small_model(positions.Layers([LEARNED, positions.Rope(base=1e6, learn_base=True)]))
        with pytest.raises(ValueError, match="parameters of 'rope/rope' would be others as 'rope'"):
            adapt.scale_theta(model, random_variables(model), 1e6)


class TestAdapt:
    @pytest.mark.parametrize(
        ("method", "options", "rules", "changes"),
        [
            ("tape", {"norm": "rms"}, "position", {"position": positions.Tape(norm="rms")}),
            ("longlora", {"rank": 2}, "lora", {"lora": Lora(2), "shifted_groups": 4}),
            ("theta", {"base": 5e5}, "lora", {"lora": Lora(), "position": positions.Rope(5e5)}),
            ("full", {}, "all", {}),
            ("drope", {}, "all", {"position": positions.create("none")}),
        ],
    )
    def test_methods(self, method, options, rules, changes):
        made = adapt.adapt(MODEL, VARIABLES, method, key=KEY, **options)
        assert made.model.config == dataclasses.replace(MODEL.config, **changes)
        assert described(made.variables) == wanted(made.model)
        assert made.method == method
        extra = [] if rules == "all" else ["norms", "embeddings"]
        assert [str(rule) for rule in made.rules] == [rules, *extra]
        adapt.trainable_mask(made.model, made.rules)
        assert made.base == adapt.fingerprint(MODEL, VARIABLES)

    def test_rules_can_be_left_out_and_positions_scaled(self):
        options = {"norms": False, "embeddings": False, "scaling": RopeScaling("linear", 2.0)}
        made = adapt.adapt(MODEL, VARIABLES, "tape", key=KEY, **options)
        assert made.rules == (adapt.Position(),)
        assert made.model.encoding == positions.Tape(scaling=RopeScaling("linear", 2.0))

    def test_dropped_positions_are_equal_positions(self):
        """Where all tokens are at one place, RoPE turns none of them against another."""
        made = adapt.adapt(MODEL, VARIABLES, "drope")
        found = logits(made.model, made.variables)
        same_place = logits(MODEL, VARIABLES, positions=jnp.full_like(TOKENS, 5))
        assert difference(found, same_place) < 1e-6
        assert difference(found, logits(MODEL, VARIABLES)) > 0.01
        assert is_shared(made.variables, VARIABLES)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("rope+window", "window"),
            ("rope/none", "none"),
            ("rope+window/rope", "window/none"),
            ("rope+alibi", "alibi"),
            ("rope+fox+window/rope", "fox+window/none"),
            ("p_rope", "none"),
            ("mrope", "none"),
            ("tape", "none"),
        ],
    )
    def test_what_acts_beside_the_rotation_stays(self, old, new):
        model = small_model(old)
        variables = random_variables(model)
        made = adapt.adapt(model, variables, "drope")
        assert made.model.encoding == positions.create(new)
        assert described(made.variables) == wanted(made.model)
        assert is_shared(made.variables, variables)

    def test_what_layers_beside_them_have_learned_stays(self):
        fope = positions.Fope(learn=True)
        model = small_model(positions.Layers(["rope+window", "rope", fope]), num_layers=4)
        variables = random_variables(model)
        made, found = adapt.drop_positions(model, variables)
        assert made.encoding == positions.Layers(["window", "none", fope])
        assert described(found) == wanted(made) == described(variables)
        assert is_shared(found, variables)

    @pytest.mark.parametrize(
        ("position", "options"),
        [
            ("tape", {"update_implementation": "reference"}),
            ("rope", {"random_positions": tape.RandomPositions("spaced", range=64)}),
        ],
    )
    def test_options_of_a_rotation_go_with_it(self, position, options):
        model = small_model(position, **options)
        made, _ = adapt.drop_positions(model, random_variables(model))
        assert made.config == small_model("none").config

    def test_parameters_that_would_be_lost(self):
        model = small_model("rope+fox")
        with pytest.raises(NotImplementedError, match="of 'fox' have other names in 'rope\\+fox'"):
            adapt.drop_positions(model, random_variables(model))

    def test_a_model_without_values(self):
        shapes = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS)
        for method in adapt.METHODS:
            options = {"position": "fox"} if method == "encoding" else {}
            made = adapt.adapt(MODEL, shapes, method, key=KEY, **options)
            assert described(made.variables) == wanted(made.model)
            assert made.base is None
            if method == "lora":
                plain, merged = adapt.merge_lora(made.model, made.variables)
                assert described(merged) == wanted(plain)

    @pytest.mark.slow
    def test_long_lora_is_evaluated_with_full_attention(self):
        made = adapt.adapt(MODEL, VARIABLES, "longlora", key=KEY, groups=2)
        tokens = jnp.concatenate([TOKENS[:, :8], TOKENS[:, :8]], axis=1)
        expected = logits(MODEL, VARIABLES, tokens)
        assert difference(logits(made.model, made.variables, tokens), expected) > 0.01
        full = adapt.full_attention(made.model)
        assert difference(logits(full, made.variables, tokens), expected) < 1e-6
        assert adapt.merge_lora(made.model, made.variables)[0] == MODEL


@pytest.mark.parametrize(
    ("function", "model", "options", "words"),
    [
        (tape.add_tape, small_model("tape"), {"key": KEY}, "expected a model with .*'tape'"),
        (tape.add_tape, small_model("random_rope"), {"key": KEY}, "expected .*'random_rope'"),
        (tape.add_tape, small_model("xpos"), {"key": KEY}, "expected .*'xpos'"),
        (tape.add_tape, small_model("mrope"), {"key": KEY}, "expected .*'mrope'"),
        (tape.add_tape, small_model("pope"), {"key": KEY}, "expected .*'pope'"),
        (tape.add_tape, MODEL, {"key": KEY, "nrm": "rms"}, "unknown field 'nrm'.*mean 'norm'"),
        (tape.add_tape, MODEL, {"key": KEY, "base": 5.0}, r"10000\.0: .* first .*\.scale_theta\)"),
        (tape.add_tape, MODEL, {"key": KEY, "still_heads": 1}, "still_heads is .* own, 0$"),
        (tape.add_tape, MODEL, {"key": KEY, "layers": (1, 4)}, "goes past the 3 layers that"),
        (adapt.add_lora, small_model("rope", lora=Lora()), {"key": KEY}, "has low-rank terms"),
        (adapt.add_lora, MODEL, {"key": KEY, "targets": ("q", "o")}, "unknown lora target 'o'"),
        (adapt.add_lora, MODEL, {"key": KEY, "dtype": "int32"}, "unknown dtype of new .*'int32'"),
        (tape.add_tape, MODEL, {"key": KEY, "dtype": "float64"}, "float64 needs 64-bit types"),
        (adapt.merge_lora, MODEL, {}, "no low-rank terms"),
        (adapt.scale_theta, small_model("alibi"), {"base": 1e6}, "rotary encoding; got 'alibi'"),
        (adapt.drop_positions, small_model("alibi"), {}, "rotary encoding; got 'alibi'"),
        (adapt.drop_positions, small_model("rope_pp"), {}, "1 heads attend .* 'rope_pp' 2"),
    ],
)
def test_misuse(function, model, options, words):
    with pytest.raises(ValueError, match=words):
        function(model, random_variables(model), **options)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("taep", {}, r"unknown method 'taep'.*did you mean 'tape'"),
        ("lora", {"rnk": 2}, r"unknown option of the method 'lora' 'rnk'.*did you mean 'rank'"),
        ("lora", {"rank": 0}, r"rank must be a positive integer; got 0"),
        ("theta", {"key": None}, r"the method 'theta' needs a random key"),
        ("encoding", {}, r"the method 'encoding' needs position="),
        ("drope", {"scaling": YARN}, "scaling is of the rotary frequencies"),
    ],
)
def test_misuse_of_methods(method, options, words):
    with pytest.raises(ValueError, match=words):
        adapt.adapt(MODEL, VARIABLES, method, **{"key": KEY, **options})


@pytest.mark.slow
def test_merged_low_rank_terms_are_saved_as_a_checkpoint(tmp_path):
    pytest.importorskip("safetensors")
    model, variables = tape.from_pretrained(HF / "llama3_gqa")
    made = adapt.adapt(model, variables, "longlora", key=KEY, rank=4)
    random = random_variables(made.model, std=0.05)["params"]
    mask = adapt.trainable_mask(made.model, ["lora"])
    _, frozen = adapt.partition(made.variables["params"], mask)
    trained = {"params": adapt.merge(adapt.partition(random, mask)[0], frozen)}
    full = adapt.full_attention(made.model)
    expected = logits(full, trained)
    assert difference(expected, logits(model, variables)) > 0.01

    merged, plain = adapt.merge_lora(made.model, trained)
    tape.save_pretrained(tmp_path / "merged", merged, plain, like=HF / "llama3_gqa")
    model, variables = tape.from_pretrained(tmp_path / "merged")
    assert model.config == dataclasses.replace(merged.config, dtype=model.config.dtype)
    assert difference(logits(model, variables), expected) <= 1e-5
