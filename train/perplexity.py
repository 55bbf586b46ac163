"""Perplexity of held-out text by length: how well a language model uses, or bears, long inputs.

A model trained on sequences of T tokens is judged at multiples of T, or at other lengths, in three
ways:

* ``disjoint``: the text is cut into windows one after another, each of which starts without any
  context.
* ``overlapping``: windows move on by a stride, and only the tokens that are new in a window are
  scored, so that all but those of the first window have nearly the whole length as context.
* ``windowed``: disjoint windows again, with the same weights, but no token sees further back than
  T tokens (a sliding attention window). It tells apart what unseen distances do to a model and
  what unseen positions do.

Every way at every length scores the same targets: those of the longest disjoint windows (see
:func:`train.window_losses.windows`), and so does every model with the same tokenizer and trained
length. Logits exist for a few tokens at a time: memory grows with the length as the attention's
does.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tape_jax.config import choose, require
from tape_jax.generate import generate
from tape_jax.model import Transformer
from train.data import Comparison, Progress, Score, passkey
from train.grids import Grid, pool, read_record
from train.perplexity_result import (
    PROTOCOLS,
    Measurement,
    Perplexity,
    by_length,
    by_position,
    note,
    require_same_targets,
    score_key,
    table,
)
from train.window_losses import losses_and_places, windows_of, with_window

if TYPE_CHECKING:
    from train.data.tokenizers import Tokenizer
    from train.runs import Trained

FORMAT = "tape-jax evaluation of text, version 1"
FACTORS = (1, 2, 4, 8)
FRACTIONS = (0.5, 0.25, 0.125)
BINS_PER_TRAINED_LENGTH = 8


class TextTask(Protocol):
    """A task that models text (see :class:`train.data.text.Text`)."""

    @property
    def codec(self) -> Tokenizer: ...

    @property
    def sequence_length(self) -> int: ...

    @property
    def passkeys_asked(self) -> tuple[passkey.Form, Sequence[int]]: ...

    def evaluation_tokens(self, limit: int | None, *, validation: bool = False) -> np.ndarray: ...

    def evaluation_documents(self, limit_tokens: int | None) -> Iterator[np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How a language model is judged.

    Attributes:
      factors: lengths of the windows in multiples of the trained one, ascending; each divides the
        last, so that all lengths score the same targets.
      lengths: lengths in tokens instead, likewise; none: ``factors`` says them.
      protocols: which of :data:`PROTOCOLS`.
      tokens: at most so many held-out tokens are scored, rounded down to whole windows of the
        greatest length.
      stride: tokens by which overlapping windows move on; None: 256, or half the trained length if
        that is less.
      source: judge by all of this text, a source like the task's, instead of the held-out text.
      documents: whether windows stay inside documents, of which those shorter than the longest
        window are left out, rather than run through the documents joined together.
      batch_tokens: tokens of one pass, if a window has no more.
      passkey_lengths: tokens that the model is given to read in passkey retrieval, ascending; none:
        it is not asked. Lengths up to the trained one count as trained.
      passkey_depths: parts of the text, of equal size, in which the key is hidden in turn.
      passkey_trials: questions for each length and depth.
      seed: of keys and places in passkey retrieval.
      validation: judge by other held-out documents than the test does.
    """

    factors: tuple[int, ...] = FACTORS
    lengths: tuple[int, ...] = ()
    protocols: tuple[str, ...] = tuple(PROTOCOLS)
    tokens: int = 65_536
    stride: int | None = None
    source: str | None = None
    documents: bool = False
    batch_tokens: int = 16_384
    passkey_lengths: tuple[int, ...] = ()
    passkey_depths: int = 10
    passkey_trials: int = 20
    seed: int = 0
    validation: bool = False

    def __post_init__(self):
        require(bool(self.factors), f"evaluation: factors must be given; got {self.factors}")
        for name in ("factors", "lengths"):
            values = getattr(self, name)
            require(
                not values
                or (
                    values[0] >= 1
                    and list(values) == sorted(set(values))
                    and all(values[-1] % x == 0 for x in values)
                ),
                f"evaluation: {name} must be positive, ascend, and divide the last; got {values}",
            )
        for name in self.protocols:
            choose("evaluation protocol", name, PROTOCOLS)
        require(
            0 < len(self.protocols) == len(set(self.protocols)),
            f"evaluation: protocols must be given, each once; got {self.protocols}",
        )
        for name in ("tokens", "stride", "batch_tokens"):
            value = getattr(self, name)
            require(
                value is None or value >= 1, f"evaluation: {name} must be at least 1; got {value}"
            )
        require(
            not self.validation or (self.source is None and not self.documents),
            "evaluation: source and documents leave no text for a validation apart from the test",
        )
        if self.passkey_lengths:
            passkey.require_options(
                self.passkey_lengths, self.passkey_depths, self.passkey_trials, self.seed
            )

    def lengths_at(self, trained: int) -> tuple[int, ...]:
        """Tokens of the windows, ascending, for a model of this trained length."""
        return self.lengths or tuple(factor * trained for factor in self.factors)

    def stride_at(self, trained: int) -> int:
        """Tokens by which overlapping windows move on, for a model of this trained length."""
        return min(256, max(1, trained // 2)) if self.stride is None else self.stride


@dataclasses.dataclass(frozen=True)
class TextResult:
    """How a language model was judged.

    Attributes:
      perplexity: by length.
      passkey: retrieval by length and depth; None if it was not asked.
    """

    perplexity: Perplexity
    passkey: Grid | None = None

    def summary(self) -> dict[str, float]:
        """The scalars of both."""
        retrieval = {} if self.passkey is None else passkey.summary(self.passkey)
        return self.perplexity.summary() | retrieval

    def table(self) -> str:
        """The tables of both."""
        parts = [self.perplexity] + ([] if self.passkey is None else [self.passkey])
        return "\n\n".join(part.table() for part in parts)

    def to_json(self) -> dict[str, Any]:
        """The result in JSON types."""
        return {
            "format": FORMAT,
            "perplexity": self.perplexity.to_json(),
            "passkey": None if self.passkey is None else self.passkey.to_json(),
        }


def read_result(record: Any) -> TextResult:
    """The result that :meth:`TextResult.to_json` described.

    Raises:
      ValueError: ``record`` is something else.
    """
    values = read_record(record, TextResult, FORMAT)
    grid = values["passkey"]
    return TextResult(
        Perplexity.from_json(values["perplexity"]), None if grid is None else Grid.from_json(grid)
    )


def scores(task: TextTask | None = None) -> tuple[Score, ...]:
    """What language models are compared by: the longest windows first, then passkey retrieval."""
    chosen = [("disjoint", f) for f in (*reversed(FACTORS), *FRACTIONS)]
    chosen += [("overlapping", f) for f in (FACTORS[-1], 2, 1, *FRACTIONS)]
    chosen += [("windowed", FACTORS[-1])]
    perplexities = (
        Score(score_key(protocol, f), f"perplexity at {f:g}x, {PROTOCOLS[protocol]}", False)
        for protocol, f in chosen
    )
    return (*perplexities, *passkey.SCORES)


def evaluate(
    task: TextTask, trained: Trained, options: Evaluation, progress: Progress | None = None
) -> TextResult:
    """Judges a language model by held-out text and, if asked to, by passkey retrieval.

    Raises:
      ValueError: too little held-out text for one of the longest windows.
    """
    stages = 2 if options.passkey_lengths else 1
    report = progress or (lambda done, total: None)

    def stage(number: int) -> Progress:
        # The two count different things; a thousandth is fine enough for both.
        return lambda done, total: report(number * 1000 + 1000 * done // total, stages * 1000)

    length = task.sequence_length
    texts = held_out(task, options)
    measured = measure(
        trained.model,
        trained.variables,
        texts,
        trained=length,
        options=options,
        max_length=trained.max_length,
        text_bytes=_count_bytes(task.codec, texts),
        progress=stage(0),
    )
    if not options.passkey_lengths:
        return TextResult(measured)
    form, keys = task.passkeys_asked
    questions = passkey.questions(
        task.codec,
        options.passkey_lengths,
        form=form,
        keys=keys,
        depths=options.passkey_depths,
        trials=options.passkey_trials,
        seed=options.seed,
    )
    grid = passkey.retrieve(
        trained,
        questions,
        trained_length=length,
        batch_tokens=options.batch_tokens,
        progress=stage(1),
    )
    return TextResult(measured, grid)


def held_out(task: TextTask, options: Evaluation) -> list[np.ndarray]:
    """The texts whose targets are scored: integers, each n x longest window + 1 tokens.

    Raises:
      ValueError: not even one of the longest windows can be filled.
    """
    longest = options.lengths_at(task.sequence_length)[-1]
    blocks = options.tokens // longest
    require(
        blocks > 0,
        f"evaluation: tokens = {options.tokens} is less than the longest window of {longest} "
        f"({longest / task.sequence_length:g} x the trained length)",
    )
    sources: Iterable[np.ndarray] = (
        task.evaluation_documents(None)
        if options.documents
        else [task.evaluation_tokens(blocks * longest + 1, validation=options.validation)]
    )
    texts: list[np.ndarray] = []
    for source in sources:
        whole = min((len(source) - 1) // longest, blocks)
        if whole > 0:
            texts.append(np.asarray(source[: whole * longest + 1]))
            blocks -= whole
        if blocks == 0:
            break
    require(
        bool(texts),
        f"the held-out text has no {'document' if options.documents else 'stretch'} of "
        f"{longest + 1} tokens, which the longest window needs: set smaller evaluation.factors "
        "or lengths",
    )
    return texts


def measure(
    model: Transformer,
    variables: Any,
    texts: Sequence[np.ndarray],
    *,
    trained: int,
    options: Evaluation,
    max_length: int | None = None,
    text_bytes: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Perplexity by length.

    Args:
      model, variables: what is judged.
      texts: token ids, each n x longest window + 1 of them for some n >= 1.
      trained: T, the trained length in tokens.
      options: what to measure.
      max_length: tokens that the model accepts; None: any number.
      text_bytes: bytes that all targets together stand for, if known.
      progress: called with the numbers of tokens done and to be done.

    Raises:
      ValueError: no texts, texts of other lengths, or a stride longer than a window.
    """
    lengths = options.lengths_at(trained)
    block = lengths[-1]
    sizes = [len(text) - 1 for text in texts]
    require(
        bool(sizes) and all(size > 0 and size % block == 0 for size in sizes),
        f"evaluation: expected texts of n x {block} + 1 tokens; got {[len(t) for t in texts]}",
    )
    stride = options.stride_at(trained)
    tokens = np.concatenate(texts).astype(np.int32)
    is_target = np.ones(len(tokens), bool)
    is_target[np.cumsum([len(text) for text in texts]) - 1] = False
    plan = {
        (protocol, n): windows_of(sizes, n, stride if protocol == "overlapping" else n)
        for protocol in options.protocols
        for n in lengths
    }
    possible = {key for key in plan if max_length is None or key[1] <= max_length}
    total, before = sum(key[1] * len(plan[key][0]) for key in possible), 0
    bin = max(1, trained // BINS_PER_TRAINED_LENGTH)

    def advance(done: int) -> None:
        if progress is not None:
            progress(before + done, total)

    measurements = []
    for (protocol, length), (starts, first) in plan.items():
        if (protocol, length) not in possible:
            measurements.append(Measurement(protocol, length, (), ()))
            continue
        losses, places = losses_and_places(
            # A window that spans everything is left out, which saves a compilation.
            with_window(model, trained) if protocol == "windowed" and length > trained else model,
            variables,
            tokens,
            starts,
            first,
            length,
            options.batch_tokens,
            advance,
        )
        before += length * len(starts)
        losses, bins = losses[is_target], places[is_target] // bin
        blocks = losses.reshape(-1, block).mean(axis=1)
        sums, counts = (np.bincount(bins, x, -(-length // bin)) for x in (losses, None))
        means = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
        measurements.append(
            Measurement(protocol, length, tuple(blocks.tolist()), tuple(means.tolist()))
        )
    return Perplexity(
        trained=trained,
        stride=stride,
        bin=bin,
        targets=sum(sizes),
        fingerprint=hashlib.sha256(np.array(sizes).tobytes() + tokens.tobytes()).hexdigest()[:16],
        text_bytes=text_bytes,
        measurements=tuple(measurements),
    )


def _count_bytes(codec: Tokenizer, texts: Sequence[np.ndarray]) -> int | None:
    """Bytes of text that the targets stand for, if each token that is not special is a byte."""
    if codec.name != "bytes":
        return None
    special = list(codec.specials.values())
    return sum(int(np.isin(text[1:], special, invert=True).sum()) for text in texts)


def compare(task: TextTask, results: Mapping[str, Sequence[TextResult]]) -> Comparison:
    """Perplexity by length and by position, and passkey retrieval where all were asked.

    Raises:
      ValueError: results that scored different targets.
    """
    from train import plots

    found = {name: [r.perplexity for r in group] for name, group in results.items()}
    first = require_same_targets(found)
    sections = {
        f"Perplexity, {PROTOCOLS[protocol]}": table(
            {name: (protocol, group) for name, group in found.items()}
        )
        for protocol in first.protocols
    }
    if all(r.text_bytes for group in found.values() for r in group):
        columns = {name: (first.protocols[0], group) for name, group in found.items()}
        heading = f"Bits per byte, {PROTOCOLS[first.protocols[0]]}"
        sections[heading] = table(columns, Perplexity.bits_per_byte)
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
        sections["Passkey retrieval"] = passkey.section(grids)
        figures["passkey.png"] = plots.heat_maps(grids)
    lengths = ", ".join(f"{n:,}" for n in first.lengths)
    return Comparison(
        title="Language models beyond the trained length",
        introduction=(
            f"Trained on sequences of {first.trained:,} tokens and judged by held-out text in "
            f"windows of {lengths} tokens. Every window length scores the same {first.targets:,} "
            "targets."
        ),
        sections=sections,
        figures=figures,
    )


def samples(task: TextTask, trained: Trained, options: Evaluation) -> list[str]:
    """How the model continues two pieces of held-out text, always with the likeliest token."""
    half = min(task.sequence_length // 2, 64)
    if half < 1:
        return []
    text = np.asarray(task.evaluation_tokens(20 * half))
    prompts = [
        text[start : start + half].tolist() for start in (0, 10 * half) if start + half <= len(text)
    ]
    if not prompts:
        return []
    written = generate(trained.model, trained.variables, prompts, half)
    decode = task.codec.decode
    return [
        f"{decode(prompt)!r} is continued with {decode(np.asarray(row[half:]))!r}"
        for prompt, row in zip(prompts, written, strict=True)
    ]
