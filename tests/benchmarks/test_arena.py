"""The arena refuses what it cannot measure first; else a line for each encoding."""

from __future__ import annotations

import re

import pytest

from benchmarks import arena
from tape_jax import positions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--encodings rop", "--encodings rop: unknown position encoding 'rop'"),
        ("--encodings rope+xpos", "'rope' and 'xpos' do not go together"),
        ("--lengths 0", "--lengths and --tokens must be positive"),
        ("--lengths --repeats 0 --long 1", "--long at least 2"),
        ("--rows nowhere/rows.jsonl", "--rows nowhere/rows.jsonl: there is no folder nowhere"),
        ("--picture bars.txt", "--picture bars.txt: the kind of picture must be one of"),
    ],
)
def test_wrong_calls(arguments, message, capsys):
    with pytest.raises(SystemExit):
        arena.parse(arguments.split())
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_lines(capsys, tmp_path, monkeypatch):
    """And made again from what is kept of them, by the same command."""
    options = "--model tiny --tokens 32 --lengths 16 --repeats 1 --long 32"
    files = ["--rows", str(tmp_path / "rows.jsonl"), "--picture", str(tmp_path / "bars.png")]
    given = [*options.split(), "--encodings", "fox", "rope/none", *files]
    arena.main(given)
    out = capsys.readouterr().out
    assert re.search(r"^fox at 16: [\d.]+ ms, [\d.]+ x rope, [\d.]+ MiB$", out, re.MULTILINE)
    assert re.search(r"^fox at 32: [\d.]+ MiB, [\d.]+ x those of 16$", out, re.MULTILINE)
    assert len(re.findall(r"^rope at 16: [\d.]+ ms, [\d.]+ x rope", out, re.MULTILINE)) == 1
    assert len(re.findall(r"^\| rope/none +\|", out, re.MULTILINE)) == 1
    assert (tmp_path / "bars.png").stat().st_size > 0
    monkeypatch.setattr(arena, "Runner", None)
    monkeypatch.setattr(arena, "temporary", None)
    arena.main(given)
    assert capsys.readouterr().out == out


def test_what_was_being_written_is_made_again(tmp_path):
    """And what cannot be made is a sentence, which is kept too."""

    def refuse():
        raise NotImplementedError("not here\nnor there")

    path, made = tmp_path / "rows.jsonl", iter(range(9))
    path.write_text('{"key": ["step", "fox"], "fou')
    for _ in range(2):
        assert arena.kept(path, ["step", "fox"], lambda: next(made)) == 0
        assert arena.kept(path, ["step", "path"], refuse) == "skipped, not here"
    assert arena.kept(None, ["step", "fox"], lambda: next(made)) == 1


def test_every_encoding_has_a_row():
    """And a schedule as well."""
    found = arena.names(None)
    assert {*positions.registry} - {*arena.LEFT_OUT} < {*found}
    assert any("/" in name for name in found)
    for name in found:
        model = arena.config_of(arena.PRESETS["small"].model, name)
        assert arena.config_of(arena.PRESETS["c4"].model, name).position == model.position
