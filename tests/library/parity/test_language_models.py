"""Every recorded run of the reference that ships with the tests, and the command line."""

from pathlib import Path

import numpy as np
import pytest

from tape_jax._src.parity import deviations, language_models, report
from tests.paths import GOLDEN
from tests.selection import mostly_slow

FILES = sorted(path.stem for path in GOLDEN.glob("*.npz"))


@pytest.mark.parametrize("name", mostly_slow(FILES, "adape_tiny"))
def test_matches_reference(name):
    golden = language_models.Golden(GOLDEN / f"{name}.npz")
    results = [
        result
        for precision in deviations.TOLERANCE
        for result in language_models.compare(golden, precision)
    ]
    comparisons = [r for r in results if isinstance(r, deviations.Deviation)]
    assert len(comparisons) == len(results), "something was not recorded"
    wanted = {"logits", "loss", "hidden states", "gradients"}
    if golden.config["variant"].startswith("ada"):
        wanted.add("position states")
    for precision in ("float32", "float64"):
        assert wanted <= {
            r.quantity.split(" (")[0] for r in comparisons if r.precision == precision
        }
    assert not [r for r in comparisons if not r.ok]


def damaged(tmp_path: Path, name: str, change) -> Path:
    """A copy of a golden file after ``change(arrays)``."""
    with np.load(GOLDEN / f"{name}.npz") as archive:
        arrays = dict(archive)
    change(arrays)
    path = tmp_path / f"{name}.npz"
    np.savez(path, **arrays)
    return path


@pytest.mark.slow
def test_command_line_reports_each_quantity_and_fails_past_tolerance(tmp_path, capsys):
    def change(arrays):
        arrays["f64/cos_2"] = arrays["f64/cos_2"] + 1e-6
        arrays["grad/model.norm.weight"] = arrays["grad/model.norm.weight"] + 1e-4

    path = damaged(tmp_path, "adape_tiny", change)
    assert report.main([str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if "FAILED" in line]
    assert [line.split(":")[0].split(" (")[0].strip() for line in failed] == [
        "float32  gradients",
        "float64  position states",
        "float64  gradients",
    ]
    assert "in cos_2" in failed[1]
    assert "in model.norm.weight" in failed[2]
    assert any("not compared" in line and "layers.2.pe.up_proj" in line for line in lines)


@pytest.mark.slow
def test_gradients_come_from_the_sibling_file_or_are_said_to_be_missing(tmp_path, capsys):
    gradients = {}

    def take_gradients(arrays):
        for name in [n for n in arrays if n.startswith("grad/")]:
            gradients[name] = arrays.pop(name)

    path = damaged(tmp_path, "nope_tiny", take_gradients)
    assert report.main([str(path)]) == 0
    assert "gradients: not recorded" in capsys.readouterr().out
    np.savez(tmp_path / "nope_tiny_grad.npz", **gradients)
    golden = language_models.Golden(tmp_path / "nope_tiny_grad.npz")
    assert set(golden.arrays) >= {"logits", "grad/lm_head.weight"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("logits"), r"lacks \['logits'\]"),
        (
            lambda a: a.update(config=np.array(str(a["config"]).replace('"nope"', '"nop"'))),
            r"unknown variant .*'nop'.*did you mean 'nope'",
        ),
    ],
)
def test_wrong_files_are_refused(tmp_path, capsys, change, message):
    path, none = damaged(tmp_path, "nope_tiny", change), tmp_path / "none.npz"
    bad = tmp_path / "bad.npz"
    bad.write_bytes(b"not a zip archive")
    for file, words in ((path, message), (none, "no such file"), (bad, "not a readable npz")):
        with pytest.raises(ValueError, match=words):
            language_models.Golden(file)
    lacks = damaged(tmp_path, "rope_tiny", lambda a: a.pop("model.embed_tokens.weight"))
    other, npy = tmp_path / "nope_tiny_grad.npz", tmp_path / "nope_tiny.npy"
    with np.load(path) as file:
        np.savez(other, **{**file, "loss": file["loss"] + 1})
    npy.touch()
    refused = {
        lacks: f"{lacks}: KeyError: 'model.embed_tokens.weight'",
        path: f"{other}: loss has other values than in nope_tiny.npz",
        npy: "ends in .npz",
        none: "no such file",
    }
    assert report.main([str(file) for file in refused]) == 2
    said = capsys.readouterr().err
    for words in refused.values():
        assert words in said
    assert said.count("error:") == 4, "the files behind it are looked at, too"
    assert f"not compared: {', '.join(map(str, refused))}" in said


def test_scaled_error_scales_large_values_and_sees_nan():
    assert deviations.scaled_error([1.0, 200.5], np.array([1.0, 200.0])) == pytest.approx(0.0025)
    assert deviations.scaled_error([0.1], np.array([0.2])) == pytest.approx(0.1)
    assert deviations.scaled_error([np.nan], np.array([0.2])) == np.inf
    with pytest.raises(ValueError, match="shapes differ"):
        deviations.scaled_error([1.0], np.ones(2))
