"""Passkey retrieval as a task of its own, small enough to learn on a CPU.

The questions are those of :mod:`train.tasks.retrieval` in bytes, without the announcement and with
one statement of the key; some keys are held out of training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from tape_jax import generate
from train.checks import require
from train.data import synthetic, tokenizers
from train.evaluation import Progress, Trained, fits
from train.evaluation.exact_match import Examples
from train.evaluation.grids import Grid, Wording
from train.tasks import Score
from train.tasks.questions import GridTask, scores_by_range
from train.tasks.retrieval import (
    FILLER,
    SHORT,
    compose,
    filler_tokens,
    pieces,
    questions,
    require_options,
    retrieve,
    split_keys,
    training_batch,
    wording,
)


@dataclasses.dataclass(frozen=True)
class PasskeyEvaluation:
    """The options of an evaluation of passkey retrieval.

    Attributes:
      factors: lengths in multiples of the trained one, ascending.
      depths: number of equal parts of the text that hide the key in turn.
      trials: questions for each length and depth.
      seed: decides keys and places.
      batch_tokens: tokens of one pass, unless one question has more.
    """

    factors: tuple[int, ...] = (1, 2, 4)
    depths: int = 10
    trials: int = 20
    seed: int = 0
    batch_tokens: int = 16_384

    def __post_init__(self):
        require_options(self.factors, self.depths, self.trials, self.seed)
        synthetic.require_positive("evaluation", batch_tokens=self.batch_tokens)


@dataclasses.dataclass(frozen=True)
class Passkey(GridTask):
    """Passkey retrieval learned from scratch, in bytes (:data:`train.tasks.retrieval.SHORT`).

    Every training example is a question of one length. Its key is at a uniformly random place and
    its filler starts at a random byte; the loss counts only the answer. A hash holds one key in ten
    out of training, and evaluation asks only for those.

    Attributes:
      sequence_length: T, the tokens of every training example.
      digits: of a key.
    """

    Evaluation: ClassVar[type] = PasskeyEvaluation
    kind: ClassVar[str] = "passkey"

    sequence_length: int = 128
    digits: int = 3

    def __post_init__(self):
        synthetic.require_positive("passkey", sequence_length=self.sequence_length)
        require(2 <= self.digits <= 6, f"passkey: digits must be in 2..6; got {self.digits}")
        parts = pieces(self.codec, SHORT, str(_keys(self.digits)[-1]))
        compose(parts, filler_tokens(self.codec, FILLER, 1), self.sequence_length, 0)

    @property
    def codec(self) -> tokenizers.Tokenizer:
        """The tokenizer: bytes."""
        return tokenizers.load("bytes")

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return self.codec.vocab_size

    @property
    def digit_ids(self) -> tuple[int, ...]:
        """Token ids of the digits 0..9, for encodings that count places inside a number."""
        return tuple(self.codec.encode("0123456789"))

    def keys(self, *, held_out: bool) -> np.ndarray:
        """The keys held out of training, or those trained on: int [K], ascending."""
        return split_keys(_keys(self.digits))[held_out]

    def examples_to_learn(self, rng: np.random.Generator, size: int) -> synthetic.Batch:
        """Questions about keys that are not held out; only the answer counts."""
        keys = self.keys(held_out=False)
        return training_batch(self.codec, SHORT, keys, self.sequence_length, size, rng)

    @property
    def scores(self) -> tuple[Score, ...]:
        """Keys found beyond the trained length, and at it."""
        return scores_by_range({"exact_match": ""}, f"{self.sequence_length} tokens", "at")

    def evaluate(
        self, trained: Trained, options: PasskeyEvaluation, progress: Progress | None = None
    ) -> Grid:
        """Measures exact match by place and length."""
        return retrieve(
            trained,
            self._questions(options.factors, options.depths, options.trials, options.seed),
            trained_length=self.sequence_length,
            batch_tokens=options.batch_tokens,
            progress=progress,
        )

    def _questions(
        self, factors: Sequence[int], depths: int, trials: int, seed: int
    ) -> list[Examples]:
        lengths = [factor * self.sequence_length for factor in factors]
        keys = self.keys(held_out=True).tolist()
        return questions(
            self.codec, lengths, depths=depths, trials=trials, seed=seed, form=SHORT, keys=keys
        )

    def encode(self, text: str) -> list[int]:
        """The bytes of a text as tokens."""
        return list(self.codec.encode(text))

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The tokens as text."""
        return self.codec.decode(tokens)

    @property
    def wording(self) -> Wording:
        return wording(self.sequence_length)

    def samples(self, trained: Trained, options: PasskeyEvaluation) -> list[str]:
        """Returns lines that show the model's answer to one question of each length."""
        lines = []
        for examples in self._questions(options.factors, 1, 1, options.seed + 1):
            length, start = examples.tokens.shape[1] - 1, int(examples.prompt_lengths[0])
            if not fits(length, trained.max_length):
                continue
            wanted = examples.tokens[0, start:]
            # The cache has a slot for the last token, though it is not fed back: drop the first.
            prompt = examples.tokens[:, 1:start]
            written = generate(trained.model, trained.variables, prompt.tolist(), len(wanted))
            found, right = map(self.codec.decode, (np.asarray(written)[0, -len(wanted) :], wanted))
            verdict = "right" if found == right else f"wrong: it is {right!r}"
            lines.append(f"in {length:,} bytes: {found!r} ({verdict})")
        return lines


def _keys(digits: int) -> range:
    return range(10 ** (digits - 1), 10**digits)
