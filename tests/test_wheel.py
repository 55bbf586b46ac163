"""The wheel works where nothing but what it declares is installed."""

import os
import shutil
import subprocess
import sys
import tarfile

import pytest

import tape_jax
from tests.paths import ROOT

pytestmark = pytest.mark.slow
PIP = (sys.executable, "-m", "pip")
SOURCES = ("pyproject.toml", "README.md", "tape_jax")

USE = """
import importlib, importlib.metadata, importlib.util, pathlib, pkgutil, sys
import tape_jax as tape
public = [m.name for m in pkgutil.walk_packages(tape.__path__, "tape_jax.") if "._" not in m.name]
public.remove("tape_jax.nnx")  # flax.nnx loads optax
for module in (tape, *map(importlib.import_module, public)):
    [getattr(module, name) for name in module.__all__]
optional = "safetensors tokamax optax orbax.checkpoint chex grain matplotlib transformers"
print("loaded:", [name for name in optional.split() if name in sys.modules])
assert "site-packages" in tape.__file__, tape.__file__
assert importlib.metadata.version("tape-jax") == tape.__version__
assert pathlib.Path(tape.__file__).with_name("py.typed").is_file()
for name in ("train", "configs", "tests", "benchmarks", "examples", "docs"):
    assert importlib.util.find_spec(name) is None, name

import jax, jax.numpy as jnp
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 4))
x = jax.random.normal(jax.random.key(1), (1, 6, 8))
e = tape.rotary_state(jnp.arange(6), 4)
o, a = tape.attention(q, k, v, state=e, is_causal=True)
e = tape.update_state(tape.init_update(jax.random.key(2), 8, 2), e, a, x)
print("functions:", o.shape, e.shape)

size = dict(vocab_size=11, hidden_size=8, num_layers=2, num_heads=2)
model = tape.Transformer(tape.ModelConfig(**size, position="rope"))
variables = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
print("generated:", tape.generate(model, variables, [[1, 2]], max_new_tokens=3).shape)
adapted = tape.adapt.adapt(model, variables, "tape", key=jax.random.key(1))
print("adapted:", adapted.model.encoding.kind)
calls = {
    "save_adapter": lambda: tape.adapt.save_adapter(
        "x.safetensors", adapted.model, adapted.variables, adapted.rules, base=adapted.base
    ),
    "from_pretrained": lambda: tape.from_pretrained(sys.argv[1]),
}
for name, call in calls.items():
    try:
        call()
    except NotImplementedError as error:
        assert "tape-jax[pretrained]" in str(error), error
        print(name + ": refused")
for module in pkgutil.walk_packages(tape.__path__, "tape_jax."):
    importlib.import_module(module.name)
print("every module can be imported")
"""


def run(*command, **options):
    """Output of a command that must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """What is packaged, and nothing that earlier builds left; skips without a package index."""
    folder = tmp_path_factory.mktemp("sources")
    probe = [*PIP, "download", "-q", "--no-deps", "-d", str(folder / "probe"), "setuptools>=77"]
    found = subprocess.run(probe, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"pip reaches no package index: {found.stderr.strip().splitlines()[-1]}")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def python(sources, tmp_path_factory):
    """The interpreter of a new environment with the wheel and what it declares."""
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "-q", "--no-deps", "-w", folder, sources)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", folder / "env")
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel)
    run(python, "-m", "pip", "check")
    return python


def test_the_installed_wheel(python, tmp_path):
    """Functions, model, generation and adaptation run; what needs an extra says so."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["JAX_PLATFORMS"] = "cpu"
    llama = ROOT / "tests" / "golden" / "hf" / "llama3_gqa"
    printed = run(python, "-I", "-c", USE, llama, cwd=tmp_path, env=environment)
    assert printed.splitlines() == [
        "loaded: []",
        "functions: (1, 6, 2, 4) (1, 6, 2, 4)",
        "generated: (1, 5)",
        "adapted: tape",
        "save_adapter: refused",
        "from_pretrained: refused",
        "every module can be imported",
    ]


def test_the_source_distribution(sources, python, tmp_path):
    """It holds the package with its types and its README, and builds no less than the wheel."""
    run(python, "-m", "pip", "install", "-q", "setuptools>=77")
    build = f"from setuptools import build_meta as b; b.build_sdist({str(tmp_path)!r})"
    run(python, "-c", build, cwd=sources)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tape_jax").rglob("*.py")}
    assert names >= modules | {"README.md", "pyproject.toml", "tape_jax/py.typed"}
    assert archive.name == f"tape_jax-{tape_jax.__version__}.tar.gz"
