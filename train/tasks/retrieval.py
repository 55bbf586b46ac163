"""Passkey retrieval: a long irrelevant text hides a number and asks for it at its end.

The form is that of the context extension of TAPE (arXiv:2501.00712), taken there from
Mohtashami and Jaggi (arXiv:2305.16300): an announcement, filler sentences, a line that states a key
of 1..50,000 twice, more filler, and a question that ends where the key must follow. An answer is
right if the greedy continuation is exactly the tokens of the key.

**Lengths.** A question of length L gives the model exactly L tokens to read, whatever the
tokenizer: the prompt, and all tokens of the answer but the last. The filler takes up the rest.

**Depths.** The places where the key may stand are cut into parts of equal size, from the start of
the filler (0 %) to its end (100 %), and every part has equally many questions, each at a random
place in it.

:mod:`train.tasks.passkey` is a task that learns it from scratch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from train.checks import require
from train.data import held_out, synthetic, tokenizers
from train.evaluation import Progress, Trained, fits, part_of
from train.evaluation.exact_match import AtPlaces, Examples, exact_match
from train.evaluation.grids import Grid, Wording, tally
from train.tasks import Score
from train.tasks.questions import EVALUATION


@dataclasses.dataclass(frozen=True)
class Form:
    """The wording of a question.

    Attributes:
      announcement: the start of the text.
      filler: sentences that are repeated as often as necessary.
      statement: states the ``{key}``.
      question: the end of the prompt.
      answer: what must follow it.
    """

    announcement: str
    filler: str
    statement: str
    question: str
    answer: str


FILLER = (
    "Grass grows on the hill. The sky is wide and clear. The sun shines all day. "
    "The grass bends in the wind. At night the sky is dark. "
)
LONG = Form(
    announcement="A number that matters is hidden in the text below. Find it and remember it.\n",
    filler=FILLER,
    statement="\nThe pass key is {key}. Remember it: {key} is the pass key.\n",
    question="\nWhat is the pass key? The pass key is",
    answer=" {key}",
)
SHORT = Form(
    announcement="", filler=FILLER, statement=" <key={key}> ", question=" <key=", answer="{key}>"
)
LONG_KEYS = range(1, 50_001)
# Forms by name, with the keys that they hide.
FORMS = {"long": (LONG, LONG_KEYS), "short": (SHORT, range(100, 1000))}


FRACTIONS = (8, 4, 2, 1, 0.5, 0.25, 0.125)


class Pieces(NamedTuple):
    """The tokens of one question without the filler."""

    start: list[int]
    statement: list[int]
    question: list[int]
    answer: list[int]

    @property
    def size(self) -> int:
        """Tokens to be read without filler: all except the last one of the answer."""
        return sum(map(len, self)) - 1


def pieces(codec: tokenizers.Tokenizer, form: Form, key: str) -> Pieces:
    """The tokens of a question with this key."""
    start = [] if codec.bos is None else [codec.bos]
    question = codec.encode(form.question)
    whole = codec.encode(form.question + form.answer.format(key=key))
    # A tokenizer may join the end of the question to the answer, which then begins there.
    same = next(
        (i for i, (a, b) in enumerate(zip(question, whole, strict=False)) if a != b), len(question)
    )
    return Pieces(
        start + codec.encode(form.announcement),
        codec.encode(form.statement.format(key=key)),
        whole[:same],
        whole[same:],
    )


def filler_tokens(codec: tokenizers.Tokenizer, text: str, count: int) -> np.ndarray:
    """Returns at least ``count`` tokens of the sentences ``text``, repeated: int32."""
    times = 1
    while len(tokens := codec.encode(text * times)) < count:
        times *= 2
    return np.array(tokens, np.int32)


def compose(parts: Pieces, filler: np.ndarray, length: int, place: float) -> np.ndarray:
    """Composes a question of ``length`` tokens to read and the last token of its answer.

    Args:
      parts: all except the filler.
      filler: tokens; as many are taken as are missing.
      length: tokens that the model reads.
      place: share of the filler that stands before the key, from 0 to 1.

    Returns:
      int32 [length + 1]

    Raises:
      ValueError: a length that is too small for the question.
    """
    missing = length - parts.size
    require(
        missing >= 0,
        f"passkey: a length of {length} tokens is too small; without any filler it takes "
        f"{parts.size}",
    )
    before = round(place * missing)
    return np.concatenate(
        [
            parts.start,
            filler[:before],
            parts.statement,
            filler[before:missing],
            parts.question,
            parts.answer,
        ]
    ).astype(np.int32)


def questions(
    codec: tokenizers.Tokenizer,
    lengths: Sequence[int],
    *,
    depths: int = 10,
    trials: int = 20,
    seed: int = 0,
    form: Form = LONG,
    keys: Sequence[int] = LONG_KEYS,
) -> list[Examples]:
    """Questions of each length, with depth and length as cells.

    Those of one length do not depend on which other lengths are asked for.

    Args:
      codec: of the model.
      lengths: tokens to be read, ascending.
      depths: number of parts that hide the key in turn.
      trials: questions for each depth.
      seed: decides keys and places.
      form: their wording.
      keys: to choose from.

    Raises:
      ValueError: an argument out of range, or a length that is too small.
    """
    require_options(lengths, depths, trials, seed)
    filler, asked = filler_tokens(codec, form.filler, lengths[-1]), []
    for column, length in enumerate(lengths):
        rng = synthetic.generator(seed, EVALUATION, length)
        rows, prompts = [], []
        cells = [(depth, column) for depth in range(depths) for _ in range(trials)]
        for depth, _ in cells:
            parts = pieces(codec, form, str(keys[int(rng.integers(len(keys)))]))
            rows.append(compose(parts, filler, length, (depth + rng.random()) / depths))
            prompts.append(length + 1 - len(parts.answer))
        ends = np.full(len(rows), length + 1)
        asked.append(Examples(np.stack(rows), np.array(prompts), ends, np.array(cells)))
    return asked


@functools.cache
def split_keys(keys: range) -> tuple[np.ndarray, np.ndarray]:
    """Keys to train on, and keys held out; int [K] each, ascending."""
    out = np.array([held_out.key(key) for key in keys])
    return np.array(keys)[~out], np.array(keys)[out]


def training_batch(
    codec: tokenizers.Tokenizer,
    form: Form,
    keys: np.ndarray,
    length: int,
    size: int,
    rng: np.random.Generator,
) -> synthetic.Batch:
    """Questions to learn from: the key at any place, the filler starting anywhere.

    Returns:
      ``inputs`` and ``targets``, int32 [size, length], and ``weights``, float32 [size, length]: 1
      where the target belongs to the answer, else 0.

    Raises:
      ValueError: a length that is too small.
    """
    period, filler = _filler(codec, form.filler, length)
    chosen = rng.choice(keys, size)
    starts, places = rng.integers(period, size=size), rng.random(size)
    parts = [pieces(codec, form, str(key)) for key in chosen]
    rows = [
        compose(part, filler[start:], length, place)
        for part, start, place in zip(parts, starts, places, strict=True)
    ]
    tokens = np.stack(rows)
    answers = np.array([len(part.answer) for part in parts])
    counts = np.arange(length) >= length - answers[:, None]
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": counts.astype(np.float32),
    }


@functools.lru_cache(maxsize=8)
def _filler(codec: tokenizers.Tokenizer, text: str, length: int) -> tuple[int, np.ndarray]:
    """The number of tokens of ``text``, and filler of at least ``length`` more tokens."""
    period = len(codec.encode(text))
    return period, filler_tokens(codec, text, period + length)


def require_options(lengths: Sequence[int], depths: int, trials: int, seed: int) -> None:
    """Raises ValueError unless :func:`questions` accepts the options."""
    synthetic.require_positive("passkey", depths=depths, trials=trials)
    synthetic.require_seed("passkey", seed)
    require(
        len(lengths) > 0 and lengths[0] > 0 and list(lengths) == sorted(set(lengths)),
        f"passkey: lengths must be positive and ascend; got {tuple(lengths)}",
    )
    require(depths <= 50, f"passkey: depths must be at most 50; got {depths}")


def retrieve(
    trained: Trained,
    asked: Sequence[Examples],
    *,
    trained_length: int,
    batch_tokens: int = 16_384,
    progress: Progress | None = None,
) -> Grid:
    """Measures exact match by depth (rows) and length (columns).

    Args:
      trained: the model. Questions too long for it are not asked.
      asked: from :func:`questions`.
      trained_length: the longest length that counts as trained, in tokens.
      batch_tokens: tokens of one pass, unless one question has more.
      progress: called with the number of questions done and the total.
    """
    lengths = [examples.tokens.shape[1] - 1 for examples in asked]
    able = [e for e, n in zip(asked, lengths, strict=True) if fits(n, trained.max_length)]
    total = sum(len(examples) for examples in able)
    programs = getattr(trained, "programs", None)
    right: list[np.ndarray] = []
    # The longest come first, so that a pass too large for memory fails at once.
    for examples in reversed(able):
        found = exact_match(
            AtPlaces(trained.model),
            trained.variables,
            examples,
            batch_size=max(1, batch_tokens // (examples.tokens.shape[1] - 1)),
            shapes=1,
            progress=part_of(progress, sum(x.size for x in right), total),
            programs=programs,
        )
        right.append(found)
    depths = 1 + max(int(examples.cells[:, 0].max()) for examples in asked)
    shape = (depths, len(lengths))
    none = np.zeros((0, 2), np.int64), np.zeros(0, bool)
    return Grid(
        rows=tuple(int(100 * (depth + 0.5) / depths) for depth in range(depths)),
        columns=tuple(lengths),
        lengths=np.broadcast_to(lengths, shape),
        **tally(
            np.concatenate([none[0], *(examples.cells for examples in reversed(able))]),
            np.concatenate([none[1], *right]),
            shape,
        ),
        shared=np.zeros(shape, bool),
        trained=trained_length,
        wording=wording(trained_length),
    )


def wording(trained_length: int) -> Wording:
    """Returns the words for the questions in tables and figures."""
    return Wording(
        title="Passkey retrieval by place and length",
        rows="place of the key, % of the text",
        columns="length, tokens",
        unit="tokens",
        questions="keys",
        cells="places and lengths",
        trained=f"up to {trained_length:,} tokens",
    )


SCORES = (
    Score("passkey_outside", "passkeys beyond the trained length, %", True, 100),
    Score("passkey_inside", "passkeys up to the trained length, %", True, 100),
    *(Score(f"passkey_{f:g}x", f"passkeys at {f:g}x, %", True, 100) for f in FRACTIONS),
)


def summary(grid: Grid) -> dict[str, float]:
    """Averages inside and beyond the trained range and at each length, as in :data:`SCORES`."""
    averages = {name.replace("exact_match", "passkey"): x for name, x in grid.summary().items()}
    for length in grid.columns:
        found = grid.proportion(grid.lengths == length)
        if found.count:
            averages[f"passkey_{length / grid.trained:g}x"] = found.value
    return averages
