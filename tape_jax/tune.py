"""Measures which attention implementation is the fastest on this machine, and stores it.

    python -m tape_jax.tune [--head-dims D ...] [--lengths T ...] [--dtypes NAME ...]

At each timed shape, outputs and gradients of every implementation that can run here, with its
default options, are compared with the reference. An implementation that disagrees is excluded. The
others are timed in turns, forward and with gradients, in causal calls with and without a state; on
a CPU at fewer shapes. Results are stored in the user's cache folder (TAPE_JAX_CACHE names another),
where tape_jax.attention reads them with implementation=None. Each case is written as soon as it is
measured: the same command continues where it stopped.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

from tape_jax._src.attention import vendor_splash
from tape_jax._src.attention.tuning import records
from tape_jax._src.attention.tuning.records import CallShape, agree, forget
from tape_jax._src.core import devices
from tape_jax._src.core.timing import Timing, take_turns

__all__ = ["Timing", "agree", "assume_device", "forget", "main", "prepare", "take_turns"]

ASSUMED = "nothing is measured for a device that is assumed"
# Temporary memory that a call measured by :func:`prepare` may take.
MEMORY = 16 * 2.0**30


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code.

    Args:
      argv: the arguments after the program's name; None: those of this process.
    """
    from tape_jax._src.attention.tuning import command

    return command.main(argv, description=__doc__)


def prepare(
    *,
    head_dim: int,
    length: int,
    dtype: str,
    batch: int,
    num_heads: int,
    num_kv_heads: int,
    seconds: float = 60.0,
    report: Callable[[str], None] = print,
) -> None:
    """Measures causal calls of one shape, with and without a state, unless they are known.

    A shape is known if one of its head dimension and a length within a factor of two was measured,
    and time did not end before anything was timed.
    Calls from several processes on one machine wait for the one that measures.

    Args:
      head_dim, length, dtype, batch, num_heads, num_kv_heads: of the call on one device.
      seconds: time after which nothing new begins.
      report: called with a sentence about progress, and about a file that cannot be written.
    """
    from tape_jax._src.attention.tuning import measure, records

    table = records.telling(records.read()[0] or {})

    def is_known(shape: CallShape) -> bool:
        near = records.nearest(shape, table)
        return (
            near is not None
            and near.head_dim == head_dim
            and max(near.length, length) <= 2 * min(near.length, length)
        )

    shapes = [
        CallShape(head_dim, length, dtype, state, batch, num_heads, num_kv_heads)
        for state in (True, False)
    ]
    wanted = [shape for shape in shapes if not is_known(shape)]
    if not wanted:
        return
    report(
        f"nothing like this was measured on {records.device()}: attention is measured first, for "
        f"{seconds:.0f} seconds at most (python -m tape_jax.tune does it thoroughly)"
    )
    limits, each = measure.Limits(memory=MEMORY), seconds / len(wanted)
    try:
        for shape in wanted:
            measure.tune([shape], seconds=each, limits=limits, say=report)
    except OSError as error:
        report(f"what was measured cannot be kept: {error}")


@contextlib.contextmanager
def assume_device(
    compute_capability: tuple[int, int] | None = None, *, tpu: bool = False
) -> Iterator[None]:
    """Chooses implementations as on another device, for ahead-of-time compilation.

    The caller must change what jax itself reports as its backend. Measurements of this machine are
    ignored.

    Args:
      compute_capability: of an NVIDIA GPU; None: there is none.
      tpu: whether it is a TPU.
    """

    def capability() -> tuple[int, int] | None:
        return compute_capability

    def nothing_to_check(*_: object, **__: object) -> None:
        pass

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(devices, "compute_capability", new=capability))
        # Measurements here say nothing about another device.
        nothing = records.Known({}, {}, ASSUMED)
        stack.enter_context(mock.patch.object(records, "known", return_value=nothing))
        if tpu:
            splash = vendor_splash.Splash
            stack.enter_context(mock.patch.object(splash, "check_device", new=nothing_to_check))
        yield


if __name__ == "__main__":
    sys.exit(main())
