"""Perplexity of held-out text by length: how well a language model uses, or tolerates, long inputs.

A model trained on sequences of T tokens is judged at multiples of T, or at other lengths, in three
ways:

* ``disjoint``: the text is cut into windows one after another, each of which starts without any
  context.
* ``overlapping``: windows move on by a stride, and only the tokens that are new in a window are
  scored, so that all except those of the first window have nearly the whole length as context.
* ``windowed``: disjoint windows again, with the same weights, but no token sees further back than
  T tokens (a sliding attention window). It separates the effect of unseen distances from that of
  unseen positions.

Every way at every length scores the same targets: those of the longest disjoint windows (see
:func:`train.evaluation.window_losses.windows`), and so does every model with the same tokenizer and
trained length. Logits exist for a few tokens at a time, so memory grows with the length as
attention's does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tape_jax import Transformer
from train.checks import require
from train.evaluation import Progress, fits
from train.evaluation.grids import read_record, text_table
from train.evaluation.programs import Programs
from train.evaluation.window_losses import losses_and_places, windows_of, with_window
from train.statistics import deviation, mean

FORMAT = "tape-jax perplexity, version 1"
BINS_PER_TRAINED_LENGTH = 8

# Ways of measuring (the module docstring explains them).
PROTOCOLS = {
    "disjoint": "disjoint windows",
    "overlapping": "overlapping windows",
    "windowed": "sliding attention window",
}

# Converts a mean loss in nats for each token.
Quantity = Callable[["Perplexity", float], float]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Losses of one model, measured in one way at one length.

    Attributes:
      protocol: of :data:`PROTOCOLS`.
      length: tokens of a window.
      blocks: mean loss in nats of each block of targets; empty if the model does not take the
        length.
      by_position: mean loss in nats of the targets at each bin of places in the window, NaN if none
        is scored; empty likewise.
    """

    protocol: str
    length: int
    blocks: tuple[float, ...]
    by_position: tuple[float, ...]

    @property
    def loss(self) -> float:
        """The mean loss in nats for each token; NaN if the model does not take the length."""
        return statistics.fmean(self.blocks) if self.blocks else math.nan

    @property
    def error(self) -> float:
        """The standard error of the mean loss over blocks of text; NaN for fewer than two."""
        count = len(self.blocks)
        return deviation(self.blocks) / math.sqrt(count) if count > 1 else math.nan


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Perplexity of a model by length.

    Attributes:
      trained: T, the trained length in tokens.
      stride: of overlapping windows, in tokens.
      bin: places of a window in each bin of :attr:`Measurement.by_position`.
      targets: number of targets scored, the same for every measurement; a block of them is as long
        as the longest window.
      fingerprint: equal for results that scored the same targets.
      text_bytes: number of bytes that the targets stand for; None if unknown.
      measurements: for each way and length.
    """

    trained: int
    stride: int
    bin: int
    targets: int
    fingerprint: str
    text_bytes: int | None
    measurements: tuple[Measurement, ...]

    @property
    def protocols(self) -> tuple[str, ...]:
        """The ways of measuring."""
        return tuple(dict.fromkeys(m.protocol for m in self.measurements))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the windows, ascending."""
        return tuple(dict.fromkeys(m.length for m in self.measurements))

    def at(self, protocol: str, length: int) -> Measurement:
        """The measurement in this way at this length."""
        return next(m for m in self.measurements if (m.protocol, m.length) == (protocol, length))

    def bits_per_byte(self, loss: float) -> float:
        """Converts a mean loss in nats for each token to bits for each byte; NaN if unknown."""
        if self.text_bytes is None:
            return math.nan
        return loss / math.log(2) * self.targets / self.text_bytes

    def summary(self) -> dict[str, float]:
        """Perplexities by way and ratio to the trained length, where the model takes the length.

        If the bytes of the text are known, also the bits per byte in disjoint windows.
        """
        taken = [(m, m.length / self.trained) for m in self.measurements if m.blocks]
        scalars = {score_key(m.protocol, f): _perplexity(self, m.loss) for m, f in taken}
        if self.text_bytes is not None:
            bits = {f: self.bits_per_byte(m.loss) for m, f in taken if m.protocol == "disjoint"}
            scalars |= {f"bits_per_byte_{f:g}x": value for f, value in bits.items()}
        return scalars

    def table(self) -> str:
        """Perplexity by length, a column for each way."""
        columns = {PROTOCOLS[p]: (p, [self]) for p in self.protocols}
        parts = ["Perplexity", table(columns)]
        if self.text_bytes is not None:
            parts += ["Bits per byte", table(columns, Perplexity.bits_per_byte)]
        return "\n\n".join([*parts, note({"": [self]})])

    def to_json(self) -> dict[str, Any]:
        """The result in JSON types."""
        record = dataclasses.asdict(self)
        for item in record["measurements"]:
            item["by_position"] = [None if math.isnan(x) else x for x in item["by_position"]]
        return {"format": FORMAT, **record}

    @classmethod
    def from_json(cls, record: Any) -> Perplexity:
        """The result that :meth:`to_json` described.

        Raises:
          ValueError: ``record`` is something else.
        """
        values = read_record(record, cls, FORMAT)
        measurements = []
        for item in values.pop("measurements"):
            fields = read_record(item, Measurement)
            for name in ("blocks", "by_position"):
                fields[name] = tuple(math.nan if x is None else x for x in fields[name])
            measurements.append(Measurement(**fields))
        return cls(**values, measurements=tuple(measurements))


def measure(
    model: Transformer,
    variables: Any,
    texts: Sequence[np.ndarray],
    *,
    trained: int,
    lengths: Sequence[int],
    protocols: Sequence[str] = tuple(PROTOCOLS),
    stride: int,
    batch_tokens: int = 16_384,
    max_length: int | None = None,
    text_bytes: int | None = None,
    progress: Progress | None = None,
    programs: Programs | None = None,
) -> Perplexity:
    """Measures the perplexity of a model by length.

    Args:
      model, variables: what is judged.
      texts: token ids, each n x longest window + 1 of them for some n >= 1.
      trained: T, the trained length in tokens.
      lengths: tokens of the windows, ascending; each divides the last.
      protocols: ways of measuring, of :data:`PROTOCOLS`.
      stride: tokens by which overlapping windows move on.
      batch_tokens: tokens of one pass, unless one window has more.
      max_length: tokens that the model accepts; None: any number.
      text_bytes: bytes that all targets together stand for, if known.
      progress: called with the number of tokens done and the total.
      programs: plans, keeps and times the passes; None: a new one.

    Raises:
      ValueError: no texts, texts of other lengths, a stride longer than a window, or a pass that
        does not fit into the memory: nothing has been computed then.
    """
    sizes, tokens, is_target = _joined(texts, lengths[-1])
    plan = {
        (protocol, n): windows_of(sizes, n, stride if protocol == "overlapping" else n)
        for protocol in protocols
        for n in lengths
    }
    possible = {key for key in plan if fits(key[1], max_length)}
    total, before = sum(key[1] * len(plan[key][0]) for key in possible), 0
    bin = max(1, trained // BINS_PER_TRAINED_LENGTH)
    programs = programs or Programs()

    def advance(done: int) -> None:
        if progress is not None:
            progress(before + done, total)

    measured = {key: Measurement(*key, (), ()) for key in plan}
    # The longest windows come first, so that a pass too large for memory fails at once.
    for protocol, length in sorted(possible, key=lambda key: (-key[1], *key)):
        starts, first = plan[protocol, length]
        losses, places = losses_and_places(
            # A window that spans everything is left out, which saves a compilation.
            with_window(model, trained) if protocol == "windowed" and length > trained else model,
            variables,
            tokens,
            starts,
            first,
            length,
            batch_tokens,
            advance,
            programs,
            f"losses, {protocol}",
        )
        before += length * len(starts)
        found = losses[is_target], places[is_target] // bin
        means = _means(*found, lengths[-1], length, bin)
        measured[protocol, length] = Measurement(protocol, length, *means)
    return Perplexity(
        trained=trained,
        stride=stride,
        bin=bin,
        targets=sum(sizes),
        fingerprint=hashlib.sha256(np.array(sizes).tobytes() + tokens.tobytes()).hexdigest()[:16],
        text_bytes=text_bytes,
        measurements=tuple(measured.values()),
    )


def _joined(texts: Sequence[np.ndarray], block: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Returns the number of targets of each text, the tokens of all, and which have a target.

    Raises:
      ValueError: no texts, or texts of other lengths than n x ``block`` + 1.
    """
    sizes = [len(text) - 1 for text in texts]
    require(
        bool(sizes) and all(size > 0 and size % block == 0 for size in sizes),
        f"evaluation: expected texts of n x {block} + 1 tokens; got {[len(t) for t in texts]}",
    )
    tokens = np.concatenate(texts).astype(np.int32)
    is_target = np.ones(len(tokens), bool)
    is_target[np.cumsum([len(text) for text in texts]) - 1] = False
    return sizes, tokens, is_target


def _means(
    losses: np.ndarray, bins: np.ndarray, block: int, length: int, bin: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean loss of each block of targets, and of each bin of places in a window."""
    blocks = losses.reshape(-1, block).mean(axis=1)
    sums, counts = (np.bincount(bins, x, -(-length // bin)) for x in (losses, None))
    means = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
    return tuple(blocks.tolist()), tuple(means.tolist())


def require_same_targets(results: Mapping[str, Sequence[Perplexity]]) -> Perplexity:
    """Returns the first result if all can be compared.

    Raises:
      ValueError: no results, or results of different targets or measurements.
    """
    everything = [(name, result) for name, group in results.items() for result in group]
    require(len(everything) > 0, "no results to compare")
    name, first = everything[0]
    for other, result in everything[1:]:
        for field in ("trained", "fingerprint", "stride", "protocols", "lengths"):
            here, there = getattr(first, field), getattr(result, field)
            require(
                here == there,
                f"{name!r} and {other!r} were not judged alike: {field} is {here} and {there}",
            )
    return first


def score_key(protocol: str, factor: float) -> str:
    """The name of a perplexity in :meth:`Perplexity.summary`."""
    return f"perplexity_{'' if protocol == 'disjoint' else protocol + '_'}{factor:g}x"


def _perplexity(result: Perplexity, loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def table(
    columns: Mapping[str, tuple[str, Sequence[Perplexity]]], value: Quantity = _perplexity
) -> str:
    """A quantity by length; a column takes the results of all seeds in one way of measuring."""
    first = next(iter(columns.values()))[1][0]
    rows = [
        [
            f"{length:,}",
            f"{length / first.trained:g}x",
            *(_cell(group, protocol, length, value) for protocol, group in columns.values()),
        ]
        for length in first.lengths
    ]
    return text_table(["tokens", "of trained", *columns], rows)


def _cell(group: Sequence[Perplexity], protocol: str, length: int, value: Quantity) -> str:
    """Formats mean and spread as text."""
    if not any(result.at(protocol, length).blocks for result in group):
        return "-"
    middle, spread = mean_and_spread(group, protocol, length, value)
    decimals = 3 if middle < 10 else 2 if middle < 100 else 1
    return f"{middle:.{decimals}f}" + ("" if math.isnan(spread) else f" ± {spread:.{decimals}f}")


def mean_and_spread(
    group: Sequence[Perplexity], protocol: str, length: int, value: Quantity = _perplexity
) -> tuple[float, float]:
    """Mean and standard deviation over seeds; for one seed, the standard error over the text.

    The mean is NaN if no model takes the length, the spread if it cannot be estimated.
    """
    taken = [(r, r.at(protocol, length)) for r in group if r.at(protocol, length).blocks]
    values = [value(result, m.loss) for result, m in taken]
    if not values:
        return math.nan, math.nan
    if len(values) > 1:
        return mean(values), deviation(values)
    result, m = taken[0]
    low, high = (value(result, m.loss + sign * m.error) for sign in (-1, 1))
    return values[0], (high - low) / 2


def note(results: Mapping[str, Sequence[Perplexity]]) -> str:
    """Returns the sentences that explain the tables of these results."""
    first = require_same_targets(results)
    blocks = first.targets // first.lengths[-1]
    lines = [f"Every number is an average over the same {first.targets:,} tokens of held-out text."]
    if all(len(group) > 1 for group in results.values()):
        lines.append("± is the standard deviation over seeds.")
    elif blocks > 1:
        lines.append(
            f"± is the standard error over {blocks} blocks of text (over seeds, where there are "
            "several, the standard deviation). All models are scored on the same text, so a "
            "difference between two of them is more certain than their ± suggest."
        )
    if "overlapping" in first.protocols:
        lines.append(
            f"Overlapping windows move on by {first.stride:,} tokens and score only what is new."
        )
    if "windowed" in first.protocols:
        lines.append(f"The sliding attention window spans {first.trained:,} tokens.")
    if any(not m.blocks for group in results.values() for r in group for m in r.measurements):
        lines.append("A dash: the model does not take the length.")
    return " ".join(lines)
