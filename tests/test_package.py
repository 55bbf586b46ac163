"""What importing and packaging the library brings along."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tape_jax

ROOT = Path(__file__).parents[1]


def test_import_is_light():
    """No heavy optional package is loaded and no device is asked for."""
    code = """
import sys, tape_jax
heavy = "grain tensorflow_datasets tokamax transformers matplotlib orbax.checkpoint torch chex"
print([name for name in heavy.split() if name in sys.modules])
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines() == ["[]", "False"]


def test_public_names_exist_and_are_documented():
    for name in tape_jax.__all__:
        assert getattr(tape_jax, name).__doc__, name


@pytest.mark.slow
def test_wheel_holds_the_package_alone(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)],
        check=True,
    )
    (wheel,) = tmp_path.glob("tape_jax-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"tape_jax", f"tape_jax-{tape_jax.__version__}.dist-info"}
