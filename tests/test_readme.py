"""The README: its length, its numbers and its quick start."""

import re
import statistics

import chex
import jax
import jax.numpy as jnp
import pytest

from docs import records
from research.trainings import BEYOND
from tests.paths import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
# Rows of the table in order: the study and the score.
ROWS = [
    ("address_4x_again", BEYOND),
    ("text", "perplexity_1x"),
    ("text", "perplexity_8x"),
    ("passkey", BEYOND),
    ("recall", BEYOND),
    ("counting", BEYOND),
]


def table():
    """The cells of the table of results, a list for each row."""
    section = TEXT.partition("## Results")[2]
    lines = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    assert header[1:] == list(records.FORMS)
    return rows


def said(study, key, name):
    """A cell as it should read, without the star of a clear difference."""
    found = records.scores(study, key, name)
    if found is None:
        return "not run"
    values, learned = found
    assert len(values) == 5
    mean = statistics.mean(values)
    cell = f"{mean:.3f}" if key != BEYOND else f"{mean:.1f}" if mean > 99 else f"{mean:.0f}"
    return cell if learned else f"({cell})"


def test_it_is_one_page():
    assert len(TEXT.splitlines()) <= 120
    cells = [cell for line in TEXT.splitlines() if line[:1] == "|" for cell in line.split("|")]
    assert all(len(cell.strip()) <= 60 for cell in cells)


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_results_are_those_on_record(row):
    expected = [said(*ROWS[row], name) for name in records.FORMS]
    assert [cell.rstrip("*") for cell in table()[row][1:]] == expected


def test_sizes_are_those_on_record():
    """Trained lengths, widths and layers of what the table shows."""
    headings = [row[0] for row in table()]
    for (name, key), heading in zip(ROWS, headings, strict=True):
        study = records.studies()[name]
        one = study.reports("rope_alibi", key)[0].experiment
        if is_text := key != BEYOND:
            factor = int(key.removeprefix("perplexity_").removesuffix("x"))
            length = one.task.sequence_length * factor
        else:
            length = re.search(r"beyond (\d+) ", study.score(key).label)[1]
        assert f"{int(length):,}" in heading
        assert (one.model.num_layers, one.model.hidden_size) == (3, 128 if is_text else 64)
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
