"""What is said of a model's inside, against values worked out by hand."""

import functools

import chex
import numpy as np
import pytest

from tape_jax._src.model.layout import restack
from tape_jax.positions import Layers, Rope
from tests.models import encoding, random_variables, small_model, without
from tests.selection import OF_EACH_SORT
from tests.train import small
from train.analysis import inspection
from train.compare.plots import MARK
from train.evaluation import inside as insides
from train.evaluation.inside import Inside, before_training, has_learned
from train.main import main

TOKENS = np.arange(12).reshape(2, 6) % 7
LABELS = [["a", "b", "c", "d", "e", "f"], ["g", "a", "b", "c", "d", "e"]]


@functools.cache
def look(kind="tape", kv_heads=2, **position):
    """A small model with random parameters, looked into."""
    model = small_model(
        encoding(kind, **position), num_heads=4, num_kv_heads=kv_heads, hidden_size=16
    )
    variables = random_variables(model, std=0.3)
    return model, variables, insides.look(model, variables, TOKENS, LABELS)


@pytest.mark.slow
def test_what_enters_each_layer():
    model, variables, inside = look()
    chex.assert_shape(inside.maps, (3, 2, 6, 4, 6))
    chex.assert_shape(inside.states, (3, 2, 6, 2, 4))
    np.testing.assert_allclose(inside.maps.sum(-1), 1, atol=1e-5)
    _, states = model.apply(variables, TOKENS, return_states=True)
    np.testing.assert_allclose(inside.states[2], states.position[2], rtol=1e-4, atol=1e-5)
    assert np.abs(inside.states[2] - inside.states[0]).max() > 0.1
    # Without its learned update TAPE is RoPE with the same weights.
    rope = small_model(encoding("rope"), num_heads=4, num_kv_heads=2, hidden_size=16)
    rest = restack(without(variables["params"], "position_"), model, rope)
    found = model.apply(before_training(model, variables), TOKENS)
    chex.assert_trees_all_close(found, rope.apply({"params": rest}, TOKENS), rtol=1e-4, atol=1e-5)
    assert np.abs(found - model.apply(variables, TOKENS)).max() > 1e-2
    assert not has_learned(rope)
    _, _, inside = look(form="tensor", l=2, r=2)
    chex.assert_shape(inside.states, (3, 2, 6, 2, 2, 2, 2))
    assert inside.phase_drift is None
    assert len([axes for axes in inspection.drift(inside).axes if axes.get_title()]) == 1


@pytest.mark.parametrize(
    ("kind", "layers", "shape"),
    [("rope/tape/tape", [2, 3], 4), ("rope/none/none", [1], 4), ("tape/tape_pope", [1, 3], 4)],
)
def test_a_schedule_has_one_state_looked_into(kind, layers, shape):
    _, _, inside = look(kind)
    assert inside.layers == layers
    chex.assert_shape(inside.states, (len(layers), 2, 6, 2, shape))
    assert len(inside.maps) == 3
    assert inside.moved[0] == 0
    names = [axes.get_title() for axes in inspection.patterns(inside).axes]
    assert ("entering layer 3" in names) == (len(layers) > 1)
    assert ("moves.png" in inspection.figures(inside)) == (len(layers) > 1)


def test_rotations_that_differ_by_layer_move_nothing():
    model = small_model(Layers([Rope(base=10.0), Rope(base=1e6)]))
    inside = insides.look(model, random_variables(model), TOKENS, LABELS)
    np.testing.assert_array_equal(inside.moved, 0)


def test_rope_never_moves():
    """The dot product of its states at distance d is the mean cosine of d w."""
    _, _, inside = look("rope")
    chex.assert_shape(inside.states, (3, 2, 6, 2, 4))
    np.testing.assert_array_equal(inside.moves, np.zeros((2, 2, 6, 2)))
    np.testing.assert_allclose(inside.relative_norms, 1)
    np.testing.assert_allclose(inside.phase_drift, np.zeros((3, 2, 6, 2, 2)), atol=1e-3)
    shown = inspection.patterns(inside).axes[0].images[0].get_array()
    distance = np.subtract.outer(np.arange(6), np.arange(6))
    expected = (np.cos(distance) + np.cos(distance / 100)) / 2
    np.testing.assert_allclose(shown, expected, atol=1e-5)


def test_moves_norms_and_phases():
    """Layer 1 doubles the state of one token, layer 2 turns that of another by 90 degrees."""
    start = np.zeros((1, 2, 1, 4), np.float32)
    start[..., 0] = 3
    start[..., 1] = 4
    doubled, turned = start.copy(), start.copy()
    doubled[0, 0] *= 2
    turned[0, 0] *= 2
    turned[0, 1] = [[0, 0, 3, 4]]
    inside = Inside(
        [["x", "y"]], np.ones((3, 1, 2, 1, 2)), np.stack([start, doubled, turned]), [1, 2, 3]
    )
    np.testing.assert_allclose(inside.moves[:, 0, :, 0], [[1, 0], [0, 2**0.5]], rtol=1e-6)
    np.testing.assert_allclose(inside.relative_norms[:, 0, :, 0], [[1, 1], [2, 1], [2, 1]])
    np.testing.assert_allclose(inside.moved, [0, 0.5**0.5, 1.5**0.5], rtol=1e-6)
    np.testing.assert_allclose(inside.phase_drift[1], 0, atol=1e-6)
    np.testing.assert_allclose(inside.phase_drift[2, 0, 1, 0], np.pi / 2, rtol=1e-6)
    rows = [line.strip("| ").split("|") for line in inspection.movers(inside).split("\n")[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["'y'", "1", "1.414"],
        ["'x'", "1", "1.000"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_EACH_SORT)
def test_every_encoding(kind):
    _, _, inside = look(kind, kv_heads=4)
    pictures = inspection.figures(inside)
    assert ("patterns.png" in pictures) == (inside.states is not None)
    assert "attention.png" in pictures


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small.saved(
        tmp_path_factory.mktemp("inside"),
        {"name": "addition", "max_digits": 2},
        model={"num_layers": 3},
    )


@pytest.mark.slow
def test_command(run, tmp_path, capsys):
    assert main(["inspect", f"--run={run}", f"--out={tmp_path / 'inside'}"]) == 0
    out = capsys.readouterr().out
    names = ["attention.png", "drift.png", "moves.png", "patterns.png"]
    assert sorted(p.name for p in (tmp_path / "inside").iterdir()) == names
    assert all(MARK.encode() in p.read_bytes()[:1000] for p in (tmp_path / "inside").iterdir())
    assert "% of their norm: 0.0, " in out
    assert main(["inspect", f"--run={run}", "--prompt=12+30", f"--out={tmp_path / 'b'}"]) == 0
    (tmp_path / "b" / "patterns.png").write_text("precious")
    assert main(["inspect", f"--run={run}", f"--out={tmp_path / 'b'}"]) == 2
    assert "was not written by this program" in capsys.readouterr().err


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("option", "message"),
    [("--length=1", "--length must be from 2 to"), ("--prompt=1+x+", "sum of two numbers")],
)
def test_bad_arguments(run, tmp_path, capsys, option, message):
    assert main(["inspect", f"--run={run}", f"--out={tmp_path / 'no'}", option]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
