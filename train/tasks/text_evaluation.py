"""The evaluation of language models: perplexity of held-out text by length, and passkeys.

:mod:`train.evaluation.perplexity` defines the perplexities, :mod:`train.tasks.retrieval` the
passkeys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tape_jax import generate
from train.checks import choose, require
from train.evaluation import Progress, Trained
from train.evaluation.exact_match import Examples
from train.evaluation.grids import Grid, read_record
from train.evaluation.perplexity import PROTOCOLS, Perplexity, measure, score_key
from train.tasks import Score, retrieval

if TYPE_CHECKING:
    from train.data.tokenizers import Tokenizer

FORMAT = "tape-jax evaluation of text, version 1"
FACTORS = (1, 2, 4, 8)
FRACTIONS = (0.5, 0.25, 0.125)


class TextTask(Protocol):
    """A task that models text (see :class:`train.tasks.text.Text`)."""

    @property
    def codec(self) -> Tokenizer: ...

    @property
    def sequence_length(self) -> int: ...

    @property
    def passkeys_asked(self) -> tuple[retrieval.Form, Sequence[int]]: ...

    def evaluation_tokens(self, limit: int | None, *, validation: bool = False) -> np.ndarray: ...

    def evaluation_documents(self, limit_tokens: int | None) -> Iterator[np.ndarray]: ...


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The options of an evaluation of a language model.

    Attributes:
      factors: lengths of the windows in multiples of the trained one, ascending; each divides the
        last, so that all lengths score the same targets.
      lengths: lengths in tokens instead, likewise; empty: ``factors`` sets them.
      protocols: which of :data:`PROTOCOLS`.
      tokens: the most held-out tokens that are scored, rounded down to whole windows of the
        greatest length.
      stride: tokens by which overlapping windows move on; None: 256, or half the trained length or
        the shortest window if that is less.
      source: judge by all of this text, a source like the task's, instead of the held-out text.
      documents: whether windows stay inside documents, rather than run through the joined
        documents. Those shorter than the longest window are then left out. A model that was trained
        with ``task.packing = documents`` has seen no document after another: judge it so.
      batch_tokens: tokens of one pass, unless one window has more.
      passkey_lengths: tokens that the model reads in passkey retrieval, ascending; empty: it is not
        asked. Lengths up to the trained one count as trained.
      passkey_depths: number of equal parts of the text that hide the key in turn.
      passkey_trials: questions for each length and depth.
      seed: decides keys and places in passkey retrieval.
      validation: judge by other held-out text than the test does.
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
            retrieval.require_options(
                self.passkey_lengths, self.passkey_depths, self.passkey_trials, self.seed
            )

    def lengths_at(self, trained: int) -> tuple[int, ...]:
        """Tokens of the windows, ascending, for a model of this trained length."""
        return self.lengths or tuple(factor * trained for factor in self.factors)

    def stride_at(self, trained: int) -> int:
        """Tokens by which overlapping windows move on, for a model of this trained length.

        Raises:
          ValueError: the stride exceeds the shortest window.
        """
        usual = min(256, max(1, trained // 2))
        if "overlapping" not in self.protocols:
            return usual if self.stride is None else self.stride
        shortest = self.lengths_at(trained)[0]
        stride = min(usual, shortest) if self.stride is None else self.stride
        require(
            stride <= shortest,
            f"evaluation: stride = {stride} exceeds the shortest window, of {shortest} tokens: "
            "overlapping windows would leave out what is between them",
        )
        return stride


@dataclasses.dataclass(frozen=True)
class TextResult:
    """The result of an evaluation of a language model.

    Attributes:
      perplexity: by length.
      passkey: retrieval by length and depth; None if it was not asked.
    """

    perplexity: Perplexity
    passkey: Grid | None = None

    def summary(self) -> dict[str, float]:
        """Returns the scalars of perplexity and of passkey retrieval."""
        passkeys = {} if self.passkey is None else retrieval.summary(self.passkey)
        return self.perplexity.summary() | passkeys

    def table(self) -> str:
        """Returns the tables of perplexity and of passkey retrieval."""
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
    perplexity, grid = Perplexity.from_json(values["perplexity"]), values["passkey"]
    if grid is None:
        return TextResult(perplexity)
    wording = retrieval.wording(perplexity.trained)
    return TextResult(perplexity, Grid.from_json(grid, wording))


def scores() -> tuple[Score, ...]:
    """Returns the scores that compare language models: the longest windows first, then passkeys."""
    chosen = [("disjoint", f) for f in (*reversed(FACTORS), *FRACTIONS)]
    chosen += [("overlapping", f) for f in (FACTORS[-1], 2, 1, *FRACTIONS)]
    chosen += [("windowed", FACTORS[-1])]
    return (*(perplexity_score(*which) for which in chosen), *retrieval.SCORES)


def perplexity_score(protocol: str, factor: float) -> Score:
    """The perplexity in windows of ``factor`` times the trained length."""
    label = f"perplexity at {factor:g}x, {PROTOCOLS[protocol]}"
    return Score(score_key(protocol, factor), label, False)


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
        lengths=options.lengths_at(length),
        protocols=options.protocols,
        stride=options.stride_at(length),
        batch_tokens=options.batch_tokens,
        max_length=trained.max_length,
        text_bytes=_count_bytes(task.codec, texts),
        progress=stage(0),
        programs=getattr(trained, "programs", None),
    )
    if not options.passkey_lengths:
        return TextResult(measured)
    grid = retrieval.retrieve(
        trained,
        _passkeys(task, options),
        trained_length=length,
        batch_tokens=options.batch_tokens,
        progress=stage(1),
    )
    return TextResult(measured, grid)


def check(task: TextTask, options: Evaluation) -> None:
    """Checks options before :func:`evaluate`.

    Raises:
      ValueError: too little text, a stride or length that does not fit, or a validation that no
        score of :func:`scores` could judge.
    """
    length = task.sequence_length
    options.stride_at(length)
    held_out(task, options)
    if options.passkey_lengths:
        _passkeys(task, dataclasses.replace(options, passkey_depths=1, passkey_trials=1))
    elif options.validation:
        factors = [tokens / length for tokens in options.lengths_at(length)]
        asked = [score_key(name, factor) for name in options.protocols for factor in factors]
        known = [score.key for score in scores()]
        require(
            not set(known).isdisjoint(asked),
            f"evaluation: a validation needs one of the scores {', '.join(known)}, by factors, "
            f"lengths or passkey_lengths; got only {', '.join(asked)}",
        )


def _passkeys(task: TextTask, options: Evaluation) -> list[Examples]:
    form, keys = task.passkeys_asked
    return retrieval.questions(
        task.codec,
        options.passkey_lengths,
        form=form,
        keys=keys,
        depths=options.passkey_depths,
        trials=options.passkey_trials,
        seed=options.seed,
    )


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
        f"{longest + 1:,} tokens, which the longest window needs: set smaller evaluation.factors "
        "or lengths, a larger task.held_out, or name a text to judge by in evaluation.source",
    )
    return texts


def _count_bytes(codec: Tokenizer, texts: Sequence[np.ndarray]) -> int | None:
    """Bytes of text that the targets stand for, if each token that is not special is a byte."""
    if codec.name != "bytes":
        return None
    special = list(codec.specials.values())
    return sum(int(np.isin(text[1:], special, invert=True).sum()) for text in texts)


def samples(task: TextTask, trained: Trained, options: Evaluation) -> list[str]:
    """Returns lines that show how the model continues two pieces of held-out text greedily."""
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
