"""Text: an endless stream of packed training sequences, and held-out text for evaluation.

Documents come from a source (:mod:`train.data.sources`), become tokens once and are kept on disk
(:mod:`train.data.token_cache`), and are packed into sequences of one length
(:mod:`train.data.packing`). :mod:`train.tasks.text_evaluation` evaluates trained models.

**Held-out text.** A hash of each document's name (of its content, if a file holds many) keeps a
share of the documents out of training. The hash depends on nothing else, so all seeds, lengths and
models share the same held-out documents. Alternatively, they come from a separate source. If there
is only one document, its end is held out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from train.checks import choose, require
from train.data import synthetic, token_cache
from train.data.packing import PACKINGS, Batch, Packed, endless_batches
from train.data.sources import common_files, get_source
from train.data.token_cache import Corpus, TokenStream
from train.data.tokenizers import Tokenized, Tokenizer
from train.evaluation import Progress, Trained
from train.files import cache_folder
from train.tasks import Result, Score, retrieval, text_evaluation
from train.tasks.questions import VALIDATION_SEED

if TYPE_CHECKING:
    import grain


@dataclasses.dataclass(frozen=True)
class Text(Tokenized):
    """Language modelling (the module docstring describes the data).

    Constructing it reads neither the source nor the tokenizer's content, so you can check configs
    without either.

    Attributes:
      source: where the text comes from: ``stdlib``, ``tfds:c4/en``, a glob, or ``tokens:`` and a
        glob (see :mod:`train.data.sources`).
      text_field: field of a jsonl line, or feature of a tfds corpus, that holds the text.
      tokenizer, tokenizer_fingerprint, vocab_size: see :class:`train.data.tokenizers.Tokenized`.
      sequence_length: T.
      train_length: tokens of a training sequence, a divisor of T; a batch then has proportionally
        more sequences. None: T, or, if ``adapt.method`` is ``drope``, the base's trained length.
      packing: ``concatenated`` or ``documents`` (see :mod:`train.data.packing`).
      held_out: share of the documents that is kept out of training, if ``held_out_source`` is None;
        if there is only one document, the share of its end.
      held_out_source: another source, all of which is held out.
      passkeys: share of the training sequences that are questions of passkey retrieval in place of
        text, in [0, 1). Only their answers are learned, and one answer weighs as much as a sequence
        of text; one key in ten is held out of training, and only those are asked for.
      passkey_form: how passkeys are worded, in training and evaluation: ``long``, as published, or
        ``short``, for bytes (see :mod:`train.tasks.retrieval`).
      shuffle: visit the training sequences in pseudo-random order rather than text order.
      cache: folder for the tokens; None: ``tape-jax`` in the user's cache folder.
    """

    Evaluation: ClassVar[type] = text_evaluation.Evaluation

    source: str = "stdlib"
    text_field: str = "text"
    sequence_length: int = 1024
    train_length: int | None = None
    packing: str = "concatenated"
    held_out: float = 0.05
    held_out_source: str | None = None
    passkeys: float = 0.0
    passkey_form: str = "long"
    shuffle: bool = True
    cache: str | None = None

    def __post_init__(self):
        choose("packing", self.packing, PACKINGS)
        synthetic.require_positive("text", sequence_length=self.sequence_length)
        if self.train_length is not None:
            synthetic.require_positive("text", train_length=self.train_length)
            require(
                self.sequence_length % self.train_length == 0,
                f"text: train_length must divide sequence_length = {self.sequence_length}; got "
                f"{self.train_length}",
            )
        require(
            0 < self.held_out < 1,
            f"text: held_out must be between 0 and 1; got {self.held_out}",
        )
        require(
            0 <= self.passkeys < 1,
            f"text: passkeys is a share of the sequences in [0, 1); got {self.passkeys}",
        )
        choose("passkey form", self.passkey_form, retrieval.FORMS)
        super().__post_init__()

    @property
    def codec(self) -> Tokenizer:
        """The tokenizer.

        Raises:
          ValueError: if there is none, it has more tokens than ``vocab_size``, or it marks neither
            the start nor the end of a document.
        """
        codec = super().codec
        require(
            codec.bos is not None or codec.eos is not None,
            f"the tokenizer {self.tokenizer!r} has no token that starts or ends a document; its "
            f"special tokens are {sorted(codec.specials)}",
        )
        return codec

    def training_stream(self) -> TokenStream:
        """The documents that are trained on."""
        return self._stream(self.source, "train" if self.held_out_source is None else "all")

    def held_out_stream(self) -> TokenStream:
        """The documents that are held out of training."""
        if self.held_out_source is None:
            return self._stream(self.source, "held_out")
        return self._stream(self.held_out_source, "all")

    def _corpus(self, name: str, side: str) -> Corpus:
        codec = self.codec
        return Corpus(
            get_source(name, self.text_field, codec),
            codec,
            side,
            self.held_out,
            label=f"tokenising {name}, {side.replace('_', ' ')}",
        )

    def _stream(self, name: str, side: str) -> TokenStream:
        folder = Path(self.cache).expanduser() if self.cache else cache_folder()
        stream = token_cache.open_stream(self._corpus(name, side), folder)
        share = {"train": 1 - self.held_out, "held_out": self.held_out, "all": 1}[side]
        require(
            len(stream.tokens) > 0,
            f"no document of {name!r} falls into the {side.replace('_', ' ')} part, a share of "
            f"{share:g}: give more documents, another task.held_out, or a text to judge by, in "
            "task.held_out_source or evaluation.source",
        )
        return stream

    def dataset(
        self, seed: int, batch_size: int, process_index: int = 0, process_count: int = 1
    ) -> grain.IterDataset:
        """The endless stream of training batches: :func:`train.data.packing.endless_batches`.

        Raises:
          ValueError: an argument out of range, a source that cannot be read, or sequences too short
            for passkeys.
        """
        short = self.train_length or self.sequence_length
        if short < self.sequence_length:
            of_that = dataclasses.replace(self, sequence_length=short, train_length=None)
            many = batch_size * (self.sequence_length // short)
            return of_that.dataset(seed, many, process_index, process_count)
        share = process_index, process_count
        batches = endless_batches(self.packed, self.shuffle, seed, batch_size, *share)
        if not self.passkeys:
            return batches
        self._questions(1, np.random.default_rng(0))  # Raises if the sequences are too short.
        first = process_index * batch_size // process_count
        mixed = functools.partial(self._with_passkeys, size=batch_size, first=first)
        own = np.random.SeedSequence([seed, 0]).generate_state(1)[0]
        return batches.random_map(mixed, seed=int(own))

    def _questions(self, count: int, rng: np.random.Generator) -> Batch:
        form, keys = retrieval.FORMS[self.passkey_form]
        trained, _ = retrieval.split_keys(keys)
        length = self.sequence_length
        own = retrieval.training_batch(self.codec, form, trained, length, count, rng)
        own["weights"] *= length / own["weights"].sum(axis=1, keepdims=True)
        if self.packing == "documents":
            own["segment_ids"] = np.ones_like(own["inputs"])
            own["positions"] = np.cumsum(own["segment_ids"], axis=1, dtype=np.int32) - 1
        return own

    def _with_passkeys(
        self, batch: Batch, rng: np.random.Generator, *, size: int, first: int
    ) -> Batch:
        """Replaces some rows of a batch of ``size``, from ``first`` on, by questions.

        All processes draw for all rows, so the number of processes does not matter.
        """
        asked = rng.random(size) < self.passkeys
        if not asked.any():
            return batch
        number = np.cumsum(asked) - 1
        questions = self._questions(int(asked.sum()), rng)
        rows = slice(first, first + len(batch["inputs"]))
        return {
            name: np.where(asked[rows, None], questions[name][number[rows]], values)
            for name, values in batch.items()
        }

    @property
    def passkeys_asked(self) -> tuple[retrieval.Form, Sequence[int]]:
        """The wording of passkeys in the evaluation, and the keys that it hides."""
        form, keys = retrieval.FORMS[self.passkey_form]
        return form, retrieval.split_keys(keys)[1].tolist() if self.passkeys else keys

    def packed(self) -> Packed:
        """All training sequences, in order."""
        return self._packed(self.training_stream())

    def _packed(self, stream: TokenStream) -> Packed:
        return Packed(stream, self.sequence_length, self.packing, self.codec.padding)

    @property
    def training_sequences(self) -> int:
        """The number of sequences in an epoch."""
        return len(self.packed())

    def held_out_batch(self, size: int) -> Batch | None:
        """``size`` sequences of held-out text, always the same, to watch the loss during training.

        They are packed as in training, in ``sequence_length`` tokens. If there are fewer, rows of
        weight 0 fill the batch; None if there are none.
        """
        stream = self.held_out_stream()
        try:
            packed = self._packed(stream)
        except ValueError:  # It is shorter than one.
            return None
        rows = np.random.default_rng(0).permutation(len(packed))[:size]
        batch = packed.batch(np.resize(rows, size))
        batch["weights"][len(rows) :] = 0
        return batch

    def evaluation_documents(
        self, limit_tokens: int | None = None, *, validation: bool = False
    ) -> Iterator[np.ndarray]:
        """Held-out documents, int32 [N] each, with their start and end tokens.

        Their order is always the same and unrelated to that of the source, so that the first ones
        are a fair sample.

        Args:
          limit_tokens: how many tokens to give in all; the last document is cut there; None: all.
          validation: begin at the other end of that order. A document that the test may begin
            then gives its last tokens.

        Raises:
          ValueError: a validation that would reach what the test may ask for.
        """
        stream = self.held_out_stream()
        left = len(stream.tokens) if limit_tokens is None else limit_tokens
        order, shared = np.random.default_rng(0).permutation(len(stream.offsets) - 1), False
        if validation:
            require(
                2 * left <= len(stream.tokens),
                f"the held-out text of {len(stream.tokens):,} tokens is too short for a test and a "
                f"validation of {left:,} each",
            )
            order = order[::-1]
            sizes = np.diff(stream.offsets)[order].cumsum()
            shared = sizes[np.searchsorted(sizes, left)] + left > len(stream.tokens)
        for index in order:
            if left <= 0:
                return
            start, stop = stream.offsets[index : index + 2]
            size = min(stop - start, left)
            start = stop - size if shared else start
            left -= size
            yield stream.tokens[start : start + size].astype(np.int32)

    def evaluation_tokens(
        self, limit: int | None = None, *, validation: bool = False
    ) -> np.ndarray:
        """The documents of :meth:`evaluation_documents` one after another, int32 [N]."""
        return np.concatenate(list(self.evaluation_documents(limit, validation=validation)))

    def validation(self, options: Any) -> Any:
        """Options of an evaluation with other held-out text and other passkeys.

        Raises:
          ValueError: the test takes all of a text.
        """
        seed = options.seed + VALIDATION_SEED
        return dataclasses.replace(options, validation=True, seed=seed)

    @property
    def scores(self) -> Sequence[Score]:
        """The perplexities by length, and the scores of passkey retrieval."""
        return text_evaluation.scores()

    def evaluate(self, trained: Trained, options: Any, progress: Progress | None = None) -> Result:
        """Perplexity of held-out text by length: :func:`train.tasks.text_evaluation.evaluate`.

        Raises:
          ValueError: if there is too little held-out text, or it is trained on.
        """
        own = {"task.held_out_source": self.held_out_source}
        self._require_held_out({"evaluation.source": options.source} if options.source else own)
        return text_evaluation.evaluate(self._judged_by(options), trained, options, progress)

    def _judged_by(self, options: Any) -> Text:
        """The task with the evaluation's text as its held-out text."""
        source = options.source
        return self if source is None else dataclasses.replace(self, held_out_source=source)

    def prepare(self, options: Any, limit: int | None = None) -> str:
        """Prepares all text that training and evaluation will read.

        Args:
          options: of the evaluation.
          limit: tokens that the model accepts; longer windows are not asked for.

        Returns:
          A line that says how much text there is.

        Raises:
          ValueError: if some of it is missing, too short, or trained on though it is held out.
        """
        self._require_held_out(
            {"task.held_out_source": self.held_out_source, "evaluation.source": options.source}
        )
        judged = self._judged_by(options)
        text_evaluation.check(judged, options)
        trained, held_out = self.training_stream(), judged.held_out_stream()
        where = ""
        if judged.held_out_source is not None:
            where = f" of {judged.held_out_source}"
        elif self._corpus(self.source, "all").is_one_document:
            where = ", the end of its one document"
        return (
            f"{self.source}: {len(trained.tokens):,} tokens to train on; held out: "
            f"{len(held_out.tokens):,}{where}"
        )

    def _require_held_out(self, names: Mapping[str, str | None]) -> None:
        """Raises ValueError if one of these sources, by field, is also trained on."""
        for name, source in names.items():
            both = [] if source is None else common_files(self.source, source)
            require(
                not both,
                f"{name} = {source!r} has files that task.source = {self.source!r} has too "
                f"({', '.join(both[:3])}, {len(both)} in all): expected text that is not trained "
                "on",
            )

    def read_result(self, record: Any) -> Result:
        """The result that ``to_json`` described."""
        return text_evaluation.read_result(record)

    def samples(self, trained: Trained, options: Any) -> Sequence[str]:
        """Shows how held-out text is continued: :func:`train.tasks.text_evaluation.samples`."""
        return text_evaluation.samples(self._judged_by(options), trained, options)
