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
from tape_jax._src.positions.creation import ALIASES, option_names
from tape_jax._src.positions.protocol import check_indices, table_rows
from tape_jax.positions import Encoding, Fox, Layer, Rope, Tape, Terms, create, registry

CONFIG = ModelConfig(13, hidden_size=16, num_layers=2, num_heads=2)


def test_every_registered_encoding_is_public():
    assert set(registry.values()) <= {
        cls for cls in vars(positions).values() if isinstance(cls, type)
    }


@pytest.mark.parametrize("kind", registry)
def test_every_name_makes_a_frozen_hashable_value(kind):
    encoding = create(kind)
    assert type(encoding) is registry[kind]
    assert encoding.kind == kind
    assert encoding == create({"kind": kind})
    assert hash(encoding) == hash(create(kind))
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
    ("position", "options", "words"),
    [
        ("tap", {}, r"unknown position encoding 'tap': expected one of .*did you mean 'tape'"),
        (None, {}, r"unknown position encoding None"),
        ({"kind": "alibbi"}, {}, r"'alibbi'.*did you mean 'alibi'"),
        ("rope", {"bass": 2.0}, r"unknown field 'bass' of position encoding 'rope' .*'base'"),
        ({"kind": "t5", "bucket": 3}, {}, r"unknown field 'bucket' of .* 't5' .*'buckets'"),
        (Rope(), {"bass": 2.0}, r"unknown field 'bass' of position encoding 'rope' .*'base'"),
        (
            "yarn",
            {"scaling": {"facto": 2.0}},
            r"unknown field 'facto' of position\.scaling of 'yarn' .*'factor'",
        ),
        ("rope", {"scaling": {"kind": "liner"}}, r"unknown rope scaling 'liner'.*'linear'"),
        ("alibi", {"base": 2.0}, r"unknown field 'base' of position encoding 'alibi'"),
        (
            "stickbreaking",
            {"current": "no"},
            r"current must be True or False; got 'no'",
        ),
        ("fox", {"shortest": "2"}, r"fox: shortest must be a finite number; got '2'"),
        ("path+fox", {"bias": float("nan")}, r"fox: bias must be a finite number; got nan"),
    ],
)
def test_unknown_names(position, options, words):
    with pytest.raises(ValueError, match=words):
        create(position, **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rope(learn_base="yes"), r"rope: learn_base must be True or False; got 'yes'"),
        (lambda: Rope("large"), r"rope: base must be a finite number; got 'large'"),
        (lambda: Tape(alpha=float("inf")), r"tape: alpha must be a finite number; got inf"),
        (lambda: Fox(shortest="a"), r"fox: shortest must be a finite number; got 'a'"),
        (
            lambda: dataclasses.replace(Fox(), longest=None),
            r"longest must be a finite number; got None",
        ),
    ],
)
def test_options_of_another_type(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_encodings_can_be_copied_and_stored():
    for kind in registry:
        encoding = create(kind)
        assert pickle.loads(pickle.dumps(encoding)) == copy.deepcopy(encoding) == encoding


def test_no_encoding_does_nothing():
    none, places = Encoding(), jnp.arange(3)
    none.check(CONFIG.sizes)
    assert none.coordinate_axes == 1
    assert not none.attends_state
    assert none.acts_on == ()
    layer = Layer(jnp.zeros((3, 16)), places, None, True, CONFIG.sizes)
    assert none.layer_terms({}, layer) == Terms()
    assert none.start_from_embeddings({}, layer) == (None, {})
    assert none.max_length() is None
    assert none.input_params(CONFIG.sizes) == {}
    assert none.layer_params(CONFIG.sizes, updates=True) == {}
    assert none.coordinates(jnp.zeros(3, int), places) is places
    assert none.embed({}, places, CONFIG.sizes, None) is None
    assert none.start(places, CONFIG.sizes) is None
    assert none.rotation(None) == (None, None)
    assert not none.updates(0, 2)
    state = object()
    assert none.carry(state, (3,), CONFIG.sizes) is state
    assert none.update_state({}, state, None, jnp.zeros((3, 16))) is state


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


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("rotary", "rope"),
        ("nope", "none"),
        ("NoPE", "none"),
        ("sinusoid", "sinusoidal"),
        ("T5", "t5"),
    ],
)
def test_what_people_call_encodings_gets_a_suggestion(given, meant):
    with pytest.raises(ValueError, match=rf"did you mean '{meant}'\?"):
        create(given)


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
    with pytest.raises(ValueError, match=r"unknown field 'epss' of position encoding"):
        create("path_fox", epss=1.0)


def test_options_are_checked_without_postponed_annotations():
    @dataclasses.dataclass(frozen=True)
    class Own(Encoding):
        rate: float = 0.1
        most: float | None = None

    assert Own(most=2.0).most == 2.0
    for options in ({"rate": "a"}, {"most": "a"}):
        with pytest.raises(ValueError, match="must be a finite number; got 'a'"):
            Own(**options)
