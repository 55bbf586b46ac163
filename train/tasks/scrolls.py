"""SCROLLS: questions about long documents, and their summaries, answered in writing.

The setting is that of TAPE's fine-tuning (arXiv:2501.00712, Table 5) on the benchmark's subsets and
splits (:mod:`train.tasks.scrolls_files`), judged by its metrics
(:mod:`train.tasks.scrolls_metrics`).

**Prompts.** The benchmark writes the question before the document. Here, the question follows the
document, so that it stands beside the answer whatever the document's length::

    DOCUMENT                                DOCUMENT

    QUESTION                                Summary:
    Answer:                                 SUMMARY<eos>
    ANSWER<eos>

**Truncation.** A prompt and the longest answer, ``answer_length`` tokens, take at most
``sequence_length`` tokens together. If they would take more, the end of the document is cut off, as
in the benchmark's own baselines; the question never is. A training example keeps the same room, so
that its prompt is that of evaluation; a longer answer loses its end, and then has no ``<eos>``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import grain
import numpy as np
import tqdm

from train.checks import choose, require
from train.data import synthetic
from train.data.tokenizers import Tokenized, Tokenizer
from train.evaluation import Progress, Trained
from train.evaluation.continuations import Continuer, continuations
from train.evaluation.programs import Programs
from train.tasks import Score
from train.tasks.scrolls_files import SPLITS, SUBSETS, ScrollsRecord, read
from train.tasks.scrolls_metrics import SCORES, Outcome, score

_CHARACTERS_PER_TOKEN = 8
_SAMPLES = 3


@dataclasses.dataclass(frozen=True)
class ScrollsEvaluation:
    """The options of an evaluation on a subset of SCROLLS.

    Attributes:
      split: ``validation``, ``train``, or ``test``, whose right outputs are not published: it gives
        predictions without scores.
      limit: number of examples, from the first; None: all, as the benchmark expects.
      batch_size: examples that are answered at once.
      shapes: how many lengths of prompts to compile for.
    """

    split: str = "validation"
    limit: int | None = None
    batch_size: int = 32
    shapes: int = 4

    def __post_init__(self):
        choose("split of SCROLLS", self.split, SPLITS)
        for name in ("limit", "batch_size", "shapes"):
            value = getattr(self, name)
            require(
                value is None or value >= 1, f"evaluation: {name} must be at least 1; got {value}"
            )


class Question(NamedTuple):
    """An example to be answered.

    Attributes:
      prompt: token ids, int32 [P].
      outputs: the right answers; empty if they are not published.
    """

    prompt: np.ndarray
    outputs: list[str]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of examples as tokens (see the module docstring).

    Attributes:
      codec: the tokenizer, which has ``<eos>``.
      length: T.
      longest_answer: tokens, ``<eos>`` included.
    """

    codec: Tokenizer
    length: int
    longest_answer: int

    @property
    def stop(self) -> int:
        """The token that ends an answer."""
        assert self.codec.eos is not None
        return self.codec.eos

    @property
    def pad(self) -> int:
        """The token of padding."""
        return self.stop if self.codec.pad is None else self.codec.pad

    def prompt(self, record: ScrollsRecord) -> np.ndarray:
        """The tokens that the answer must follow, int32 [P].

        Raises:
          ValueError: if the question alone leaves no room for the answer.
        """
        ending = f"{record.question}\nAnswer:\n" if record.question else "Summary:\n"
        start = [] if self.codec.bos is None else [self.codec.bos]
        end = self.codec.encode(f"\n\n{ending}")
        room = self.length - self.longest_answer - len(start) - len(end)
        require(
            room >= 0,
            f"{record.where}: the question of example {record.id!r} takes {len(end)} tokens and "
            f"its answer up to {self.longest_answer}, which do not fit into sequence_length = "
            f"{self.length}",
        )
        return np.array([*start, *self._first_tokens(record.document, room), *end], np.int32)

    def answer(self, output: str) -> np.ndarray:
        """The tokens of an answer and ``<eos>``, cut to the longest: int32 [A]."""
        return np.array([*self.codec.encode(output), self.stop][: self.longest_answer], np.int32)

    def _first_tokens(self, text: str, count: int) -> list[int]:
        """The first ``count`` tokens of a text, reading little more of it than necessary."""
        size = _CHARACTERS_PER_TOKEN * (count + 1)
        while len(tokens := self.codec.encode(text[:size])) <= count and size < len(text):
            size *= 2
        return tokens[:count]


@dataclasses.dataclass(frozen=True)
class Scrolls(Tokenized):
    """One subset of SCROLLS (the module docstring describes prompts and truncation).

    Constructing it reads no data. Training visits every pair of input and output of the ``train``
    split, in a new pseudo-random order in each pass.

    Attributes:
      subset: one of :data:`train.tasks.scrolls_files.SUBSETS`.
      data: folder of the benchmark, with ``qasper.zip`` or ``qasper/`` in it and so on; or one
        archive.
      sequence_length: T.
      answer_length: tokens of the longest answer, ``<eos>`` included; None: the subset's.
    """

    Evaluation: ClassVar[type] = ScrollsEvaluation

    subset: str = "qasper"
    data: str = "scrolls"
    sequence_length: int = 1024
    answer_length: int | None = None

    def __post_init__(self):
        super().__post_init__()
        choose("subset of SCROLLS", self.subset, SUBSETS)
        synthetic.require_positive("scrolls", sequence_length=self.sequence_length)
        if self.answer_length is not None:
            synthetic.require_positive("scrolls", answer_length=self.answer_length)
        require(
            self.longest_answer < self.sequence_length,
            f"scrolls: an answer of {self.longest_answer} tokens leaves no room for a question in "
            f"sequence_length = {self.sequence_length}; give answer_length",
        )

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest answer, ``<eos>`` included."""
        return self.answer_length or SUBSETS[self.subset].answer_length

    @property
    def codec(self) -> Tokenizer:
        """The tokenizer.

        Raises:
          ValueError: if there is none, it has more tokens than ``vocab_size``, or none that ends a
            text.
        """
        codec = super().codec
        require(
            codec.eos is not None,
            f"the tokenizer {self.tokenizer!r} has no token that ends a text; its special tokens "
            f"are {sorted(codec.specials)}",
        )
        return codec

    @property
    def layout(self) -> Layout:
        """The layout of examples as tokens."""
        return Layout(self.codec, self.sequence_length, self.longest_answer)

    def dataset(
        self, seed: int, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> grain.IterDataset:
        """The endless stream of training batches, in which the loss counts only the answers.

        :func:`train.data.synthetic.dataset` divides it among processes. The iterator raises
        ValueError if restored on other examples (:class:`train.data.synthetic.OfOneText`).

        Args:
          seed: 0..2**32 - 1, the same in all processes.
          batch_size: examples of one training step, of all processes together.
          process_index, process_count: which share of each step to read.

        Raises:
          ValueError: a batch that does not divide among the processes, an argument out of range, or
            data that cannot be read.
        """
        layout = self.layout
        rows = _Rows(list(self._training_pairs(layout)), self.sequence_length, layout.pad)
        require(len(rows) > 0, f"{self.data}: the training split of {self.subset} is empty")
        order = grain.MapDataset.source(rows).shuffle(seed=seed).repeat()

        def batch(_: int, index: int, size: int) -> synthetic.Batch:
            return order.batch(size)[index]

        share = process_index, process_count
        batches = synthetic.dataset("scrolls", batch, seed, batch_size, *share)
        return synthetic.OfOneText(batches, rows.digest())

    def _training_pairs(self, layout: Layout) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        records = read(self.data, self.subset, "train")
        for record in tqdm.tqdm(
            records, f"tokenising {self.subset}", unit=" examples", disable=None, delay=2
        ):
            assert record.output is not None
            yield layout.prompt(record), layout.answer(record.output)

    def questions(self, split: str, limit: int | None = None) -> dict[str, Question]:
        """The first ``limit`` examples of a split, or all, by id, each with all its outputs.

        Raises:
          ValueError: data that cannot be read, or a question that does not fit.
        """
        questions: dict[str, Question] = {}
        layout = self.layout
        for record in read(self.data, self.subset, split):
            if record.id not in questions:
                if len(questions) == limit:
                    continue
                questions[record.id] = Question(layout.prompt(record), [])
            if record.output is not None:
                questions[record.id].outputs.append(record.output)
        require(len(questions) > 0, f"{self.data}: the {split} split of {self.subset} is empty")
        return questions

    @property
    def scores(self) -> tuple[Score, ...]:
        """The scores of the subset's metric."""
        return SCORES[SUBSETS[self.subset].metric]

    def evaluate(
        self, trained: Trained, options: ScrollsEvaluation, progress: Progress | None = None
    ) -> Outcome:
        """Answers the questions of a split greedily and judges the answers."""
        questions = self.questions(options.split, options.limit)
        predictions = self._predict(trained, questions, options, progress)
        outputs = {name: question.outputs for name, question in questions.items()}
        scores = score(self.subset, predictions, outputs) if any(outputs.values()) else {}
        return Outcome(self.subset, options.split, predictions, scores)

    def _predict(
        self,
        trained: Trained,
        questions: Mapping[str, Question],
        options: ScrollsEvaluation,
        progress: Progress | None = None,
    ) -> dict[str, str]:
        """Returns the model's answers, by id."""
        layout, programs = self.layout, getattr(trained, "programs", None) or Programs()
        continuer = Continuer(
            trained.model,
            trained.variables,
            pad=layout.pad,
            stops=(layout.stop,),
            batch_size=options.batch_size,
            programs=programs,
        )
        prompts = [question.prompt for question in questions.values()]
        answers = continuations(
            continuer, prompts, layout.longest_answer, shapes=options.shapes, progress=progress
        )
        texts = (layout.codec.decode(answer).strip() for answer in answers)
        return dict(zip(questions, texts, strict=True))

    def read_result(self, record: Any) -> Outcome:
        """The outcome that ``to_json`` described."""
        return Outcome.from_json(record)

    def samples(self, trained: Trained, options: ScrollsEvaluation) -> list[str]:
        """Returns lines with the model's answers to the first questions, and the right ones."""
        questions = self.questions(options.split, _SAMPLES)
        predictions = self._predict(trained, questions, options)
        return [
            f"{name}: {predictions[name]!r} (right: {' or '.join(map(repr, question.outputs))})"
            if question.outputs
            else f"{name}: {predictions[name]!r}"
            for name, question in questions.items()
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """Training examples as a random-access source.

    Attributes:
      pairs: prompt and answer, int32 [P] and [A].
      length: T.
      pad: the token after the answer.
    """

    pairs: Sequence[tuple[np.ndarray, np.ndarray]]
    length: int
    pad: int

    def __len__(self) -> int:
        return len(self.pairs)

    def digest(self) -> str:
        """SHA-256 of all tokens and where they end."""
        found = hashlib.sha256()
        for tokens in itertools.chain.from_iterable(self.pairs):
            found.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
        return found.hexdigest()

    def __getitem__(self, index: int) -> synthetic.Batch:
        prompt, answer = self.pairs[index]
        end = len(prompt) + len(answer)
        tokens = np.full(self.length + 1, self.pad, np.int32)
        tokens[:end] = np.concatenate([prompt, answer])
        target = np.arange(1, self.length + 1)
        in_answer = (target >= len(prompt)) & (target < end)
        return {
            "inputs": tokens[:-1],
            "targets": tokens[1:],
            "weights": in_answer.astype(np.float32),
        }
