"""Every benchmark runs at a tiny size, and what it prints can be read back. Nothing is timed."""

from __future__ import annotations

import dataclasses
import datetime
import re
import subprocess

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import aot, attention, draw_attention, gpu, load, scaling, train_step, update
from benchmarks.table import markdown, tables
from research.overhead import Memory, Runner, StepMeasurement, TrainingStep
from tape_jax import rotary_state, tune
from tape_jax._src.attention import BACKENDS
from tape_jax._src.attention import attention as attend
from tape_jax._src.core.timing import Timing
from train.training.flops import PLAIN, STATE, TWO_CALLS


def test_tables():
    text = markdown(("a", "long"), [("x y", 1), ("z", 22)])
    assert text.splitlines()[1] == "|-----|-----:|"
    assert tables(f"{text}\n\n{text}") == [{"a": "x y", "long": "1"}, {"a": "z", "long": "22"}] * 2


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_three_calls(kv_heads):
    """The published way gives the same outputs, and the attended state with duplicated halves."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 9, h, 8)), "float32") for h in (2, *[kv_heads] * 2))
    e = jnp.broadcast_to(rotary_state(jnp.arange(9), 8)[:, None], k.shape) * 1.5
    call = {"is_causal": True, "implementation": "reference"}
    o, cos, sin = attention.three_calls(q, k, v, *attention.duplicated(e), **call)
    want_o, want_a = attend(q, k, v, state=e, **call)
    want_cos, want_sin = jnp.split(want_a, 2, -1)
    want = (want_o, jnp.tile(want_cos, 2), jnp.tile(want_sin, 2))
    chex.assert_trees_all_close((o, cos, sin), want, atol=1e-5)


@pytest.mark.slow
def test_attention(capsys):
    """All rows in both directions; ratios agree with one another and with the floors."""
    attention.main(["--lengths", "16", "--head-dim", "8", "--repeats", "1"])
    out = capsys.readouterr().out
    rows = tables(out)
    plain = [name for name in BACKENDS if name in ("chunked", "query_blocks", "rows", "reference")]
    names = [*plain, "automatic", "static", "plain", "three calls", "plain, again"]
    assert [row["attention"] for row in rows] == 2 * names
    floors = [1.5] * len(names) + [10 / 7] * len(names)
    for row, floor in zip(rows, floors, strict=True):
        ratio = float(row["x plain"])
        assert float(row["x floor"]) == pytest.approx(ratio / floor, rel=0.01, abs=2e-3)
        if row["attention"] in ("plain", "three calls"):
            which = "x plain" if row["attention"] == "plain" else "three calls x"
            assert float(row[which]) == 1


def test_what_attention_prints_is_drawn(tmp_path, capsys):
    """Of two tables of one size the first; none of the forward pass alone."""
    table = [
        "**D = 64, T = 1024, batch 16, forward and backward**", "",
        "| attention | ms | x plain |", "|---|--:|--:|", "| cudnn | 1.2 | 1.75 |",
        "| chunked | 9.1 | 9.2 |", "| three calls | 2.1 | 2.5 |", "", "automatic: cudnn", "",
    ]  # fmt: skip
    other = [line.replace("1.75", "9.99") for line in table]
    forward = [line.replace(" and backward", "").replace("1024", "4096") for line in table]
    text = "\n".join([*table, *other, *forward])
    assert draw_attention.read(text) == {(64, 1024): {"cudnn": 1.75, "three calls": 2.5}}
    (tmp_path / "result.md").write_text(text)
    draw_attention.main([str(tmp_path / "result.md"), str(tmp_path / "drawn.png")])
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "empty.md").write_text("nothing")
    with pytest.raises(SystemExit):
        draw_attention.main([str(tmp_path / "empty.md"), str(tmp_path / "drawn.png")])
    assert "has no table of benchmarks.attention" in capsys.readouterr().err


def test_attention_without_state(capsys):
    options = ["--lengths", "16", "--head-dim", "8", "--repeats", "1", "--no-state"]
    attention.main([*options, "--backends", "reference", "--tokens", "32"])
    out = capsys.readouterr().out
    rows = {"reference", "automatic", "static", "plain", "plain, again"}
    assert {row["attention"] for row in tables(out)} == rows
    assert all(row["x floor"] == row["x plain"] for row in tables(out))
    assert "floors: forward 1.00 x plain, forward and backward 1.00 x plain" in out
    assert out.count("automatic: reference; static: reference, ") == 2
    assert "T = 16, batch 2, forward" in out


@pytest.mark.parametrize(
    ("options", "products"), [([], (TWO_CALLS, STATE)), (["--no-state"], (PLAIN, PLAIN))]
)
def test_products_are_those_of_the_backend_chosen(monkeypatch, options, products):
    monkeypatch.setattr(attention, "chosen", lambda *_: ("cudnn", "chunked"))
    given = attention.parse(["--backends", "cudnn", "chunked", *options])
    rows = attention.rows(given, 8, 16)
    assert (rows["automatic"].products, rows["static"].products) == products
    assert (rows["cudnn"].products, rows["chunked"].products) == products


def test_unknown_backend():
    with pytest.raises(ValueError, match="did you mean 'chunked'"):
        attention.main(["--backends", "chunkd"])


TINY = ["--lengths", "16", "--tokens", "32", "--repeats", "1"]


@pytest.mark.slow
def test_train_step(capsys):
    train_step.main([*TINY, "--rows", "rope:reference", "rope:cudnn"])
    out = capsys.readouterr().out
    first, second = tables(out)
    assert (first["step"], second["step"]) == ("rope:reference", "rope:reference, again")
    assert float(first["time / rope:reference"]) == float(first["memory / rope:reference"]) == 1
    assert float(first["in all MiB"]) > float(first["temporary MiB"]) > 0
    assert first["of peak"] == "-"
    assert re.search(r"^rope:cudnn: skipped, .*CUDA", out, re.MULTILINE)


def test_ratios_of_steps():
    """Times of 2 and 3 s, memory of 100 and 150 bytes, 32 tokens in a batch."""
    model = train_step.PRESETS["tiny"].model
    names = ("rope", "tape:chunked")
    configs = {name: train_step.row_config(model, name) for name in names}
    found = {
        name: StepMeasurement(Timing((seconds,) * 3), Memory(size, size, size, 0))
        for name, seconds, size in zip(names, (2.0, 3.0), (100, 150), strict=True)
    }
    _, row = tables(train_step.report(configs, found, 2, 16))
    assert (row["ms"], row["time / rope"], row["memory / rope"]) == ("3000.00", "1.500", "1.500")
    assert row["tokens/s"] == "11"


def test_ratios_name_their_base_if_the_first_row_cannot_run():
    model = train_step.PRESETS["tiny"].model
    configs = {name: train_step.row_config(model, name) for name in ("rope:cudnn", "tape:chunked")}
    found = {"tape:chunked": StepMeasurement(Timing((2.0,)), Memory(100, 100, 100, 0))}
    (row,) = tables(train_step.report(configs, found, 2, 16))
    assert (row["time / tape:chunked"], row["memory / tape:chunked"]) == ("1.000", "1.000")


@pytest.mark.slow
def test_step_learns():
    """What is timed is training: the loss of a batch seen again and again falls."""
    config = dataclasses.replace(train_step.PRESETS["tiny"].model, position="tape")
    run = Runner(TrainingStep(config, 2, 16))
    losses = [float(run()["loss"]) for _ in range(12)]
    assert losses[0] == pytest.approx(np.log(config.vocab_size), rel=0.3)
    assert losses[-1] < losses[0]


def test_c4_model():
    """The published size: 162 M parameters with RoPE, and TAPE's P = 48."""
    preset = train_step.PRESETS["c4"].model
    shapes = TrainingStep(train_step.row_config(preset, "tape"), 1, 8).shapes()
    sizes = {
        "/".join(str(k.key) for k in path): leaf.size
        for path, leaf in jax.tree.leaves_with_path(shapes[0].params)
    }
    of_tape = {name: size for name, size in sizes.items() if "position_" in name}
    assert round((sum(sizes.values()) - sum(of_tape.values())) / 1e6) == 162
    assert of_tape["layers_0/position_wx"] == 11 * 768 * 48


@pytest.mark.slow
def test_update(capsys):
    """Each implementation in both directions, and why one is left out."""
    tiny = "--batch 1 --length 8 --heads 3 --head-dim 4 --repeats 1 --mixes heads"
    update.main(tiny.split())
    out = capsys.readouterr().out
    names = ["reference", "unrolled", "sums", "reference, again"]
    rows = tables(out)
    assert [row["by"] for row in rows] == 4 * names
    assert rows[0]["update"] == "heads, float32, forward"
    assert rows[-1]["update"] == "heads, bfloat16, forward and backward"


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ("tape", ("tape", None, None)),
        ("rope:cudnn", ("rope", "cudnn", None)),
        ("tape:pallas:reference", ("tape", "pallas", "reference")),
        ("tape::unrolled", ("tape", None, "unrolled")),
    ],
)
def test_models_of_rows(row, wanted):
    config = train_step.row_config(train_step.PRESETS["tiny"].model, row)
    encoding, *implementations = wanted
    assert config.position == train_step.row_config(config, encoding).position
    assert [config.attention_implementation, config.update_implementation] == implementations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--rows rope tape:chunked:reference:x",
            "row 'tape:chunked:reference:x': expected at most",
        ),
        ("--rows tape:stat_dtype=float32", "has no field 'stat_dtype' (did you mean 'state_dtype'"),
        ("--rows tape:position=rope", "row 'tape:position=rope' gives position twice"),
        ("--rows rope:cudn", "unknown attention implementation 'cudn'"),
        ("--dtype float3", "unknown model dtype 'float3'"),
    ],
)
def test_wrong_rows(options, message, capsys):
    """One line after the usage."""
    with pytest.raises(SystemExit):
        train_step.parse(options.split())
    error = capsys.readouterr().err.rpartition("error: ")[2]
    assert message in error
    assert error.count("\n") == 1


def test_the_least_checkpoint(capsys):
    assert load.model_of(load.LEAST_MEGABYTES).config.mlp_size >= 1
    with pytest.raises(ValueError, match="intermediate_size"):
        load.model_of(load.LEAST_MEGABYTES - 1)
    with pytest.raises(SystemExit):
        load.main(["--megabytes", "60"])
    assert f"--megabytes 60: at least {load.LEAST_MEGABYTES}" in capsys.readouterr().err


@pytest.mark.slow
def test_gpu_plan(tmp_path, monkeypatch, capsys):
    """A report that is complete although a part fails and another has no time left."""
    parts = (
        gpu.Part("Fails", "benchmarks.attention --backends nothing", 1),
        gpu.Part("Late", "benchmarks.data", 0),
    )
    monkeypatch.setattr(gpu, "DRY", parts)
    assert gpu.main(["--dry", "--folder", str(tmp_path)]) == 1
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-cpu-dry.md")
    text = path.read_text()
    assert "unknown attention implementation 'nothing'" in text
    assert "Failed with exit code 1." in text
    assert "## Late" in text
    assert "Not measured: no time left." in text
    assert "did not succeed: Fails, Late\n" in capsys.readouterr().out


def test_reports_of_one_day_are_all_kept(tmp_path):
    now = datetime.datetime(2026, 11, 22, 19, 5, 1)
    first = gpu.report_path(tmp_path, "chip", now)
    first.touch()
    assert first.name == "2026-11-22-chip.md"
    assert gpu.report_path(tmp_path, "chip", now).name == "2026-11-22-chip-190501.md"
    assert gpu.report_path(tmp_path, "chip", now, again=True) == first


def test_tests_of_the_gpu_plan_see_the_gpu(monkeypatch):
    """They run on a CPU unless told otherwise, where all that need a GPU are skipped."""
    (part,) = [part for part in gpu.PLAN if part.command.startswith("pytest")]
    given = {}

    def note(command, env, **options):
        given.update(env)
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(gpu.subprocess, "run", note)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert gpu.run(part, 60, {}).succeeded
    assert given["JAX_PLATFORMS"] == ""


def test_gpu_plan_begins_with_tuning():
    for plan in (gpu.PLAN, gpu.DRY):
        module, *options = plan[0].command.split()
        assert module == "tape_jax.tune"
        assert tune_options(options)


def tune_options(options):
    """Whether the command takes these options: it is stopped before it does anything."""
    with pytest.raises(SystemExit) as stopped:
        tune.main([*options, "--help"])
    return stopped.value.code == 0


PTXAS = """\
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to non wgmma instructions in the function 'one' in line 7
ptxas info    : Compiling entry function 'one' for 'sm_90a'
    16 bytes stack frame, 24 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : Compiling entry function 'two' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""
LAUNCHES = """\
001: kCustomKernel [source] one grid: [8, 4, 2] threads: [256, 1, 1]  shared_memory: 53248 bytes
002: kCustomKernel [prev=1] two grid: [8, 1, 1] threads: [16, 2, 1]  shared_memory: 0 bytes
"""


def test_reports_of_ptxas(tmp_path):
    (tmp_path / "a.ptxas").write_text(PTXAS)
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "m.thunk_sequence.txt").write_text(LAUNCHES)
    assert list(aot.read_kernels(tmp_path)) == [
        aot.KernelReport("one", 255, (24, 12), 53248, 256, True),
        aot.KernelReport("two", 40, (0, 0), 0, 32, False),
    ]


def test_aot_names_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        aot.main(["--targets", "sm_80"])
    assert "jax-cuda13-plugin" in capsys.readouterr().err


@pytest.mark.slow
def test_scaling_prints_a_table_for_each_size(monkeypatch, capsys):
    mesh = scaling.ShardingConfig(fsdp=2)
    small = {"length": 64, "layers": 2, "width": 64}
    cases = {"1": scaling.Case(**small), "2": scaling.Case(**small, batch=2, mesh=mesh)}
    monkeypatch.setattr(scaling, "CASES", {"devices": cases})
    scaling.main([])
    rows = capsys.readouterr().out.strip().splitlines()[-2:]
    alone, split = ([float(x) for x in row.strip("| ").split("|")] for row in rows)
    assert alone[4:] == [0, 0]
    assert split[4] >= split[5] > 0
    assert alone[1] > alone[2] > 0
