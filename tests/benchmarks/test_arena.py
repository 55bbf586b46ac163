"""The arena refuses what it cannot measure first; else a line for each encoding."""

from __future__ import annotations

import re

import pytest

from benchmarks import arena


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--encodings rop", "--encodings rop: unknown position encoding 'rop'"),
        ("--encodings rope+xpos", "'rope' and 'xpos' do not go together"),
        ("--lengths 0", "--lengths and --tokens must be positive"),
        ("--lengths 64 --repeats 0", "--repeats 0: at least 1"),
        ("--lengths --repeats 0 --long 1", "--long at least 2"),
        ("--lengths --repeats 0 --long 0", "--long at least 2"),
        ("--picture bars.txt", "--picture bars.txt: the kind of picture must be one of"),
        ("--picture nowhere/bars.png", "there is no folder nowhere"),
    ],
)
def test_wrong_calls(arguments, message, capsys):
    with pytest.raises(SystemExit):
        arena.parse(arguments.split())
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_lines(capsys, tmp_path):
    options = "--model tiny --tokens 32 --lengths 16 --repeats 1 --long 32 --encodings fox"
    arena.main([*options.split(), "--picture", str(tmp_path / "bars.png")])
    out = capsys.readouterr().out
    assert re.search(r"^fox at 16: [\d.]+ ms, [\d.]+ x rope, [\d.]+ MiB$", out, re.MULTILINE)
    assert re.search(r"^fox at 32: [\d.]+ MiB, [\d.]+ x those of 16$", out, re.MULTILINE)
    assert len(re.findall(r"^rope, again at 16", out, re.MULTILINE)) == 1
    assert (tmp_path / "bars.png").stat().st_size > 0
