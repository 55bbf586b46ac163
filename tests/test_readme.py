"""The README: its length, its numbers and its quick start."""

import functools
import json
import math
import re
import statistics

import chex
import jax
import jax.numpy as jnp
import pytest

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
TRAINED = {"address_4x_again": 16, "passkey": 64, "recall": 16, "counting": 32}
# The demo's options.
ALPHA = {"address_4x_again": 8.0}
LEARNED = 95


def table():
    """The cells of the table of results, a list for each row."""
    section = TEXT.partition("## Results")[2]
    lines = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    assert header[1:] == list(COLUMNS)
    return rows


def merged(shared, record):
    """A record with what it shares with the others of its file."""
    found = dict(shared)
    for path, value in record.items():
        *parents, last = path.split(".")
        inner = found
        for parent in parents:
            inner[parent] = dict(inner.get(parent, {}))
            inner = inner[parent]
        inner[last] = value
    return found


@functools.cache
def reports(study):
    """The reporting runs of a study, by encoding, its alpha and the learning rate."""
    head, *rest = (ROOT / f"research/records/{study}.jsonl").read_text().splitlines()
    shared, runs = json.loads(head)["shared"], {}
    for line in rest:
        record = merged(shared, json.loads(line))
        model, position = record["experiment"]["model"], record["experiment"]["model"]["position"]
        usual = position.get("attention_mix", "heads") == "heads"
        if record["protocol"]["asked"] == "test" and usual and not model.get("random_positions"):
            key = position["kind"], position.get("alpha")
            rate = record["experiment"]["train"]["learning_rate"]
            runs.setdefault(key, {}).setdefault(rate, []).append(record["found"]["result"])
    return runs


def exact_match(result, trained):
    """Per cent right up to the trained length and beyond."""
    grid = result.get("grid", result)
    right, asked = [0, 0], [0, 0]
    for lengths, correct, counts in zip(
        grid["lengths"], grid["correct"], grid["counts"], strict=True
    ):
        for length, some, all_of_them in zip(lengths, correct, counts, strict=True):
            beyond = int(length > trained)
            right[beyond] += some
            asked[beyond] += all_of_them
    return [100 * some / count for some, count in zip(right, asked, strict=True)]


def perplexity(result, factor):
    """Of disjoint windows of so many times the trained length."""
    found = result["perplexity"]
    (one,) = (
        m
        for m in found["measurements"]
        if m["protocol"] == "disjoint" and m["length"] == factor * found["trained"]
    )
    return math.exp(statistics.mean(one["blocks"]))


def said(study, factor, kind, alpha):
    """A cell as it should read."""
    rates = reports(study).get((kind, ALPHA.get(study, alpha) if alpha else None))
    if rates is None:
        return ""
    if factor:
        # A length has the rate that is best for it.
        means = [statistics.mean(perplexity(r, factor) for r in x) for x in rates.values()]
        return f"{min(means):.2f}"
    (results,) = rates.values()
    assert len(results) == 5
    scores = [exact_match(result, TRAINED[study]) for result in results]
    inside, beyond = (statistics.mean(x) for x in zip(*scores, strict=True))
    cell = f"{beyond:.1f}" if beyond > 99 else f"{beyond:.0f}"
    return cell if inside >= LEARNED else f"({cell})"


def test_it_is_one_page():
    assert len(TEXT.splitlines()) <= 120
    cells = [cell for line in TEXT.splitlines() if line[:1] == "|" for cell in line.split("|")]
    assert all(len(cell.strip()) <= 60 for cell in cells)


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_results_are_those_on_record(row):
    expected = [said(*ROWS[row], *column) for column in COLUMNS.values()]
    assert table()[row][1:] == expected


def test_costs_are_those_on_record():
    section = TEXT.partition("**Cost of a training step**")[2].partition("##")[0]
    cpu, gpu = re.findall(r"\]\((benchmarks/\S+)\)(.*?\.)(?:\s|$)", section, re.DOTALL)
    for page, sentence in (cpu, gpu):
        numbers = re.findall(r"\b1\.\d\d\b", sentence)
        assert len(numbers) == 2
        found = (ROOT / page).read_text()
        assert all(number in found for number in numbers), page


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
