"""Asks a model the questions of a suite; a killed evaluation resumes where it was.

Every answer is on disk as soon as its batch is done, in ``evaluation_SUITE.jsonl`` of the run. The
first line of this file says what the questions depend on; more lengths, tasks or questions extend
it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from train.checks import choose, not_negative, positive, require
from train.data.tokenizers import Tokenizer
from train.evaluation import Progress, Trained, fits
from train.evaluation.continuations import Continuer
from train.evaluation.journal import Journal
from train.suites import FILES, FORMS, SuiteQuestion, SuiteTask, get_suite
from train.suites.background import Background, read
from train.suites.questions import AskedSample, ask
from train.suites.results import Scores, SuiteResult

FORMAT = "tape-jax answers to a suite, version 1"
# Task, length and number of a question.
Key = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class SuiteOptions:
    """The options of an evaluation on a suite.

    Attributes:
      suite: one of :data:`train.suites.SUITES`.
      lengths: tokens of prompt and answer together, ascending.
      tasks: of the suite; empty: all.
      samples: questions of each task and length.
      form: of :data:`train.suites.FORMS`.
      background: a source of text (:mod:`train.data.sources`).
      seed: of the questions.
      batch_size: questions at once.
      chunk: tokens of the prompts that are run at a time; None: all.
      squad, hotpotqa: files with the questions of ``qa_1`` and of ``qa_2``; None: they are not
        asked.
    """

    suite: str
    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = ()
    samples: int = 20
    form: str = "long"
    background: str = "stdlib"
    seed: int = 0
    batch_size: int = 16
    chunk: int | None = None
    squad: str | None = None
    hotpotqa: str | None = None

    def __post_init__(self):
        _ = self.asked
        choose("form", self.form, FORMS)
        require(bool(self.lengths), "evaluation: a suite needs lengths, such as 4096")
        for length in self.lengths:
            positive("evaluation: a length", length)
        require(
            list(self.lengths) == sorted(set(self.lengths)),
            f"evaluation: lengths must ascend; got {self.lengths}",
        )
        for name in ("samples", "batch_size"):
            positive(f"evaluation: {name}", getattr(self, name))
        positive("evaluation: chunk", self.chunk, optional=True)
        not_negative("evaluation: seed", self.seed)

    @property
    def asked(self) -> dict[str, SuiteTask]:
        """The tasks by name."""
        files = {"squad": self.squad, "hotpotqa": self.hotpotqa}
        return get_suite(self.suite, self.tasks, files)


def tokenizer_of(task: Any, what: str) -> Tokenizer:
    """The tokenizer of a run's task.

    Raises:
      ValueError: if it has none.
    """
    codec = getattr(task, "codec", None)
    if not isinstance(codec, Tokenizer):
        raise ValueError(
            f"{what} was trained on a task without a tokenizer: suites ask models of text"
        )
    return codec


class Answers:
    """The answers so far, on disk.

    Attributes:
      texts: by question.
    """

    def __init__(self, path: Path, about: dict[str, Any], *, fresh: bool = False):
        """
        Args:
          path: of the file, which need not exist.
          about: what the questions and their answers depend on, in JSON types.
          fresh: forget what an evaluation by this program left there; answers of another
            checkpoint are always forgotten.

        Raises:
          ValueError: a file of another evaluation or of another program, or a damaged one.
        """
        replace = "step", "checkpoint"
        self._journal = Journal(path, FORMAT, about, fresh=fresh, replace=replace)
        self.texts = dict[Key, str]()
        for found in self._journal.read(_answers):
            self.texts.update(found)

    def add(self, keys: Sequence[Key], texts: Sequence[str]) -> None:
        """Writes answers, and returns when they are on disk."""
        self.texts.update(zip(keys, texts, strict=True))
        lines = []
        for task, length in dict.fromkeys(key[:2] for key in keys):
            chosen = [i for i, key in enumerate(keys) if key[:2] == (task, length)]
            numbers, answers = [keys[i][2] for i in chosen], [texts[i] for i in chosen]
            line = {"task": task, "length": length, "numbers": numbers, "answers": answers}
            lines.append(line)
        self._journal.add(lines)


def _answers(line: dict[str, Any]) -> dict[Key, str]:
    """Returns the answers of a line, by question."""
    pairs = zip(line["numbers"], line["answers"], strict=True)
    return {(line["task"], line["length"], index): str(text) for index, text in pairs}


def evaluate(
    trained: Trained,
    codec: Tokenizer,
    options: SuiteOptions,
    path: Path,
    *,
    step: int = 0,
    checkpoint: str = "",
    trained_length: int = 0,
    fresh: bool = False,
    progress: Progress | None = None,
) -> SuiteResult:
    """Asks a model the questions of a suite.

    Args:
      trained: the model; its sharding, if it has one, splits the questions.
      codec: of the model.
      options: what is asked.
      path: of the file of answers, from which an interrupted evaluation resumes.
      step: of the checkpoint.
      checkpoint: what tells it from others, even of the same step.
      trained_length: tokens of a training sequence.
      fresh: forget the answers of an earlier evaluation.
      progress: called with the number of questions done and the total.

    Raises:
      ValueError: a length that the model does not take or that is too small for a task, a
        background that is too short, a batch that does not fit into the memory, or a file of other
        answers. Nothing has been asked then.
    """
    longest = options.lengths[-1]
    require(
        fits(longest, trained.max_length),
        f"the model takes at most {trained.max_length} tokens: a length of {longest:,} cannot be "
        "asked",
    )
    asker = check(options, codec)
    about = asker.about(step, checkpoint)
    answers = Answers(path, about, fresh=fresh)
    continuer = Continuer(
        trained.model,
        trained.variables,
        pad=codec.padding,
        stops=codec.ends,
        batch_size=options.batch_size,
        chunk=options.chunk,
    )
    done = sum(key in answers.texts for key in asker.keys)
    for room, waiting in asker.groups(answers):
        prompts = [asker.ask(key).tokens for key in waiting]
        for rows, found in continuer.run(prompts, room, [waiting[0][1] - room]):
            answers.add([waiting[row] for row in rows], [codec.decode(x) for x in found])
            done += len(rows)
            if progress is not None:
                progress(done, len(asker.keys))
    memory = str(continuer.programs.memory or "")
    scores, speed = asker.scores(answers), str(continuer.programs.speed)
    return SuiteResult(options.suite, step, trained_length, about, scores, speed, memory)


def check(options: SuiteOptions, codec: Tokenizer) -> _Asker:
    """Checks and returns the questions.

    Raises:
      ValueError: a length that is too small for a task, a background that is too short, or answers
        that the tokenizer cannot write.
    """
    asker = _Asker(options, options.asked, codec, read(options.background))
    asker.check()
    return asker


@dataclasses.dataclass(frozen=True)
class _Asker:
    """The questions of an evaluation, and how they are scored."""

    options: SuiteOptions
    tasks: dict[str, SuiteTask]
    codec: Tokenizer
    background: Background

    @property
    def keys(self) -> list[Key]:
        """All questions, in the order of tables."""
        options = self.options
        numbers = range(options.samples)
        return [(task, n, i) for n in options.lengths for task in self.tasks for i in numbers]

    def ask(self, key: Key) -> AskedSample:
        """Returns the question of a key."""
        (task, *where), options = key, self.options
        given: Any = {"seed": options.seed, "form": options.form}
        return ask(task, self.tasks[task], self.codec, self.background, *where, **given)

    def check(self) -> None:
        """Raises ValueError if a cell has no questions, or answers that cannot be written."""
        for length in self.options.lengths:
            for task in self.tasks:
                for right in self.ask((task, length, 0)).question.references:
                    written = self.codec.decode(self.codec.encode(f" {right}"))
                    require(
                        right in written,
                        f"the tokenizer {self.codec.name!r} writes {right!r}, which {task} asks "
                        f"for, as {written!r}: no answer could be right",
                    )

    def about(self, step: int, checkpoint: str) -> dict[str, Any]:
        """Returns what the answers of a checkpoint depend on, besides the questions' keys."""
        return {
            "suite": self.options.suite,
            "step": step,
            "checkpoint": checkpoint,
            "form": self.options.form,
            "seed": self.options.seed,
            "background": self.background.fingerprint,
            "tokenizer": self.codec.fingerprint[:16],
            **{
                FILES[name]: getattr(task, "fingerprint", None)
                for name, task in self.tasks.items()
                if name in FILES
            },
        }

    def groups(self, answers: Answers) -> Iterator[tuple[int, list[Key]]]:
        """Yields the questions left to ask, by shape, the longest first, with the room for answers.

        So a batch too large for memory is refused before anything is asked.
        """
        rooms = {name: task.answer_tokens[self.options.form] for name, task in self.tasks.items()}
        left = [key for key in self.keys if key not in answers.texts]
        shapes = sorted({(key[1], rooms[key[0]]) for key in left}, reverse=True)
        for length, room in shapes:
            yield room, [key for key in left if (key[1], rooms[key[0]]) == (length, room)]

    def scores(self, answers: Answers) -> Scores:
        """Returns the score of each question, by task and length."""
        found: dict[str, dict[int, tuple[float, ...]]] = {task: {} for task in self.tasks}
        for key in self.keys:
            task, length, _ = key
            one = score(self.tasks[task].rule, answers.texts[key], self.ask(key).question)
            found[task][length] = (*found[task].get(length, ()), one)
        return found


def score(rule: str, answer: str, question: SuiteQuestion) -> float:
    """The score of an answer, from 0 to 1; capital letters do not count.

    Args:
      rule: ``all``, the share of the references that the answer holds (RULER's
        ``string_match_all``); ``part``, 1 if it holds one of them (``string_match_part``); or
        ``label``, 1 if its first sentence names the right label as a word, and no other (BABILong).
      answer: as the model gave it.
      question: that was asked.
    """
    answer = answer.lower()
    if rule == "label":
        sentence = re.split(r"[.\n]", answer.strip(), maxsplit=1)[0]
        named = {x for x in question.labels if re.search(rf"\b{re.escape(x.lower())}\b", sentence)}
        return float(named == set(question.references))
    held = [reference.lower() in answer for reference in question.references]
    return {"part": float(any(held)), "all": sum(held) / len(held)}[rule]
