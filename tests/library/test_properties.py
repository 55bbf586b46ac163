"""What holds for every model and every call: properties of models and calls drawn at random.

Each is tried with few calls of one model of a kind, and in the slow tests with more; of TAPE then
with three models.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import P
from jax.sharding import AxisType, NamedSharding

from tape_jax import Experts, ModelConfig, rotary_state, rotate, testing
from tape_jax.positions import registry
from tape_jax.sharding import Sharding
from tests import drawn
from tests.drawn import DYNAMIC, LIMIT, TOLERANCE, Batch, Profile, assert_near, for_all
from tests.library.attention import cases
from tests.library.attention.cases import Case
from tests.selection import OF_EACH_SORT

ROWS, TIME = 3, 8

QUICK = Profile("quick", calls=4, models_of_tape=1)
LONG = Profile("long", calls=20, models_of_tape=3)


def each_profile(test):
    """Runs a property on few examples, and in the slow tests on more."""
    runs = [QUICK, pytest.param(LONG, marks=pytest.mark.slow)]
    return pytest.mark.parametrize("profile", runs, ids=str)(test)


def each_kind(*quick, among=tuple(registry)):
    """Runs a property for every encoding ``among`` those; in the quick tests for these, or all."""
    runs = [pytest.param(kind, QUICK, id=kind) for kind in quick or among] + [
        pytest.param(kind, LONG, id=f"{kind}-long", marks=pytest.mark.slow) for kind in among
    ]
    return pytest.mark.parametrize(("kind", "profile"), runs)


# --- Cached and full passes ----------------------------------------------------------------------


# Ways to enter the model; two whose updates look at more than the tokens they see.
QUICK_KINDS = ("tape", "tape_place_weights", "random_rope", "abacus", "t5", "fox")


@each_kind(*QUICK_KINDS, among=tuple(registry))
def test_chunks_equal_the_full_pass(kind, profile):
    """Whatever the positions, the segments and the sizes of the chunks."""
    models = drawn.models(kind, profile)

    @for_all(profile.calls, kind, call=drawn.calls(models, drawn.batches_in_chunks, ROWS, TIME))
    def check(call):
        model, (batch, sizes) = call
        with drawn.precision(model.dtype):
            full, chunked = full_pass(model, batch), in_chunks(model, batch, sizes)[0]
        real = batch.ids != 0
        assert_near(chunked[real], full[real], TOLERANCE[model.dtype])


def full_pass(model, batch, variables=None):
    """Logits of a causal pass, to compare with one through a cache of capacity LIMIT."""
    variables = variables or model.variables
    out = drawn.compiled_full_pass(model.model, variables, batch, length=model.length)
    return np.asarray(out)


def in_chunks(model, batch, sizes, *, used=0):
    """Logits of a batch that passes a cache in chunks, and the cache.

    The first ``used`` slots of the cache hold padding.
    """
    cache = new_cache(model, batch)
    cache, found, first = drawn.with_padding(cache, used), [], 0
    for size in sizes:
        part = batch.part(slice(None), slice(first, first + size))
        logits, cache = drawn.compiled_chunk(model.model, model.variables, cache, part)
        found.append(logits)
        first += size
    return np.concatenate(found, axis=1), cache


def new_cache(model, batch):
    """An empty cache of capacity LIMIT for positions like those of the batch."""
    kind = "float32" if np.issubdtype(batch.positions.dtype, np.floating) else "int32"
    options = {"position_dtype": kind}
    return drawn.compiled_init_cache(model.model, len(batch.tokens), LIMIT, **options)


def uncompiled(model, batch, *, cached):
    """Logits of a causal pass that is not compiled; with ``cached`` as one chunk of a new cache."""
    if not cached:
        out = drawn.full_pass(model.model, model.variables, batch, length=model.length)
    else:
        cache = new_cache(model, batch)
        out, _ = drawn.chunk(model.model, model.variables, cache, batch)
    return np.asarray(out)


# --- Meshes --------------------------------------------------------------------------------------

MESHES = {
    "batch and heads": {"data": 2, "tensor": 2},
    "batch, parameters and heads": {"data": 2, "fsdp": 2, "tensor": 2},
}


@pytest.mark.slow
@each_kind("tape", among=[kind for kind in OF_EACH_SORT if kind not in drawn.ONE_STATE_A_HEAD])
def test_a_mesh_changes_nothing(kind, profile):
    """Whatever it splits, and whether its axes are explicit or automatic."""
    models = drawn.models(kind, profile, num_heads=4, num_kv_heads=2, vocab_size=16)
    meshes = st.sampled_from(sorted(MESHES)), st.sampled_from((AxisType.Explicit, AxisType.Auto))

    @for_all(
        profile.calls // 2,
        kind,
        call=drawn.calls(models, drawn.batches, 4, TIME),
        mesh=st.tuples(*meshes),
    )
    def check(call, mesh):
        (model, batch), (name, axes) = call, mesh
        sizes = MESHES[name]
        mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (axes,) * len(sizes))
        sharding = Sharding(mesh)
        options = {"is_causal": model.is_causal, "key": model.key, "length": model.length}
        with drawn.precision(model.dtype):
            expected = drawn.compiled_full_pass(model.model, model.variables, batch, **options)
            places = sharding.of(model.model, model.variables)
            variables = jax.device_put(model.variables, places)
            rows = NamedSharding(mesh, P("data"))
            moved = Batch(*(None if x is None else jax.device_put(x, rows) for x in batch))
            with jax.set_mesh(mesh):
                run = model.model.clone(sharding=sharding)
                found = drawn.compiled_full_pass(run, variables, moved, **options)
        real = batch.ids != 0
        assert_near(np.asarray(found)[real], np.asarray(expected)[real], TOLERANCE[model.dtype])


# --- Padding and packing -------------------------------------------------------------------------


@each_kind("tape", "abacus", "alibi", among=tuple(registry))
def test_a_segment_equals_itself_alone(kind, profile):
    """Whatever else its row and its batch hold: padding on either side, or another segment."""
    models, size = drawn.models(kind, profile), 5
    strategy = drawn.calls(models, drawn.batches_around_a_segment, ROWS, TIME, size)

    @for_all(profile.calls, kind, call=strategy)
    def check(call):
        model, (batch, where, length) = call
        alone = batch.part(slice(0, 1), where)._replace(ids=None)
        options = {"is_causal": model.is_causal, "length": length, "key": model.key}
        with drawn.precision(model.dtype):
            found, expected = (
                drawn.compiled_full_pass(model.model, model.variables, x, **options)
                for x in (batch, alone)
            )
            assert_near(found[0, where], expected[0], TOLERANCE[model.dtype])


@pytest.mark.slow
@each_kind("rope", among=("rope", "tape", "random_rope", "fire", "abacus", "tape_place_weights"))
def test_rows_equal_one_row_that_holds_them_all(kind, profile):
    """Also in the losses of routers, which leave padding out wherever it is."""
    models = drawn.models(kind, profile, experts=Experts(count=3))

    @for_all(profile.calls, kind, call=drawn.calls(models, drawn.batches, ROWS, TIME))
    def check(call):
        model, batch = call
        real = batch.ids.ravel() != 0
        own_ids = np.where(batch.ids == 0, 0, batch.ids + 3 * np.arange(ROWS)[:, None])
        order = np.argsort(~real, stable=True)
        row = Batch(*(x.ravel()[order][None] for x in batch._replace(ids=own_ids)))
        options = {"is_causal": model.is_causal, "length": model.length, "losses": True}
        with drawn.precision(model.dtype):
            (found, losses), (expected, expected_losses) = (
                drawn.compiled_full_pass(model.model, model.variables, x, **options)
                for x in (row, batch)
            )
        expected = np.asarray(expected).reshape(len(real), -1)[real]
        assert_near(found[0, : len(expected)], expected, TOLERANCE[model.dtype])
        for x, y in zip(losses, expected_losses, strict=True):
            assert_near(x, y, TOLERANCE[model.dtype])


@pytest.mark.mostly_slow
@each_profile
@pytest.mark.parametrize("kind", ["random_rope", "rope"])
def test_each_row_may_have_a_length_of_its_own(kind, profile):
    fixed = {} if kind == "random_rope" else {"scaling": DYNAMIC}
    lengths = (12, LIMIT, 12)

    @functools.cache
    def compiled(model):
        length = jnp.asarray(lengths, jnp.int32)
        return jax.jit(functools.partial(drawn.full_pass, model, length=length))

    @for_all(profile.calls, kind, model=drawn.models(kind, profile, **fixed), seed=drawn.seeds)
    def check(model, seed):
        places = np.broadcast_to(np.arange(TIME, dtype=np.int32), (ROWS, TIME))
        batch = Batch(drawn.tokens(seed, ROWS, TIME), places, np.ones((ROWS, TIME), np.int32))
        with drawn.precision(model.dtype):
            found = compiled(model.model)(model.variables, batch)
            for row, length in enumerate(lengths):
                expected = drawn.compiled_full_pass(
                    model.model, model.variables, batch, length=length
                )
                assert_near(found[row], expected[row], TOLERANCE[model.dtype])


# Others are tried for the table of docs/encodings_reference.md.
RELATIVE = (
    "tape", "abacus", "repo", "cope", "grape_additive", "path", "position_coupling", "mrope", "t5",
    "xpos", "fox",
)  # fmt: skip


@each_kind("tape", "repo", "path", among=RELATIVE)
def test_moving_all_positions_changes_nothing(kind, profile):
    models = drawn.models(kind, profile)

    @for_all(
        profile.calls,
        kind,
        call=drawn.calls(models, drawn.batches, ROWS, TIME),
        shift=st.integers(1, 64),
    )
    def check(call, shift):
        model, batch = call
        moved = batch._replace(positions=batch.positions + np.asarray(shift, batch.positions.dtype))
        with drawn.precision(model.dtype):
            found, expected = full_pass(model, moved), full_pass(model, batch)
        real = batch.ids != 0
        assert_near(found[real], expected[real], TOLERANCE[model.dtype])


# --- Going on from a cache -----------------------------------------------------------------------

# Going on is the same for all encodings but these, which look at tokens, lengths or tables.
CONTINUED = ("tape", "tape_place_weights", "abacus", "random_rope", "learned", "alibi")


@each_kind("tape", "learned", among=CONTINUED)
def test_extending_continues_each_row(kind, profile):
    """Its last segment and positions where it has any; an empty row begins with segment 1."""
    models, history = drawn.models(kind, profile), TIME // 2

    @for_all(
        profile.calls,
        kind,
        call=drawn.calls(models, drawn.batches_in_chunks, ROWS, history),
        seed=drawn.seeds,
    )
    def check(call, seed):
        model, (batch, sizes) = call
        new = drawn.tokens(seed, ROWS, TIME - history)
        with drawn.precision(model.dtype):
            _, cache = in_chunks(model, batch, sizes)
            extended, full = extend_twice(model, cache, new), full_pass(model, longer(batch, new))
        assert_near(extended, full[:, history:], TOLERANCE[model.dtype])


def longer(batch, new):
    """The batch with new tokens behind the last one of each row."""
    last = batch.part(slice(None), slice(-1, None))
    empty, steps = last.ids == 0, np.arange(new.shape[1], dtype=last.positions.dtype)
    behind = Batch(
        new,
        np.where(empty, 0, last.positions + 1).astype(steps.dtype) + steps,
        np.where(empty, 1, last.ids) + np.zeros_like(new),
    )
    return Batch(*(np.concatenate(pair, axis=1) for pair in zip(batch, behind, strict=True)))


def extend_twice(model, cache, new):
    """Logits of new tokens, of which first the one and then the other half follow a cache."""
    found = []
    for part in np.split(new, 2, axis=1):
        logits, cache = drawn.compiled_extend(model.model, model.variables, cache, part)
        found.append(logits)
    return np.concatenate(found, axis=1)


@each_kind("random_rope", among=CONTINUED)
def test_prompts_of_any_lengths_equal_full_passes(kind, profile):
    history = TIME // 2

    @for_all(
        profile.calls,
        kind,
        model=drawn.models(kind, profile),
        lengths=st.tuples(*[st.integers(0, history)] * ROWS),
        seed=drawn.seeds,
    )
    def check(model, lengths, seed):
        tokens, lengths = drawn.tokens(seed, ROWS, TIME), np.array(lengths, np.int32)
        places = np.arange(TIME, dtype=np.int32) + lengths[:, None] - history
        batch = Batch(tokens, np.maximum(places, 0), (places >= 0).astype(np.int32))
        with drawn.precision(model.dtype):
            first, cache = drawn.compiled_prompt(
                model.model, model.variables, tokens[:, :history], lengths, LIMIT
            )
            extended = extend_twice(model, cache, tokens[:, history:])
            full = full_pass(model, batch)
        found, real = np.concatenate([first, extended], axis=1), batch.ids != 0
        assert_near(found[real], full[real], TOLERANCE[model.dtype])


# --- Out of range --------------------------------------------------------------------------------


@each_profile
@pytest.mark.parametrize("kind", drawn.INDEXING)
@pytest.mark.parametrize("cached", [False, True], ids=["full", "cached"])
def test_positions_outside_of_a_table_give_no_number(kind, cached, profile):
    """An error where positions are known, NaN where they are traced; other rows do not notice."""
    models = drawn.models(kind, profile)

    @for_all(
        profile.calls,
        kind,
        call=drawn.calls(models, drawn.batches_in_chunks, ROWS, TIME, padded=False),
        row=st.integers(0, ROWS - 1),
        where=st.integers(0, TIME - 1),
        bad=st.sampled_from((LIMIT, LIMIT + 1, 100_000, -1, -LIMIT)),
    )
    def check(call, row, where, bad):
        model, (batch, sizes) = call
        wrong = batch._replace(positions=batch.positions.copy())
        wrong.positions[row, where] = bad
        with drawn.precision(model.dtype):
            expected, found = (
                in_chunks(model, x, sizes)[0] if cached else full_pass(model, x)
                for x in (batch, wrong)
            )
            assert np.isnan(found[row, where]).all()
            others = np.arange(ROWS) != row
            assert_near(found[others], expected[others], TOLERANCE[model.dtype])
            with pytest.raises(ValueError, match="position"):
                uncompiled(model, wrong, cached=cached)


@each_profile
@pytest.mark.parametrize("kind", drawn.INDEXING)
@pytest.mark.parametrize("cached", [False, True], ids=["full", "cached"])
def test_fractions_index_no_table(kind, cached, profile):
    for number in profile.numbers(kind):
        model = drawn.drawn_model(kind, number)
        places = np.arange(4, dtype=np.float32)[None] / 4
        batch = Batch(drawn.tokens(0, 1, 4), places, np.ones((1, 4), np.int32))
        with drawn.precision(model.dtype), pytest.raises(ValueError, match="integers"):
            in_chunks(model, batch, [4]) if cached else full_pass(model, batch)


# Ways to enter the model, and to write and read a cache.
WRITING = (*QUICK_KINDS, "path", "selective_rope", "wall", "dapev2_kerple")


@each_kind("tape", "random_rope", among=WRITING)
def test_behind_its_last_slot_a_cache_gives_no_number(kind, profile):
    """An error where its index is known, NaN where it is traced. What fits is right everywhere."""
    models = drawn.models(kind, profile)

    @for_all(
        profile.calls,
        kind,
        call=drawn.calls(models, drawn.batches_in_chunks, ROWS, TIME),
        left=st.integers(0, TIME - 1),
    )
    def check(call, left):
        model, (batch, sizes) = call
        with drawn.precision(model.dtype):
            expected = in_chunks(model, batch, sizes)[0]
            found = in_chunks(model, batch, sizes, used=LIMIT - left)[0]
            cache = new_cache(model, batch)
            cache = drawn.with_padding(cache, LIMIT - left)
            with pytest.raises(ValueError, match="capacity"):
                drawn.chunk(model.model, model.variables, cache, batch)
        ends = np.repeat(np.cumsum(sizes), sizes)
        real = batch.ids != 0
        fits, over = real & (ends <= left), real & (np.arange(TIME) >= left)
        assert_near(found[fits], expected[fits], TOLERANCE[model.dtype])
        assert np.isnan(found[over]).all()
        # Those that fit, in a chunk that does not.
        between = real & ~fits & ~over & np.isfinite(found).all(-1)
        assert_near(found[between], expected[between], TOLERANCE[model.dtype])


# --- Compilation, layouts and gradients ----------------------------------------------------------


@pytest.mark.slow
@each_kind("t5", among=("t5", "rope", "tape", "random_rope", "abacus", "fire"))
def test_compilation_changes_nothing(kind, profile):
    """Nor does it matter whose arrays are given, numpy's or jax's."""
    models = drawn.models(kind, profile)

    @for_all(profile.calls // 4, kind, call=drawn.calls(models, drawn.batches, ROWS, TIME))
    def check(call):
        model, batch = call
        real, tolerance = batch.ids != 0, TOLERANCE[model.dtype]
        with drawn.precision(model.dtype):
            expected = full_pass(model, batch)
            for cached in (False, True):
                found = uncompiled(model, batch, cached=cached)
                assert_near(found[real], expected[real], tolerance)


@pytest.mark.slow
@each_kind("tape", "fire", among=(*OF_EACH_SORT, "fire"))
def test_scan_remat_and_vmap_change_nothing_and_gradients_are_slopes(kind, profile):
    """The gradients of one layout against differences of the loss of the other, along a line."""
    models, step = drawn.models(kind, profile, dtype="float64"), 1e-7

    @for_all(
        profile.calls,
        kind,
        call=drawn.calls(models, drawn.batches, ROWS, TIME),
        seed=drawn.seeds,
    )
    def check(call, seed):
        model, batch = call
        rng = np.random.default_rng(seed)
        params = model.variables["params"]
        line = jax.tree.map(lambda x: rng.standard_normal(x.shape), params)
        weights = rng.standard_normal((ROWS, TIME, model.model.config.vocab_size))
        weights *= batch.ids[..., None] != 0

        def loss_at(distance):
            moved = jax.tree.map(lambda x, d: np.asarray(x) + distance * d, params, line)
            logits = full_pass(model, batch, {"params": moved})
            return np.sum(weights * np.sin(logits))

        with drawn.precision("float64"):
            logits, gradients = model.relaid_gradients(params, batch, weights)
            # To fourth order: a norm that divides by something small bends the loss.
            near, far = (loss_at(d) - loss_at(-d) for d in (step, 2 * step))
            slope = (8 * near - far) / (12 * step)
            expected = full_pass(model, batch)
        real = batch.ids != 0
        assert_near(np.asarray(logits)[real], expected[real], TOLERANCE["float64"])
        pairs = zip(*map(jax.tree.leaves, (gradients, line)), strict=True)
        along = sum(np.vdot(x, d) for x, d in pairs)
        assert_near(along, slope, 1e-6)


# --- Attention -----------------------------------------------------------------------------------

BACKENDS = {
    "chunked": {"implementation": "chunked", "options": {"block_q": 4, "block_k": 3}},
    "pallas": {"implementation": "pallas", "interpret": True},
}


@st.composite
def attention_cases(draw):
    """Cases of tests.library.attention.cases."""

    def one_of(*values):
        return draw(st.sampled_from(values))

    form, queries = one_of("rotary", "tensor", None), one_of(9, 5, 1)
    keys = one_of(None, queries, 7)
    same_length = keys in (None, queries)
    heads, kv_heads = one_of((2, 2), (4, 2), (4, 1))
    return Case(
        "drawn",
        batch=one_of((2,), (), (2, 2)),
        queries=queries,
        keys=keys,
        heads=heads,
        kv_heads=kv_heads,
        form=form,
        state_heads=one_of(1, kv_heads),
        state_batch=form != "rotary" or one_of(True, False),
        query_state=form is not None and one_of(False, True),
        is_causal=one_of(True, False),
        local_window_size=one_of(None, 1, 3),
        scale=one_of(None, 0.3),
        bias=one_of(None, "array", "row", "function"),
        segments=one_of(None, "pair", *["same"] * same_length),
        mask=one_of(None, "full", "heads", "keys", "queries") if queries >= 5 else None,
        log_decay=one_of(None, "pair", "mixed", *["same", "shared"] * same_length),
        query_offset=one_of(0, 2, -2, 6),
        keys_rotated=form is not None and one_of(False, True),
        attend_state=one_of(True, False),
    )


def attend(case, seed, dtype, **keywords):
    """Outputs, and gradients of all floats for fixed cotangents."""
    floats, fixed = cases.inputs(case, seed)
    rng = np.random.default_rng(seed)

    @jax.jit
    def outputs_and_gradients(floats):
        out, pull = jax.vjp(lambda f: cases.call(drawn.attend, case, f, fixed, **keywords), floats)
        cotangents = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), dtype), out)
        return out, pull(cotangents)[0]

    return outputs_and_gradients(jax.tree.map(lambda x: jnp.asarray(x, dtype), floats))


@pytest.mark.slow
@each_profile
def test_implementations_of_attention_agree(profile):
    """In outputs, also with loops in numpy, and in gradients; where one takes the call."""

    @for_all(profile.calls, "attention", case=attention_cases(), seed=drawn.seeds)
    def check(case, seed):
        with drawn.precision("float64"):
            outputs, gradients = attend(case, seed, "float64", implementation="reference")
            assert_all_near(outputs, cases.oracle(case, *cases.inputs(case, seed)), 1e-12)
        # Interpreted kernels take seconds to compile.
        others = [("chunked", "float64")] + [("pallas", "float32")] * (profile is LONG)
        for name, dtype in others:
            try:
                with drawn.precision(dtype):
                    found = attend(case, seed, dtype, **BACKENDS[name])
            except NotImplementedError:  # attention/backends.py says what each refuses
                continue
            assert_all_near(found, (outputs, gradients), 1e-12 if dtype == "float64" else 1e-5)


def assert_all_near(actual, expected, tolerance):
    for x, y in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert_near(x, y, tolerance)


@each_profile
def test_states_between_one_for_all_and_full_rank_are_refused(profile):
    sizes = st.integers(1, 3)

    @for_all(10 * profile.calls, "states", batch=sizes, time=sizes, heads=sizes)
    def check(batch, time, heads):
        def array(*shape):
            return jax.ShapeDtypeStruct((*shape, 4), jnp.float32)

        q = array(batch, time, heads)
        for lead in ((time,), (1, time, 1), (batch, time, heads)):
            assert not drawn.state_is_refused(q, q, q, array(*lead))
        for lead in ((time, heads), (batch, time), (time, 1)):
            assert drawn.state_is_refused(q, q, q, array(*lead))


# --- Turns, gaps and far places ------------------------------------------------------------------


@pytest.mark.slow
@each_kind("tape", among=("tape", "alibi", "fox", "path", "learned"))
def test_turns_follow_a_stop(kind, profile):
    """What follows a row's stop is none of its text, whenever the row has stopped."""
    models = drawn.models(kind, profile, local_window_size=None)

    @for_all(
        profile.calls // 4, kind, model=models, seed=drawn.seeds, count=st.sampled_from((2, 5))
    )
    def check(model, seed, count):
        prompts, turn = drawn.tokens(seed, ROWS, 3), drawn.tokens(seed + 1, ROWS, 2)
        with drawn.precision(model.dtype):
            first = drawn.compiled_decode(model.model, model.variables, prompts, count, LIMIT)[0]
            stop = np.asarray(first)[0, :1]
            said, cache = drawn.compiled_decode(
                model.model, model.variables, prompts, count, LIMIT, stop=stop
            )
            found, _ = drawn.compiled_extend(model.model, model.variables, cache, turn)
            for row, own in enumerate(np.asarray(said)):
                ends = np.flatnonzero(own == stop)
                text = own[: ends[0] + 1] if ends.size and ends[0] < count - 1 else own[:-1]
                whole = np.concatenate([prompts[row], text, turn[row]])[None]
                batch = Batch(whole, np.arange(whole.size, dtype=np.int32)[None], None)
                expected = full_pass(model, batch)[0, -2:]
                assert_near(found[row], expected, TOLERANCE[model.dtype])


@pytest.mark.slow
@each_kind("tape", among=("tape", "rope", "alibi", "fox", "cope"))
def test_a_text_with_gaps_equals_itself_alone(kind, profile):
    """Padding between its tokens, and another text in turns with it, count for no window."""
    models = drawn.models(kind, profile, local_window_size=2)
    ids = st.lists(st.integers(0, 2), min_size=TIME, max_size=TIME).filter(lambda x: 1 in x)

    @for_all(profile.calls, kind, model=models, ids=ids, seed=drawn.seeds)
    def check(model, ids, seed):
        ids, tokens = np.array([ids], np.int32), drawn.tokens(seed, 1, TIME)
        places = np.zeros_like(ids)
        for name in (1, 2):
            places[ids == name] = np.arange((ids == name).sum())
        own = ids[0] == 1
        alone = Batch(tokens[:, own], places[:, own], None)
        with drawn.precision(model.dtype):
            found = full_pass(model, Batch(tokens, places, ids))
            assert_near(found[:, own], full_pass(model, alone), TOLERANCE[model.dtype])


@each_kind("tape", "sinusoidal", among=("tape", "sinusoidal", "longrope", "mrope"))
def test_a_configuration_is_read_back_from_its_fields(kind, profile):
    @for_all(profile.calls, kind, model=drawn.models(kind, profile))
    def check(model):
        config = model.model.config
        assert ModelConfig(**dataclasses.asdict(config)) == config


@pytest.mark.slow
@each_profile
def test_moving_far_away_changes_no_logit(profile):
    """Of rotary states in float32, by any number of tokens up to 2^31."""
    far = st.integers(-(2**31) + 8, 2**31 - 8)

    @for_all(10 * profile.calls, "far", far=far, seed=drawn.seeds, dim=st.sampled_from((2, 8, 64)))
    def check(far, seed, dim):
        rng = np.random.default_rng(seed)
        q, k = rng.normal(size=(2, 6, 1, dim)).astype(np.float32)

        def logits(places):
            e = rotary_state(jnp.asarray(places, jnp.int32), dim)
            return jnp.einsum("qhd,khd->hqk", rotate(q, e), rotate(k, e))

        # Angles of places below 2^12 are plain products, off by 3e-4 at most.
        assert_near(logits(np.arange(6) + far), logits(np.arange(6)), 5e-4)


@pytest.mark.slow
@each_kind("alibi", among=("alibi", "t5"))
def test_a_segment_far_away_equals_itself_near(kind, profile):
    """Beside padding and another segment, in a full pass and one token at a time."""
    models = drawn.models(kind, profile, dtype="float32")
    far = st.integers(-(2**31), 2**31 - TIME)

    @for_all(profile.calls, kind, model=models, far=far, seed=drawn.seeds)
    def check(model, far, seed):
        ids = np.array([[0, 1, 1] + [2] * (TIME - 3)], np.int32)
        places = np.array([[0, 0, 1, *range(TIME - 3)]], np.int32)
        near = Batch(drawn.tokens(seed, 1, TIME), places, ids)
        moved = near._replace(positions=np.where(ids == 2, places + far, places).astype(np.int32))
        with drawn.precision(model.dtype):
            expected = full_pass(model, near)[:, 3:]
            for found in (full_pass(model, moved), in_chunks(model, moved, [1] * TIME)[0]):
                assert_near(found[:, 3:], expected, TOLERANCE[model.dtype])


@each_profile
def test_a_part_that_is_imaginary_is_seen(profile):
    @for_all(profile.calls, "imaginary", factor=st.floats(0.1, 10), real=st.floats(-1, 1))
    def check(factor, real):
        with pytest.raises(testing.SymmetryError):
            testing.assert_shift_invariant(lambda p: real + 1j * factor * p, np.arange(5.0))
