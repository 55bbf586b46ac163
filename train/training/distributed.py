"""Several processes that train one model: how they find one another and agree.

This wraps ``jax.distributed`` with our own errors and messages. With one process every function
here does nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
import tqdm
from jax.experimental import multihost_utils

from train.checks import require

T = TypeVar("T")

# Seconds without a heartbeat after which a process counts as dead, and the others end too.
HEARTBEAT = 60
# Seconds for all processes to appear: a pod's hosts do not start together.
APPEARANCE = 600
# Seconds that finished processes wait for the first one, which evaluates: a week.
EVALUATION = 7 * 24 * 3600
# Seconds for the main thread to report the loss of another process before it ends.
PATIENCE = 5
# The exit code for that.
PEER_LOST = 4
# Processes that an error names.
SHOWN = 8


def initialize(where: str) -> None:
    """Joins the other processes; call it before anything else of jax.

    Args:
      where: ``auto``, for what SLURM, Open MPI, Kubernetes (GKE) and TPU pods say in the
        environment; or ``HOST:PORT,PROCESSES,INDEX``: where process 0 listens, how many there are,
        and which this one is.

    Raises:
      ValueError: if ``where`` is neither, or there is no cluster that jax knows.
      RuntimeError: if the others do not appear.
    """
    options: dict[str, Any] = {}
    if where != "auto":
        match = re.fullmatch(r"([^,\s]+:\d+),(\d+),(\d+)", where)
        require(
            match is not None and int(match[3]) < int(match[2]),
            "--distributed: expected auto, or HOST:PORT,PROCESSES,INDEX with INDEX below "
            f"PROCESSES; got {where!r}",
        )
        assert match is not None
        options = {
            "coordinator_address": match[1],
            "num_processes": int(match[2]),
            "process_id": int(match[3]),
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **options,
            heartbeat_timeout_seconds=HEARTBEAT,
            initialization_timeout=APPEARANCE,
            shutdown_timeout_seconds=EVALUATION,
        )
    except ValueError as error:
        raise ValueError(
            f"--distributed={where}: {error} Nothing in the environment tells of SLURM, Open MPI, "
            "Kubernetes or a TPU pod: give HOST:PORT,PROCESSES,INDEX"
        ) from error
    ctypes.CDLL(None).signal(ctypes.c_int(signal.SIGABRT), _end_aborted)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _end_aborted(_: int) -> None:
    """Handles SIGABRT, with which a jax thread ends this process once another is gone.

    A Python handler would wait for the main thread, which may wait for the other process. An abort
    in the main thread itself is not from jax, and proceeds.
    """
    if threading.get_ident() != threading.main_thread().ident:
        time.sleep(PATIENCE)
        print(
            "error: jax ends this process, most likely since another process has died (see above). "
            "What was saved is intact: start all processes again with --resume",
            file=sys.stderr,
        )
        leave(PEER_LOST)


def is_one_of_several() -> bool:
    """Returns whether this process has joined others."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_peer_lost(error: Exception) -> bool:
    """Returns whether an error, in a step or in saving, says that another process is gone."""
    # Not all errors of jax are JaxRuntimeErrors.
    told = re.search("CoordinationService|Gloo .* failed", str(error))
    return bool(told or isinstance(error, jax.errors.JaxRuntimeError)) and is_one_of_several()


def is_main() -> bool:
    """Returns whether this process writes the files that only one may write."""
    return jax.process_index() == 0


def report(message: str) -> None:
    """Prints a sentence, once for all processes."""
    if is_main():
        tqdm.tqdm.write(message)  # Above a progress bar, if there is one.
        sys.stdout.flush()


def agreed(value: Callable[[], T]) -> T:
    """Returns ``value()`` of process 0, in JSON types; others do not call it.

    Raises:
      ValueError: in all processes, if ``value()`` raises ValueError or OSError in process 0.
    """
    if jax.process_count() == 1:
        return value()
    message: dict[str, Any] = {}
    if is_main():
        try:
            message = {"value": value()}
        except (ValueError, OSError) as error:
            message = {"error": str(error)}
    received = json.loads(_of_first(json.dumps(message)))
    require("error" not in received, received.get("error", ""))
    return received["value"]


def _of_first(text: str) -> str:
    """Returns the text of process 0, in all processes."""
    given = np.frombuffer(text.encode() if is_main() else b"", np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(given))))
    padded = np.zeros(length, np.uint8)
    padded[: len(given)] = given
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))).decode()


def require_same(value: str, problem: str) -> None:
    """Raises ValueError, in all processes, unless each gives the value of the first.

    Args:
      value: of this process.
      problem: what it means if they differ.
    """
    if jax.process_count() == 1:
        return
    digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
    digests = multihost_utils.process_allgather(digest)
    others = [i for i, other in enumerate(digests) if (other != digests[0]).any()]
    require(not others, f"{problem}: process 0 sees something else than {_named(others)}")


def _named(processes: list[int]) -> str:
    """Lists the numbers of the first few processes."""
    shown = ", ".join(map(str, processes[:SHOWN]))
    more = f" and {len(processes) - SHOWN} others" if len(processes) > SHOWN else ""
    return ("process " if len(processes) == 1 else "processes ") + shown + more


def wait_for_all() -> None:
    """Returns once all processes have called it."""
    agreed(lambda: None)


def preempted(step: int) -> bool:
    """Returns whether a process has received SIGTERM, so all must stop after ``step``."""
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)


def leave(code: int) -> None:
    """Ends this process at once, without waiting for others that may be dead."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
