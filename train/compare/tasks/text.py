"""The report on language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from train.compare import plots
from train.compare.plots import Series
from train.compare.tasks import Comparison
from train.compare.tasks.questions import passkey_section
from train.evaluation.grids import pool
from train.evaluation.perplexity import (
    PROTOCOLS,
    Perplexity,
    mean_and_spread,
    note,
    require_same_targets,
    table,
)
from train.tasks import retrieval
from train.tasks.text import Text
from train.tasks.text_evaluation import TextResult, perplexity_score


def compare(task: Text, results: Mapping[str, Sequence[TextResult]]) -> Comparison:
    """Reports perplexity by length, loss by position, and passkey retrieval where all were asked.

    Raises:
      ValueError: results that scored different targets.
    """
    found = {name: [r.perplexity for r in group] for name, group in results.items()}
    first = require_same_targets(found)
    sections = tables(found)
    sections["Perplexity by length"] = f"{note(found)}\n\n![Perplexity by length](perplexity.png)"
    figures = {
        "perplexity.png": plots.line_panels(
            by_length(found),
            title="Perplexity by window length",
            x_label="tokens of a window",
            y_label="perplexity",
            trained=first.trained,
            log=True,
        )
    }
    if panels := by_position(found):
        sections["Loss by position"] = "![Loss by position](loss_by_position.png)"
        figures["loss_by_position.png"] = plots.line_panels(
            panels,
            title="Loss by position in the window",
            x_label="position, tokens",
            y_label="cross entropy, nats for each token",
            trained=first.trained,
            log=False,
        )
    grids = {
        name: pool([r.passkey for r in group if r.passkey is not None])
        for name, group in results.items()
        if all(r.passkey is not None for r in group)
    }
    if grids:
        sections["Passkey retrieval"] = passkey_section(grids)
        figures["passkey.png"] = plots.heat_maps(grids)
    lengths = ", ".join(f"{n:,}" for n in first.lengths)
    return Comparison(
        title="Language models beyond the trained length",
        introduction=(
            f"Trained on sequences of {first.trained:,} tokens and judged by held-out text in "
            f"windows of {lengths} tokens. Every window length scores the same {first.targets:,} "
            "targets. Read disjoint windows first: each starts without context. In overlapping "
            "ones nearly every token has the whole length as context; the sliding attention window "
            "tells unseen distances from unseen positions."
        ),
        sections=sections,
        figures=figures,
        scores=[
            *(
                perplexity_score(p, n / first.trained)
                for p in first.protocols
                for n in first.lengths
            ),
            *retrieval.SCORES,
        ],
    )


def tables(results: Mapping[str, Sequence[Perplexity]]) -> dict[str, str]:
    """Returns perplexity by length for each protocol, and bits per byte if bytes are known."""
    protocols = require_same_targets(results).protocols
    found = {
        f"Perplexity, {PROTOCOLS[protocol]}": table(
            {name: (protocol, group) for name, group in results.items()}
        )
        for protocol in protocols
    }
    if all(r.text_bytes for group in results.values() for r in group):
        columns = {name: (protocols[0], group) for name, group in results.items()}
        heading = f"Bits per byte, {PROTOCOLS[protocols[0]]}"
        found[heading] = table(columns, Perplexity.bits_per_byte)
    return found


def by_length(
    results: Mapping[str, Sequence[Perplexity]],
) -> dict[str, dict[str, Series]]:
    """Returns perplexity by length: for each protocol, a line for each name."""
    first = require_same_targets(results)
    panels: dict[str, dict[str, Series]] = {}
    for protocol in first.protocols:
        lines = panels.setdefault(PROTOCOLS[protocol], {})
        for name, group in results.items():
            lengths = [n for n in first.lengths if all(r.at(protocol, n).blocks for r in group)]
            found = [mean_and_spread(group, protocol, n) for n in lengths]
            if lengths:
                lines[name] = Series(lengths, [m for m, _ in found], [s for _, s in found])
    return panels


def by_position(
    results: Mapping[str, Sequence[Perplexity]],
) -> dict[str, dict[str, Series]]:
    """Returns loss by position in the longest windows that each model takes."""
    first = require_same_targets(results)
    panels: dict[str, dict[str, Series]] = {}
    for protocol in first.protocols:
        if protocol == "overlapping":
            continue  # Its windows score their ends only.
        lines = panels.setdefault(PROTOCOLS[protocol], {})
        for name, group in results.items():
            lengths = [n for n in first.lengths if all(r.at(protocol, n).blocks for r in group)]
            if lengths:
                length = lengths[-1]
                losses = np.array([r.at(protocol, length).by_position for r in group])
                spread = losses.std(axis=0, ddof=1) if len(group) > 1 else np.zeros(losses.shape[1])
                middle = np.minimum(np.arange(0, length, first.bin) + first.bin / 2, length)
                lines[name] = Series(middle.tolist(), losses.mean(axis=0).tolist(), spread.tolist())
    return panels
