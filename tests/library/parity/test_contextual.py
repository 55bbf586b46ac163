"""Every recorded run of another author's encoding that ships with the tests."""

import json

import numpy as np
import pytest

from tape_jax._src.parity import contextual, report
from tests.paths import BESIDE, GOLDEN
from tests.selection import mostly_slow

CONTEXTUAL = GOLDEN / "contextual"
FILES = sorted(path.stem for path in CONTEXTUAL.glob("*.npz"))
RECORDED = [name for name in FILES if name != "position_coupling_tiny"]
# Recordings that the tests do not ship.
BESIDE_FILES = sorted({f"{name}_tiny" for name in contextual.ENCODINGS} - {*FILES})


@pytest.mark.parametrize("name", mostly_slow(RECORDED, "fox_tiny"))
def test_outputs_and_gradients(name):
    assert_recorded_numbers(CONTEXTUAL / f"{name}.npz")


@pytest.mark.parametrize("name", mostly_slow(BESIDE_FILES, *BESIDE_FILES[:1]))
def test_outputs_and_gradients_of_files_beside_the_repository(name):
    path = BESIDE / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not there: the tests do not ship it")
    assert_recorded_numbers(path)


def assert_recorded_numbers(path):
    lines, ok = report.report(path)
    assert ok, "\n".join(lines)
    with np.load(path) as file:
        recorded = set(file.files)
    inputs = {name.removeprefix("grad_") for name in recorded if name.startswith("grad_")}
    compared = {line.split()[1].rstrip(":") for line in lines[1:]}
    constant = recorded - compared - inputs - set(contextual.NOT_COMPARED)
    assert not constant, f"neither compared nor an input: {constant}"


@pytest.mark.slow
def test_position_ids(tmp_path):
    path = CONTEXTUAL / "position_coupling_tiny.npz"
    lines, ok = report.report(path)
    assert ok, "\n".join(lines)
    assert [line.split()[1] for line in lines[1:]] == ["input_ids:", "label_ids:"]
    with np.load(path) as file:
        arrays = {name: x[:4] if x.ndim else x for name, x in file.items()}
    arrays["label_ids"][3, 1] += 1
    np.savez(tmp_path / path.name, **arrays)
    lines, ok = report.report(tmp_path / path.name)
    assert not ok
    assert [line.split()[1] for line in lines if "FAILED" in line] == ["label_ids:"]


def test_a_wrong_number_is_seen(tmp_path, capsys):
    arrays = recorded()
    arrays["grad_W_f"] = arrays["grad_W_f"] + 1e-3
    path = tmp_path / "recorded.npz"
    np.savez(path, **arrays)
    assert report.main([str(path)]) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert [line.split()[:2] for line in failed] == [
        [precision, "grad_W_f:"] for precision in ("float32", "float64")
    ]


def recorded():
    with np.load(CONTEXTUAL / "fox_tiny.npz") as file:
        return dict(file)


def misnamed(arrays):
    meta = json.loads(str(arrays["meta"])) | {"name": "focks"}
    return arrays | {"meta": np.array(json.dumps(meta))}


def lacking(missing):
    return lambda arrays: {name: x for name, x in arrays.items() if name != missing}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("focks", misnamed, "did you mean 'fox'"),
        ("fox", lambda arrays: arrays | {"more": np.ones(3)}, "not known here: ['more']"),
        ("fox", lacking("do"), "'do' is recorded neither as an array nor in meta"),
        ("fox", lacking("o"), "'o', the output, is not recorded"),
        ("fox", lambda arrays: arrays | {"W_f": np.ones(1)}, "fox_tiny.npz: "),
    ],
)
def test_what_is_unknown_or_missing_is_named(name, change, words, tmp_path, capsys):
    path = tmp_path / f"{name}_tiny.npz"
    np.savez(path, **change(recorded()))
    assert report.main([str(path)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_wall_in_a_window_with_grouped_heads(tmp_path):
    """Numbers made here, by loops: no file of that kind ships with the tests."""
    rng, window = np.random.default_rng(0), 4
    shapes = {"x": (1, 9, 5), "q": (1, 9, 4, 6), "k": (1, 9, 2, 6), "v": (1, 9, 2, 6)}
    inputs = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    inputs |= {"W_f": rng.normal(size=(5, 24)), "b_f": rng.normal(size=24)}
    gates = -np.log1p(np.exp(-(inputs["x"] @ inputs["W_f"] + inputs["b_f"]))).reshape(1, 9, 4, 6)
    o = np.zeros((1, 9, 4, 6))
    for i, h in np.ndindex(9, 4):
        seen = range(max(0, i - window + 1), i + 1)
        left = [np.exp(gates[0, j + 1 : i + 1, h].sum(axis=0)) for j in seen]
        keys, values = (inputs[name][0, list(seen), h // 2] for name in "kv")
        weights = np.exp((keys * left) @ inputs["q"][0, i, h] / np.sqrt(6))
        o[0, i, h] = weights @ values / weights.sum()
    meta = {"name": "wall", "inputs": [*inputs], "intermediates": ["log_f"]}
    for size, fits in ((window, True), (window + 1, False)):
        text = np.array(json.dumps(meta | {"window": size}))
        np.savez(tmp_path / "wall.npz", meta=text, o=o, do=np.ones_like(o), log_f=gates, **inputs)
        assert report.report(tmp_path / "wall.npz")[1] == fits
