"""Measures how much training data one core makes in a second.

Processor time is measured, so that other work on the machine does not count.

Run ``python -m benchmarks.data [--consumes TOKENS_PER_SECOND]``; with the tokens that a training
step consumes each second, it also says what share of one core the data takes.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from train.data import tokenizers
from train.data.packing import PACKINGS
from train.suites import SUITES, background, get_suite, questions
from train.tasks import TASKS, get_task, task_type
from train.tasks.arithmetic import Addition
from train.tasks.places import PlaceTask
from train.tasks.questions import QuestionTask
from train.tasks.text import Text

COMPUTED_TARGET = 100_000  # examples
TEXT_TARGET = 5_000_000  # tokens
SUITE_TARGET = 1000  # questions


class Pipeline(NamedTuple):
    """A source of batches to be measured.

    Attributes:
      name: for the table.
      produce: makes a batch.
      batch_size: examples in it.
      length: tokens in an example.
      target: tokens that it should make in a second of one core.
    """

    name: str
    produce: Callable[[], object]
    batch_size: int
    length: int
    target: float


def computed(batch_size: int) -> Iterator[Pipeline]:
    """Yields sums and tasks of places, as numpy computes them and as grain delivers them."""
    sums = {f"addition, {digits} digits": Addition(digits) for digits in (5, 20, 40, 100)}
    places = {name: get_task(name) for name in TASKS if issubclass(task_type(name), PlaceTask)}
    for name, task in (sums | places).items():
        stream = iter(task.dataset(seed=0, batch_size=batch_size))
        sizes = batch_size, task.sequence_length, COMPUTED_TARGET * task.sequence_length
        numbers = itertools.count()
        yield Pipeline(f"{name}, numpy", partial(_next, task, numbers, batch_size), *sizes)
        yield Pipeline(f"{name}, grain", partial(next, stream), *sizes)


def _next(task: QuestionTask, numbers: Iterator[int], batch_size: int) -> object:
    return task.batch(0, next(numbers), batch_size)


def texts(tokens_per_batch: int, cache: str) -> Iterator[Pipeline]:
    """Yields the standard library in bytes, out of the cache and through grain."""
    for length in (128, 1024):
        for packing in PACKINGS:
            task = Text(sequence_length=length, packing=packing, cache=cache)
            size = max(1, tokens_per_batch // length)
            stream = iter(task.dataset(seed=0, batch_size=size))
            name = f"text, {length} bytes, {packing}"
            yield Pipeline(name, partial(next, stream), size, length, TEXT_TARGET)


def suites(length: int = 8192) -> Iterator[Pipeline]:
    """Yields the tasks of suites in bytes; every call makes another question."""
    codec, text = tokenizers.load("bytes"), background.read("stdlib")
    for name, task in (pair for suite in SUITES for pair in get_suite(suite).items()):
        numbers = itertools.count()

        def produce(name=name, task=task, numbers=numbers) -> object:
            return questions.ask(name, task, codec, text, length, next(numbers))

        yield Pipeline(f"{name}, {length} bytes", produce, 1, length, SUITE_TARGET * length)


def examples_per_second(produce: Callable[[], object], size: int, seconds: float) -> float:
    """Counts examples that ``produce()`` makes per second of processor time, ``size`` at a time."""
    produce()
    count, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        count += 1
        produce()
    return count * size / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=512, help="examples in a computed batch")
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens in a batch of text")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each measurement")
    parser.add_argument("--consumes", type=float, help="tokens/s of the model to be trained")
    options = parser.parse_args()

    print(f"{platform.machine()}, one core, batches of {options.batch} computed examples")
    print(f"and of {options.tokens:,} tokens of text")
    with tempfile.TemporaryDirectory() as cache:
        start = time.process_time()
        count = len(Text(cache=cache).training_stream().tokens)
        rate = count / (time.process_time() - start)
        print(f"reading the standard library and caching its {count:,} bytes: {rate:,.0f} bytes/s")
        print(f"{'data':<36} {'examples/s':>12} {'tokens/s':>14}  at least")
        for pipeline in (*computed(options.batch), *texts(options.tokens, cache), *suites()):
            rate = examples_per_second(pipeline.produce, pipeline.batch_size, options.seconds)
            tokens = rate * pipeline.length
            line = f"{pipeline.name:<36} {rate:>12,.0f} {tokens:>14,.0f}"
            line += f"  {pipeline.target:,.0f}: {'yes' if tokens >= pipeline.target else 'no'}"
            if options.consumes:
                line += f", {100 * options.consumes / tokens:.2f} % of a core feeds the model"
            print(line, flush=True)


if __name__ == "__main__":
    main()
