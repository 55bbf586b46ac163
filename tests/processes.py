"""Two processes under ``jax.distributed`` on this machine, for tests of the library."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

JOIN = """
import json, sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), cluster_detection_method="deactivate")
"""


def in_two_processes(
    program: str, environments: Sequence[Mapping[str, str]] = ({}, {}), seconds: int = 300
) -> list[Any]:
    """What each prints in its last line, as JSON, after it has joined the other."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN + program, address, str(index)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, environment in enumerate(environments)
    ]
    try:
        printed = [child.communicate(timeout=seconds) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], printed
    return [json.loads(out.splitlines()[-1]) for out, _ in printed]
