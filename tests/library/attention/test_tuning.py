"""The choice by measurement, where measurements are kept, and which do not count."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import types
import warnings

import jax
import numpy as np
import pytest

from tape_jax import attention, attention_plan, tune
from tape_jax._src.attention import recorded_plans, reference
from tape_jax._src.attention.normalize import normalize
from tape_jax._src.attention.tuning import measure, records
from tape_jax._src.attention.tuning.records import CallShape, Measured
from tape_jax._src.core.timing import Timing
from tape_jax.sharding import ShardingConfig
from tests.processes import in_two_processes

SHAPE = CallShape(8, 64, "float32", True, 1, 2, 2)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A cache folder of its own, and nothing known."""
    monkeypatch.setenv("TAPE_JAX_CACHE", str(tmp_path))
    records.key.cache_clear()
    records.device.cache_clear()
    records.forget()
    yield tmp_path / "attention"
    records.forget()


def result(name, forward=1.0, gradients=2.0, **other):
    return Measured(name, forward, gradients, error=0.0, **other)


def timer(seconds):
    """A clock by which every function takes what its name says."""

    def take_turns(functions, **_):
        for function in functions.values():
            function()
        return {name: Timing((seconds.get(name, 1.0),)) for name in functions}

    return take_turns


def plan_of(shape, **keywords):
    q, k, v, *e = shape.structs()
    return attention_plan(q, k, v, state=e[0] if e else None, is_causal=True, **keywords)


def known(*results, shape=SHAPE):
    records.write({shape: list(results)})
    records.forget()


def test_what_was_measured_is_taken():
    known(result("reference"), result("chunked", 0.5, 1.0))
    plan = plan_of(SHAPE)
    assert (plan.implementation, plan.options) == ("chunked", {})
    assert plan.measured == {"chunked": (0.5, 1.0), "reference": (1.0, 2.0)}
    assert plan.basis == "measured: D 8, T 64, float32, 1 x 2 heads, state"
    assert plan.rejected == {
        "reference": "measured: 1e+03 ms forward and 2e+03 ms with gradients, 'chunked' 500 and "
        "1e+03 ms",
        **dict.fromkeys(("query_blocks", "rows"), "can do this call, but 'chunked' is tried first"),
    }
    arrays = SHAPE.arrays()
    with recorded_plans() as plans:
        attention(*arrays[:3], state=arrays[3], is_causal=True)
    assert [dataclasses.replace(x, operations=plan.operations) for x in plans] == [plan]


@pytest.mark.parametrize(
    ("forward", "gradients", "spread", "taken"),
    [
        (0.8, 1.6, 0.0, "chunked"),
        (0.8, 1.7, 0.0, "reference"),
        (0.83, 1.0, 0.0, "reference"),
        (0.5, 1.6, 0.1, "chunked"),
        (0.5, 1.6, 0.12, "reference"),
    ],
)
def test_the_default_gives_way_to_what_is_faster_both_ways(forward, gradients, spread, taken):
    """By more than what another process shows: a fifth less, and not in runs that differ so."""
    results = [
        result("reference", spreads=(0.0, spread)),
        result("chunked", forward, gradients, spreads=(spread, spread)),
    ]
    best = records.ranked(results, "reference")
    assert best[0].implementation == taken
    assert len(best) == 2


def test_what_disagrees_anywhere_is_taken_nowhere():
    """In calls of types of the same width, not even where it is what is taken by default."""
    wrong = Measured("chunked", error=0.1, struck="disagrees", wrong=True)
    shapes = [dataclasses.replace(SHAPE, length=length) for length in (64, 128)]
    fast = [result("reference"), result("chunked", 0.1, 0.1)]
    half = dataclasses.replace(shapes[1], dtype="bfloat16")
    records.write({shapes[0]: [wrong], shapes[1]: fast, half: fast})
    records.forget()
    assert plan_of(shapes[1]).implementation == "reference"
    assert plan_of(half).implementation == "chunked"
    plan = plan_of(dataclasses.replace(SHAPE, length=8192))
    assert plan.implementation == "rows"
    assert plan.rejected["chunked"] == "disagrees"


@pytest.mark.parametrize("call", [{"length": 1000}, {"state": False}])
def test_what_disagrees_is_not_taken_where_nothing_near_was_measured(call):
    wrong = Measured("query_blocks", error=0.1, struck="disagrees", wrong=True)
    measured = dataclasses.replace(SHAPE, length=2048)
    known(wrong, result("chunked"), shape=measured)
    call = dataclasses.replace(measured, **call)
    plan = plan_of(call)
    assert (plan.implementation, plan.measured) == ("chunked", None)
    assert plan.rejected["query_blocks"] == "disagrees"
    half = dataclasses.replace(call, dtype="bfloat16")
    assert plan_of(half).implementation == "query_blocks"


def test_what_took_too_long_is_still_there():
    known(Measured("chunked", error=1e-7, struck="takes 9 s"))
    plan = plan_of(dataclasses.replace(SHAPE, length=4096))
    assert (plan.implementation, plan.measured) == ("chunked", {})


LONG = (64, 64), (64, 128), (64, 256, "float32", True, 8, 8, 8), (128, 512)


@pytest.mark.parametrize(
    ("measured", "call", "nearest"),
    [
        (LONG, (64, 100), (64, 128)),
        (LONG, (64, 33), (64, 64)),
        (LONG, (64, 31), None),
        (LONG, (64, 9999), (64, 128)),
        (LONG, (64, 256, "float32", True, 1, 16, 16), LONG[2]),
        (LONG, (64, 128, "float32", False), None),
        # Short calls of another head dimension say nothing, types of one width the same.
        ([(8, 16), (64, 256)], (64, 100), None),
        ([(8, 16), (64, 256)], (8, 16), (8, 16)),
        ([(64, 64, "bfloat16")], (64, 64, "float16"), (64, 64, "bfloat16")),
        ([(64, 64, "bfloat16")], (64, 64), None),
    ],
)
def test_the_nearest_shape_counts(measured, call, nearest):
    def shape(dim, length, dtype="float32", state=True, *heads):
        return CallShape(dim, length, dtype, state, *heads)

    found = records.nearest(shape(*call), [shape(*each) for each in measured])
    assert found == (nearest and shape(*nearest))


def test_calls_with_far_more_keys_than_queries_are_not_known():
    known(result("chunked", 0.1, 0.1), result("reference"))
    q = jax.ShapeDtypeStruct((1, 1, 2, 8), "float32")
    k = jax.ShapeDtypeStruct((1, 64, 2, 8), "float32")
    e = jax.ShapeDtypeStruct((1, 64, 2, 8), "float32")
    query_state = jax.ShapeDtypeStruct((1, 1, 2, 8), "float32")
    plan = attention_plan(q, k, k, state=e, query_state=query_state, query_offset=63)
    assert (plan.implementation, plan.measured) == ("reference", None)


@pytest.mark.parametrize(
    ("measured", "length", "taken"),
    [(64, 64, "reference"), (64, 181, "reference"), (64, 182, "ch"), (8192, 8192, "chunked")],
)
def test_the_reference_is_not_taken_where_its_memory_was_not_tried(measured, length, taken):
    """Except in so small a call that it is the default; each layer of a model keeps its logits."""
    measured = dataclasses.replace(SHAPE, length=measured)
    known(result("reference", 0.1, 0.1), result("chunked"), shape=measured)
    plan = plan_of(dataclasses.replace(SHAPE, length=length))
    assert plan.implementation.startswith(taken)


def test_what_refuses_a_call_is_passed_over(register):
    def check(request):
        if request.visibility.mask is not None:
            raise NotImplementedError("no masks")

    register(check=check, attend=None)
    known(result("extra", 0.1, 0.1), result("chunked", 0.2, 0.2), result("reference"))
    assert plan_of(SHAPE).implementation == "extra"
    plan = plan_of(SHAPE, mask=jax.ShapeDtypeStruct((64, 64), "bool"))
    assert plan.implementation == "chunked"
    assert plan.rejected["extra"] == "no masks"


def test_a_backend_that_disagrees_is_struck_off(register):
    """In one gradient of one row, though it is by far the fastest."""

    @jax.custom_vjp
    def wrong(x):
        return x

    wrong.defvjp(lambda x: (x, None), lambda _, g: (g.at[0, 5].multiply(1.1),))

    def attend(request):
        return reference.attend(dataclasses.replace(request, k=wrong(request.k)))

    register(check=lambda request: None, attend=attend)
    seconds = {"extra": 0.01, "chunked": 0.5}
    names, limits = ["reference", "extra", "chunked"], measure.Limits()
    found = measure.measure(SHAPE, names, limits=limits, timer=timer(seconds))
    by_name = {x.implementation: x for x in found}
    assert by_name["extra"].struck.startswith("disagrees with the reference: error ")
    assert not by_name["extra"].timed
    assert by_name["chunked"].error < 1e-5
    known(*found)
    assert plan_of(SHAPE).implementation == "chunked"


def test_errors_are_of_rows():
    wanted = np.ones((4, 8))
    wanted[3] = 1e-3
    got = wanted.copy()
    assert measure.row_error(got, wanted) == 0
    got[3] *= 2
    assert measure.row_error(got, wanted) == pytest.approx(1e-3, rel=0.2)
    got[0] *= 1.5
    assert measure.row_error(got, wanted) == pytest.approx(0.5 / 1.87, rel=0.01)
    got[1, 1] = np.nan
    assert measure.row_error(got, wanted) == np.inf


@pytest.mark.slow
def test_a_stopped_run_goes_on(monkeypatch):
    """Each case is written at once; what is there is not measured again, unless asked."""
    shapes = [SHAPE, dataclasses.replace(SHAPE, state=False)]
    lines = []
    options = {"seconds": 60, "say": lines.append, "timer": timer({})}

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    measure.tune(shapes[:1], **options)
    with pytest.raises(KeyboardInterrupt):
        measure.tune(shapes, **options | {"timer": stop})
    assert list(records.read()[0]) == shapes[:1]
    assert list(measure.tune(shapes, **options)) == shapes
    assert len(lines) == 2
    monkeypatch.setattr(measure, "measure", stop)
    measure.tune(shapes, **options)
    with pytest.raises(KeyboardInterrupt):
        measure.tune(shapes, **options, again=True)


def test_what_there_is_no_time_for_keeps_its_outcome(monkeypatch):
    """Timings, and what disagrees. What is ranked together was timed in one run."""
    before = {
        "reference": result("reference"),
        "chunked": Measured("chunked", error=0.1, struck="disagrees", wrong=True),
        "rows": Measured("rows", struck=measure.LATE),
    }
    known(*before.values())
    asked = []

    def tune(again, outcome):
        def found(shape, names, **_):
            asked.append({*names} & {*before})
            return [outcome(name) for name in names]

        monkeypatch.setattr(measure, "measure", found)
        table = measure.tune([SHAPE], seconds=60, again=again, say=lambda line: None)
        assert records.read()[0] == table
        return {x.implementation: x for x in table[SHAPE] if x.implementation in before}

    def late(name):
        return Measured(name, struck=measure.LATE)

    def partly(name):
        return late(name) if name == "reference" else result(name, 9.0)

    def wrong(name):
        return late(name) if name == "reference" else Measured(name, struck="no", wrong=True)

    def slower(name):
        return result(name, 8.0)

    assert (
        tune(False, late) == tune(True, late) == tune(False, partly) == tune(True, partly) == before
    )
    assert tune(False, slower) == before | {name: slower(name) for name in ("reference", "rows")}
    assert tune(True, result) == {name: result(name) for name in before}
    assert asked == [{"reference", "rows"}, {*before}] * 2 + [{"reference", "rows"}, {*before}]
    told = tune(True, wrong)
    assert told["reference"] == result("reference")
    assert told["rows"].wrong, "what disagrees is no time"


def test_a_case_in_which_nothing_was_timed_for_want_of_time_is_not_known(monkeypatch):
    near = dataclasses.replace(SHAPE, length=256)
    late = [Measured("chunked", struck=measure.LATE), Measured("rows", struck="takes 9 s")]
    records.write({SHAPE: late, near: [result("reference"), result("chunked", 0.1, 0.1)]})
    records.forget()
    plan = plan_of(SHAPE)
    assert (plan.implementation, plan.measured) == ("reference", None)
    plan = plan_of(dataclasses.replace(SHAPE, length=128))
    assert plan.basis == f"measured: {near}"
    measured = []
    monkeypatch.setattr(measure, "tune", lambda shapes, **_: measured.extend(shapes))
    tune.prepare(
        head_dim=8, length=64, dtype="float32", batch=1, num_heads=2, num_kv_heads=2,
        report=lambda line: None,
    )  # fmt: skip
    assert measured == [SHAPE, dataclasses.replace(SHAPE, state=False)]


def test_limits(monkeypatch):
    lines = []
    assert measure.tune([SHAPE], seconds=0, say=lines.append) == {}
    assert lines == ["1 of 1 cases are left: the time is over"]

    right = types.SimpleNamespace(error=lambda found: 0.0, tolerance=0.0)
    monkeypatch.setattr(measure, "_Truth", lambda inputs: right)
    for limits, why in (
        ({"deadline": 0.0}, measure.LATE),
        ({"memory": 0}, "RuntimeError: needs 0.0 GiB, limit 0 GiB"),
        ({"seconds": 0}, "s a call, limit 0 s"),
    ):
        found = measure.measure(SHAPE, ["reference"], limits=measure.Limits(**limits))
        assert why in found[0].struck
        assert measure.finished(found) == ("deadline" not in limits)


def test_what_the_others_are_to_beat_is_measured_first():
    """Where time is short, nothing is taken that was not compared with it."""
    found = measure.trials(dataclasses.replace(SHAPE, length=512))
    assert found.names[0] == found.default != "reference"
    assert len(set(found.names)) == len(found.names) > 3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text[: len(text) // 2], "damaged: "),
        (lambda text: "[]", "not a file of this format"),
        (lambda text: text.replace('"kernels": "', '"kernels": "0'), "of another kernels: 0"),
        (lambda text: text.replace('"shape"', '"form"'), "damaged: 'shape'"),
        (lambda text: text.replace("float32", "float33"), "damaged: unknown dtype 'float33'"),
        (
            lambda text: text.replace('length": 64', 'length": 0'),
            "damaged: length must be .*; got 0",
        ),
        (
            lambda text: text.replace('state": true', 'state": 1'),
            "damaged: state must be .*; got 1",
        ),
        (
            lambda text: text.replace('forward": 0.1', 'forward": ""'),
            "damaged: forward must .*; got ''",
        ),
        (lambda text: text.replace('"chunked"', "[]"), r"damaged: implementation must be .*\[\]"),
    ],
)
def test_files_that_do_not_count_are_named(change, why):
    known(result("chunked", 0.1, 0.1), result("reference"))
    file = records.path()
    file.write_text(change(file.read_text()))
    records.forget()
    with pytest.warns(UserWarning, match=why) as warned:
        assert plan_of(SHAPE).measured is None
    assert str(file) in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_of(SHAPE).implementation == "reference"


def test_files_of_before_are_named_where_there_is_no_other():
    known(result("chunked", 0.1, 0.1), result("reference"))
    old = records.path().with_name(records.path().name.replace(records.path().stem[-12:], "0" * 12))
    os.rename(records.path(), old)
    records.forget()
    with pytest.warns(UserWarning, match="its name is another file's"):
        assert plan_of(SHAPE).measured is None
    known(result("chunked", 0.1, 0.1), result("reference"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_of(SHAPE).implementation == "chunked"


def test_a_power_cut_leaves_the_old_file(monkeypatch):
    known(result("chunked", 0.1, 0.1), result("reference"))
    before = records.path().read_bytes()

    def cut(*_):
        raise OSError("no power")

    monkeypatch.setattr(os, "replace", cut)
    with pytest.raises(OSError, match="no power"):
        records.write({SHAPE: [result("reference")]})
    assert records.path().read_bytes() == before
    assert [file.suffix for file in records.folder().iterdir()] == [".json"]


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [
        ("XLA_FLAGS", "--xla_cpu_enable_fast_math=true", True),
        ("XLA_FLAGS", "--xla_dump_to=/tmp/x --xla_force_host_platform_device_count=3", False),
        ("NVIDIA_TF32_OVERRIDE", "0", True),
    ],
)
def test_what_changes_the_outcome_is_in_the_key(monkeypatch, name, value, counts):
    before = records.path()
    for context in (jax.enable_x64(True), jax.default_matmul_precision("highest")):
        records.key.cache_clear()
        with context:
            assert records.path() != before
    monkeypatch.setenv(name, f"{os.environ.get(name, '')} {value}")
    records.key.cache_clear()
    assert (records.path() != before) == counts


def test_the_file_is_read_once(monkeypatch):
    known(result("chunked", 0.1, 0.1), result("reference"))
    assert plan_of(SHAPE).implementation == "chunked"
    monkeypatch.setattr(records, "read", None)
    assert plan_of(SHAPE).implementation == "chunked"


@pytest.mark.slow
def test_import_reads_nothing(folder):
    """Nor does a call that names its implementation, and neither measures."""
    folder.mkdir()
    records.path().write_text("damaged")
    code = (
        "import warnings, sys; warnings.simplefilter('error'); import tape_jax, jax.numpy as jnp; "
        "import tape_jax.tune; x = jnp.ones((1, 4, 1, 2)); "
        "tape_jax.attention(x, x, x, implementation='chunked'); "
        "print([m for m in sys.modules if m.endswith(('tuning.measure', 'tuning.command'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_processes_agree_on_what_the_first_measured(monkeypatch):
    """Without that, several go by nothing."""
    known(result("chunked", 0.1, 0.1), result("reference"))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    records.forget()
    plan = plan_of(SHAPE)
    assert plan.implementation == "reference"
    assert "processes might not agree" in plan.basis
    for broadcast, taken in ((lambda text: text, "chunked"), (lambda _: " ", "reference")):
        monkeypatch.setattr(records, "broadcast_text", broadcast)
        tune.agree()
        assert plan_of(SHAPE).implementation == taken


PROGRAM = """
from tape_jax import attention, attention_plan, tune
from tape_jax._src.attention.tuning.records import CallShape
shape = CallShape(8, 64, "float32", True, 1, 2, 2)
def plan():
    q, k, v, e = shape.structs()
    found = attention_plan(q, k, v, state=e, is_causal=True)
    return [found.implementation, found.basis]
before = plan()
tune.agree()
q, k, v, e = shape.arrays()
total = sum(float(x.sum()) for x in attention(q, k, v, state=e, is_causal=True))
print(json.dumps([jax.process_count(), *before, *plan(), total]))
"""


@pytest.mark.slow
def test_two_processes_go_by_the_first_ones_file(monkeypatch, tmp_path):
    """Under ``jax.distributed``, on machines of which the second has measured nothing."""
    monkeypatch.setenv("XLA_FLAGS", "")
    records.key.cache_clear()
    known(result("chunked"), result("reference", 2.0, 4.0))
    folders = (tmp_path, tmp_path / "empty")
    found = in_two_processes(PROGRAM, [{"TAPE_JAX_CACHE": str(folder)} for folder in folders])
    assert found[0] == found[1]
    count, before, basis, after, _, _ = found[0]
    assert (count, before, after) == (2, "reference", "chunked")
    assert "processes might not agree" in basis


@pytest.mark.slow
def test_the_command(capsys, folder, monkeypatch):
    monkeypatch.setattr(
        measure, "tune", functools.partial(measure.tune, timer=timer({"chunked": 0.5}))
    )
    options = ["--head-dims", "8", "--lengths", "16", "--dtypes", "float32", "--heads", "2"]
    assert tune.main([*options, "--tokens", "32"]) == 0
    out = capsys.readouterr().out
    assert "\n2 cases to measure; nothing is begun after 15 min" in out
    assert "1 of 2, D 8, T 16, float32, 2 x 2 heads, state: chunked, 500 ms forward" in out
    assert "0.50 and 0.50 x reference" in out
    assert "splash: needs a TPU" in out
    (file,) = folder.glob("*.json")
    assert f"written: {file}" in out
    assert f"picture: {file.with_suffix('.png')}" in out
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    tune.main([*options, "--tokens", "32"])
    out = capsys.readouterr().out
    assert "2 of them were measured before" in out
    assert "\n0 cases to measure" in out
    assert "no picture: " in out


def test_an_odd_head_dimension_is_a_wrong_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        tune.main(["--head-dims", "15"])
    assert stopped.value.code == 2
    assert "argument --head-dims: expected an even integer; got '15'" in capsys.readouterr().err


def test_a_mesh_divides_the_shape():
    """The share of one device counts."""
    sharding = ShardingConfig(data=2, tensor=2, fsdp=2).build()
    shape = dataclasses.replace(SHAPE, batch=8, heads=4, kv_heads=2)
    q, k, v, e = shape.arrays()
    found = CallShape.of(normalize(q, k, v, state=e, sharding=sharding))
    assert found == dataclasses.replace(shape, batch=2, heads=2, kv_heads=1)


@pytest.mark.parametrize("value", [None, "file"])
def test_a_folder_that_cannot_be(monkeypatch, tmp_path, capsys, value):
    """Calls go on, the command says why it does not. The last is a file."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    if value is None:
        for name in ("TAPE_JAX_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        nowhere = records.Path("~nobody_of_this_name")
        monkeypatch.setattr(records.Path, "home", nowhere.expanduser)
    else:
        monkeypatch.setenv("TAPE_JAX_CACHE", value)
    records.forget()
    assert plan_of(SHAPE).measured is None
    with pytest.raises(SystemExit) as stopped:
        tune.main(["--lengths", "16", "--head-dims", "8"])
    assert stopped.value.code == 1
    assert "tape_jax.tune: measurements cannot be kept: " in capsys.readouterr().err
