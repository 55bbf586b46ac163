"""The README: its length, its numbers and its quick start."""

import json
import re
import statistics

import chex
import jax
import jax.numpy as jnp
import pytest

from docs import records
from research.lines import restored
from tests.paths import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COLUMNS = {
    "TAPE + ALiBi": ("tape+alibi", 1.0),
    "RoPE + ALiBi": ("rope+alibi", None),
    "ALiBi": ("alibi", None),
    "FoX": ("fox", None),
}
# Rows of the table in order: the study and, for perplexities, the factor on the trained length.
ROWS = [
    ("address_4x_again", None),
    ("text", 1),
    ("text", 8),
    ("passkey", None),
    ("recall", None),
    ("counting", None),
]


def table():
    """The cells of the table of results, a list for each row."""
    section = TEXT.partition("## Results")[2]
    lines = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    assert header[1:] == list(COLUMNS)
    return rows


def said(study, factor, kind, alpha):
    """A cell as it should read, without the star of a clear difference."""
    found = records.scores(study, factor, kind, alpha)
    if found is None:
        return "not run"
    values, learned = found
    assert len(values) == 5
    mean = statistics.mean(values)
    cell = f"{mean:.3f}" if factor else f"{mean:.1f}" if mean > 99 else f"{mean:.0f}"
    return cell if learned else f"({cell})"


def test_it_is_one_page():
    assert len(TEXT.splitlines()) <= 120
    cells = [cell for line in TEXT.splitlines() if line[:1] == "|" for cell in line.split("|")]
    assert all(len(cell.strip()) <= 60 for cell in cells)


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_results_are_those_on_record(row):
    expected = [said(*ROWS[row], *column) for column in COLUMNS.values()]
    assert [cell.rstrip("*") for cell in table()[row][1:]] == expected


def test_sizes_are_those_on_record():
    """Trained lengths, widths and layers of what the table shows."""
    headings = [row[0] for row in table()]
    for (study, factor), heading in zip(ROWS, headings, strict=True):
        head = (records.RECORDS / f"{study}.jsonl").read_text(encoding="utf-8").splitlines()
        one = restored(json.loads(head[0])["shared"], json.loads(head[1]))["experiment"]
        task, model = one["task"], one["model"]
        length = task["sequence_length"] * factor if factor else records.TRAINED[study]
        assert f"{length:,}" in heading
        assert (model["num_layers"], model["hidden_size"]) == (3, 128 if factor else 64)
    assert "Three layers, width 64 (text: 128)" in TEXT


def test_verdicts_on_the_claims_are_those_of_the_results():
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    claims = results.partition("## The paper's claims")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .* \| (\w.*) \|$", claims, re.MULTILINE)[1:]
    confirmed, contradicted = (
        sum(row.startswith(word) for row in rows) for word in ("confirmed", "contradicted")
    )
    assert f"Of [{len(rows)} claims]" in TEXT
    assert f"{confirmed} were confirmed\nand {contradicted} contradicted" in TEXT


def test_costs_are_those_on_record():
    section = TEXT.partition("**Cost**")[2].partition("##")[0]
    sentences = re.findall(r"[A-Z](?:[^.]|\.(?!\s))*\.(?=\s)", section)
    numbers = {}
    for sentence in sentences:
        for page in re.findall(r"\]\((benchmarks/\S+)\)", sentence):
            numbers[page] = re.findall(r"\b[01]\.\d\d\b", sentence)
            found = (ROOT / page).read_text()
            assert all(number in found for number in numbers[page]), page
    assert [len(found) for found in numbers.values()] == [2, 2, 2]


def test_quick_start_starts_as_rope():
    """Both sides of the diff run, and a new TAPE layer gives what the RoPE layer gives."""
    diff = re.search(r"```diff\n(.*?)```", TEXT, re.DOTALL)[1].splitlines()
    before, after = ({}, {})
    exec("\n".join(line[1:] for line in diff if line[:1] != "+"), before)
    exec("\n".join(line[1:] for line in diff if line[:1] != "-"), after)
    chex.assert_trees_all_close(after["h"], before["h"], atol=1e-5)
    moved = jax.tree.map(lambda p: p + 0.1, after["params"]["tape"])
    _, e = after["layer"](after["params"] | {"tape": moved}, before["h"], before["e"])
    assert jnp.abs(e - before["e"][:, None]).max() > 0.01
