"""How fast the training data is made, for each second of one core.

Processor time is measured, so that other work on the machine does not count.

Run ``python -m benchmarks.data [--consumes TOKENS_PER_SECOND]``; with the tokens that a training
step consumes each second, it also says what share of one core the data takes.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

from train.data.arithmetic import Addition

TARGET = 100_000


def examples_per_second(produce: Callable[[int], object], size: int, seconds: float) -> float:
    """Examples made in a second of processor time by ``produce(index)``, ``size`` at a time."""
    produce(0)
    index, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        index += 1
        produce(index)
    return index * size / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=512, help="examples in a batch")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each measurement")
    parser.add_argument("--consumes", type=float, help="tokens/s of the model to be trained")
    options = parser.parse_args()

    print(f"{platform.machine()}, one core, batches of {options.batch}")
    print(f"{'digits':>6} {'source':>7} {'examples/s':>12} {'tokens/s':>14}  at least {TARGET:,}/s")
    for digits in (5, 20, 40, 100):
        task = Addition(digits)
        stream = iter(task.dataset(seed=0, batch_size=options.batch))
        for source, produce in (
            ("numpy", lambda index, task=task: task.batch(0, index, options.batch)),
            ("grain", lambda _, stream=stream: next(stream)),
        ):
            rate = examples_per_second(produce, options.batch, options.seconds)
            tokens = rate * task.sequence_length
            line = f"{digits:>6} {source:>7} {rate:>12,.0f} {tokens:>14,.0f}"
            line += f"  {'yes' if rate >= TARGET else 'no'}"
            if options.consumes:
                line += f", {100 * options.consumes / tokens:.2f} % of a core feeds the model"
            print(line)


if __name__ == "__main__":
    main()
