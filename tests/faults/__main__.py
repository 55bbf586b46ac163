"""Breaks training on purpose, and sees whether anything is lost.

    python -m tests.faults [--kills 50] [--only NAME ...] [--keep FOLDER]

Every trial runs the real command line in processes of its own and starts it again by the same
command, as a scheduler would. A trial is survived if in the end the parameters, and the losses of
all steps, are bit for bit those of a run that nobody disturbed. The exit code is 1 if one is lost.

  kill        SIGKILL at random moments
  terminate   SIGTERM: saves and leaves in time
  full-disk   no room for a checkpoint
  read-only   a run folder that cannot be written
  damage      a checkpoint with flipped bits, or with truncated or missing files
  devices     SIGKILL, then continued on another number of simulated devices; survived if no step is
              lost or repeated, and parameters and losses are those of a run on one mesh to 1e-5
              (devices sum in another order, so that bits differ)
  processes   SIGKILL to one of two processes: the other must end by itself, with exit code 4 and a
              message; both continue when they are started again
  non-finite  batches with a loss that is not finite, or with a gradient far too large: training
              stops with exit code 3 and a good checkpoint, from which it continues once the data
              are mended, or leaves as many steps out as train.skip allows, and counts them

Mounting a small disk or one that cannot be written needs ``unshare`` (Linux); without it these
trials are left out, and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.bench import Bench, Outcome
from tests.faults.process import Lost
from tests.faults.trials import FAULTS


def table(outcomes: Sequence[Outcome]) -> str:
    """Faults tried and lost."""
    rows = [("fault", "tried", "lost", ""), ("---", "---:", "---:", "---")]
    rows += [(o.fault, str(o.tried), str(len(o.lost)), o.note) for o in outcomes]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += [f"lost, {o.fault}: {why}" for o in outcomes for why in o.lost]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=50, help="how often to kill (50)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--keep", type=Path, help="an empty folder, in which all runs stay")
    return parser.parse_args(argv)


@contextlib.contextmanager
def workplace(keep: Path | None) -> Iterator[Path]:
    """A folder for all runs."""
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Tries every fault and prints the table."""
    args = parse(argv)
    with workplace(args.keep) as folder:
        start = time.monotonic()
        bench = Bench(folder, args.kills, args.seed)
        outcomes = []
        for name in args.only:
            try:
                outcomes.append(FAULTS[name](bench))
            except Lost as error:  # Already the run that nobody disturbs.
                outcomes.append(Outcome(name, 1, [str(error)]))
            latest = outcomes[-1]
            print(
                f"{time.monotonic() - start:6.0f} s  {latest.fault}: {latest.tried} tried, "
                f"{len(latest.lost)} lost",
                flush=True,
            )
    print(f"\n{table(outcomes)}")
    return int(any(outcome.lost for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
