"""Names, options and defaults of encodings."""

import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import Lora, ModelConfig, RandomPositions, RopeScaling, positions
from tape_jax._src.adapt.identity import encoding_to_json
from tape_jax._src.positions.creation import ALIASES, option_names
from tape_jax._src.positions.protocol import check_indices, table_rows
from tape_jax.positions import Encoding, Fox, Rope, Tape, create, registry
from tests.models import small_model


def test_every_name_makes_a_frozen_hashable_value():
    for kind, cls in registry.items():
        encoding = create(kind)
        assert type(encoding) is cls is vars(positions)[cls.__name__]
        assert encoding.kind == kind
        assert hash(encoding) == hash(create({"kind": kind}))
        assert pickle.loads(pickle.dumps(encoding)) == copy.deepcopy(encoding) == encoding
        with pytest.raises(dataclasses.FrozenInstanceError):
            encoding.kind = "other"


def test_options_by_keyword_mapping_and_replacement():
    want = Tape(norm="rms", layers=(0, 1), scaling=RopeScaling("linear", 2.0))
    options = {"norm": "rms", "layers": [0, 1], "scaling": {"kind": "linear", "factor": 2.0}}
    assert create("tape", **options) == want
    assert create({"kind": "tape", **options}) == want
    with pytest.raises(ValueError, match=r"needs its name, 'kind'; got only 'norm', 'layers'"):
        create(options)
    assert create({"kind": "tape", **options, "norm": "unit"}, norm="rms") == want
    assert create(Tape(norm="rms"), layers=(0, 1), scaling=want.scaling) == want
    assert create(want) is want


# Options that some encodings need.
NEEDED = {
    "abacus": {"digits": (3, 4)},
    "position_coupling": {"digits": tuple(range(10)), "plus": 10, "equals": 11},
}


@pytest.mark.parametrize("kind", [*registry, "tape+alibi", "rope+fox"])
def test_a_config_is_read_back_from_asdict(kind):
    config = ModelConfig(
        vocab_size=40,
        hidden_size=16,
        num_heads=2,
        max_length=64,
        position={"kind": kind, **NEEDED.get(kind, {})},
        lora=Lora(rank=2),
        random_positions=RandomPositions("shifted", 64) if kind == "rope" else None,
    )
    fields = dataclasses.asdict(config)
    assert fields["position"]["kind"] == kind
    assert ModelConfig(**fields) == config
    del fields["position"]["kind"]
    with pytest.raises(ValueError, match="needs its name, 'kind'"):
        ModelConfig(**fields)


def test_an_encoding_of_ones_own_needs_no_name():
    @dataclasses.dataclass(frozen=True)
    class Mine(Rope):
        extra: int = 1

    assert create(Mine(), extra=2, base=50.0) == Mine(base=50.0, extra=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: create("tap"), "unknown position encoding 'tap': expected .*did you mean 'tape'"),
        (lambda: create(None), "unknown position encoding None"),
        (lambda: create({"kind": "alibbi"}), "'alibbi'.*did you mean 'alibi'"),
        # What people call encodings gets a suggestion.
        (lambda: create("rotary"), r"did you mean 'rope'\?"),
        (lambda: create("NoPE"), r"did you mean 'none'\?"),
        (lambda: create("T5"), r"did you mean 't5'\?"),
        (lambda: create("mrope_interleaved"), r"did you mean 'mrope'\?"),
        (lambda: create("rope", bass=2.0), "unknown field 'bass' of .* encoding 'rope' .*'base'"),
        (lambda: create({"kind": "t5", "bucket": 3}), "unknown field 'bucket' of .* 't5' .*'buck"),
        (lambda: create(Rope(), bass=2.0), "unknown field 'bass' of .* encoding 'rope' .*'base'"),
        (
            lambda: create("yarn", scaling={"facto": 2.0}),
            r"unknown field 'facto' of position\.scaling of 'yarn' .*'factor'",
        ),
        (
            lambda: create("rope", scaling={"kind": "liner"}),
            "unknown rope scaling 'liner'.*'linear'",
        ),
        (lambda: create("path_fox", epss=1.0), "unknown field 'epss' of position encoding"),
        (lambda: create("path+fox", bias=float("nan")), "bias must be a finite number; got nan"),
        (
            lambda: create("rope", scaling=None),
            "rope: scaling must be of the type RopeScaling; got",
        ),
        (lambda: Rope(learn_base="yes"), "rope: learn_base must be True or False; got 'yes'"),
        (lambda: Rope("large"), "rope: base must be a finite number; got 'large'"),
        (
            lambda: dataclasses.replace(Fox(), longest=None),
            "longest must be a finite number; got N",
        ),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ValueError, match=words):
        make()


LINEAR = RopeScaling("linear", 2.0)
# By encoding, options that it refuses: the first one by its name.
WRONG = {
    "abacus": [{"digits": "45"}, {"size": -1}, {"max_offset": -3}],
    "alibi": [{"slopes": "steep"}],
    "cope": [{"positions": 0}],
    "dape_fire": [{"fire_width": 0}],
    "dape_kerple": [{"width": 0}],
    "dapev2_kerple": [{"taps": 4}],
    "dda_per_row": [{"width": 0}, {"post_log_scale": -1.0}],
    "fire": [{"width": 0}],
    "fope": [{"original_length": 6}, {"base": 1.0}, {"gain": -1}],
    "grape_additive": [{"gate": "keys"}],
    "grape_m_ctx": [{"step": "relu"}, {"base": 1.0}, {"initial_step": 0.0}],
    "grape_path": [{"width": 0}, {"width": 3}],
    "inkling": [{"reach": 0}, {"floor": 0.0}, {"alpha": -1.0}, {"alpha": True}],
    "inkling_local": [{"width": 0}],
    "kerple": [{"form": "pow"}],
    "learned": [{"size": 0}],
    "longrope": [{"scaling": LINEAR}, {"scaling": None}],
    "mapformer_em": [{"grid": 0.0}],
    "mapformer_wm": [{"rank": 0}],
    "mrope": [{"axes": 1}, {"sections": (4, 4)}, {"sections": (4, 1, -1)}],
    "p_rope": [{"scaling": LINEAR}],
    "sinusoidal": [{"base": 0}, {"base": -3.0}],
    "xpos": [{"scale_base": 0}, {"scale_base": -1.0}],
    "path": [{"rank": 0}, {"taps": -1}, {"chunk": 0}, {"beta_max": 2.5}, {"eps": 0.0}],
    "position_coupling": [
        {"max_offset": -1}, {"extra_digits": -1}, {"size": 0}, {"digits": "45"}, {"plus": "+"},
    ],
    "random_rope": [{"range": 0}, {"still_heads": 1, "each_layer": True}],
    "repo": [{"form": "swish"}, {"width": -1}, {"base": 0.5}, {"first_layer": -1}],
    "rope": [{"base": 0.5}, {"still_heads": -1}],
    "selective_rope": [
        {"rank": 0}, {"taps": 0}, {"spacing": "rop"}, {"gate": "gla"}, {"temperature": 0.0},
        {"theta": 0.5}, {"theta": 2.0, "spacing": "rfa"},
    ],
    "stickbreaking": [{"remainder": "values"}],
    "t5": [{"buckets": 1}, {"max_distance": 4, "buckets": 8}],
    "tape": [
        {"form": "matrix"}, {"attention_mix": "headscale"}, {"activation": "silo"}, {"norm": "l"},
        {"l": 0}, {"width": 0}, {"base": 1.0}, {"layers": "last"}, {"layers": (2, 1)},
        {"layers": (-1, 1)}, {"layers": (1,)}, {"layers": (0.0, 1.5)}, {"degree": 3},
        {"degree": 2, "norm": "rms"}, {"still_heads": 1.5}, {"head_shift": True},
        {"head_shift": None}, {"head_shift": ["a", 1]}, {"head_shift": [0, float("nan")]},
    ],
    "tape_mix_head_dim": [{"form": "rotary"}, {"l": 4, "r": 4}],
    "tape_no_equivariance": [{"form": "rotary"}, {"l": 4, "r": 4}],
    "tape_place_weights": [{"waves": 0}, {"still_heads": 1}],
    "tape_pope": [{"partial_rotary_factor": 0.5}, {"form": "tensor"}],
    "tape_relaxed_equivariance": [{"penalty": (1, -1)}, {"form": "tensor"}],
    "tape_separate_cos_sin": [{"form": "tensor"}, {"degree": 3, "norm": "rms"}],
    "wall": [{"chunk": 0}, {"bias": True}, {"bias": np.True_}],
    "window": [{"size": -1}],
    "yarn": [{"scaling": LINEAR}],
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_options_out_of_range(kind):
    for options in WRONG[kind]:
        with pytest.raises(ValueError, match=rf"{kind}.*\b{next(iter(options))}\b"):
            create(kind, **options)


THREE = RopeScaling("longrope", 2.0, long_factor=(1, 2, 3))
PART = {"partial_rotary_factor": 0.5}
TENS = {"digits": tuple(range(3, 13)), "plus": 1}

MISFITS = [
    ("abacus", {"digits": (4, 13)}, {}, r"digits must be token ids in 0 \.\. 12; got \(4, 13"),
    ("abacus", {"digits": (-1, 3)}, {}, r"digits must be token ids in 0 \.\. 12; got \(-1"),
    ("abacus", {}, {}, "abacus: digits, the token ids"),
    ("abacus", {"digits": (4,), "size": 5, "max_offset": 5}, {}, "size = 5 must exceed max_offset"),
    ("cope", {"positions": None}, {}, "positions=None is for a model with a max_length"),
    ("fope", {}, {"head_dim": 2}, "got a head dimension of 2"),
    ("fox", {"on_heads": 0}, {}, "on_heads must be a positive integer or None; got 0"),
    ("longrope", {"scaling": THREE}, {}, "for each of the 4 frequencies; got 3"),
    ("mrope", {}, {"head_dim": 4}, "axes = 3, needs a frequency; .* 1.0 of 4 dimensions leaves 2"),
    ("mrope", {"partial_rotary_factor": 0.0}, {}, "= 0.0 of 8 dimensions leaves 0"),
    ("mrope", {"sections": (2, 4, 4)}, {}, "must add up to the 4 frequencies"),
    ("p_rope", {}, {"head_dim": 6}, "axes = 1, needs a frequency; .* of 6 dimensions leaves 0"),
    ("pope", {"partial_rotary_factor": 0.1}, {"head_dim": 4}, "leaves no coordinate of 4"),
    ("position_coupling", TENS, {}, "digits, plus and equals, the token ids, must be given"),
    ("position_coupling", TENS | {"equals": 1}, {}, "must be different token ids in 0 .. 12"),
    ("position_coupling", TENS | {"equals": 2, "size": 9, "max_offset": 9}, {}, "must exceed max_"),
    ("repo", {"first_layer": 3}, {}, "first_layer = 3 of 3 layers"),
    ("repo", {}, {"hidden_size": 6, "head_dim": 4}, "an eighth of .* 6 is nothing"),
    ("rope", {"axes": 9}, {}, "axes = 9, needs a frequency"),
    ("rope", {"axes": 3, "partial_rotary_factor": 0.5}, {}, "leaves 1, 0, 0"),
    ("rope", {"still_heads": 2}, {}, "still_heads = 2 leaves none of the model's 2"),
    ("selective_rope", {}, {"hidden_size": 15, "head_dim": 8}, "share of the hidden"),
    ("selective_rope", {"spacing": "rfa"}, {"head_dim": 2}, "got a head dimension of 2"),
    ("tape", {"axes": 5}, {}, "tape: each of the coordinates, axes = 5, needs a frequency"),
    ("tape", {"form": "tensor", "l": 3, "r": 3}, {}, "l = 3 does not divide"),
    ("tape", {"layers": (1, 4)}, {}, r"\(1, 4\) goes past the 3 layers that"),
    ("tape", PART | {"scaling": RopeScaling("longrope", 2.0)}, {}, "longrope .* must be 1;"),
    ("tape", PART | {"scaling": RopeScaling("yarn", 2.0)}, {}, "yarn .* must be 1;"),
    ("tape", {"head_shift": (1.0, 2.0, 3.0)}, {}, "head_shift .* each of the 2 state heads"),
    ("tape", {"head_shift": (1.0, 2.0), "still_heads": 1}, {}, "each of the 1 state heads that"),
    ("tape", {"head_shift": 2.0**31}, {}, r"by less than 2\^31 tokens"),
    ("tape", {"head_shift": (0.0, -1e300)}, {}, r"by less than 2\^31 tokens"),
    ("tape+alibi", {"on_heads": 3}, {}, "alibi: on_heads = 3 are more than the model's 2 heads"),
    ("tape_mix_head_dim", {}, {"num_kv_heads": 1}, "num_heads = 2, num_kv_heads = 1"),
    ("tape_mix_head_dim", {"attention_mix": "heads"}, {}, "a scale per dimension; got"),
    ("wall", {}, {"query_scale": 0.5}, "query_scale = 0.5 is for encodings without"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "sizes", "words"), MISFITS)
def test_options_that_do_not_fit_a_model(kind, options, sizes, words):
    encoding = create(kind, **options)
    with pytest.raises(ValueError, match=words):
        small_model(encoding, **sizes).parameters()


def test_tables_are_indexed_by_integers():
    check_indices("places", jnp.arange(3, dtype=jnp.uint8), 3)
    with pytest.raises(ValueError, match=r"places must be integers.*got float32"):
        check_indices("places", jnp.arange(3.0))
    with pytest.raises(ValueError, match=r"got bool"):
        check_indices("places", jnp.ones(3, bool))


def test_tables_give_no_neighbours():
    table, index = jnp.arange(6.0).reshape(3, 2), jnp.array([[2, 3], [-1, 0]])
    for value, wrong in ((3, [[2, 3]]), (-1, [[0], [-1]])):
        with pytest.raises(ValueError, match=rf"places must lie in 0 \.\. 2; got {value}"):
            table_rows("places", table, jnp.array(wrong))
    np.testing.assert_array_equal(
        jax.jit(functools.partial(table_rows, "places"))(table, index),
        [[[4, 5], [np.nan] * 2], [[np.nan] * 2, [0, 1]]],
    )


def test_what_they_are_called_besides_are_encodings():
    assert {name for names in ALIASES.values() for name in names.split("+")} <= set(registry)
    assert not set(ALIASES) & set(registry)


def test_one_name_for_several_encodings():
    for name, meant in (("path_fox", "path+fox"), ("path_fox+alibi", "path+fox+alibi")):
        encoding = create(name, scaled=True, rank=4)
        assert encoding == create(meant, scaled=True, rank=4)
        assert encoding == create({"kind": name, "scaled": True, "rank": 4})
        assert encoding.kind == meant
        assert option_names(name) == option_names(meant)


def test_numbers_of_numpy_are_written_as_python_s():
    made = (positions.Inkling(floor=np.float32(0.5)), create("inkling", floor=np.float64(0.5)))
    for encoding in made:
        assert encoding == positions.Inkling(floor=0.5)
        assert encoding_to_json(encoding)["floor"] == 0.5
    assert encoding_to_json(Rope(np.int64(50), learn_base=np.True_))["base"] == 50


def test_a_scaling_without_a_kind_has_the_encoding_s():
    for kind, encoding in (("longrope", positions.LongRope), ("yarn", positions.Yarn)):
        want = encoding(scaling=RopeScaling(kind, 4.0))
        assert create(kind, scaling={"factor": 4.0}) == want
        own = dataclasses.replace(encoding().scaling, original_length=64)
        assert create(kind, scaling={"original_length": 64}) == encoding(scaling=own)


def test_options_are_checked_without_postponed_annotations():
    @dataclasses.dataclass(frozen=True)
    class Own(Encoding):
        rate: float = 0.1
        most: float | None = None

    assert Own(most=2.0).most == 2.0
    for options in ({"rate": "a"}, {"most": "a"}):
        with pytest.raises(ValueError, match="must be a finite number; got 'a'"):
            Own(**options)
