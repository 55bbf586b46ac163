"""Recorded runs of other authors' encodings, compared with those of this library.

Each file holds queries, keys, values, the layer's inputs, the encoding's parameters, and the
published code's results: one layer's attention, its gradients, and intermediate values.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax._src import positions
from tape_jax._src.attention import AttentionRows, attention
from tape_jax._src.core.algebra import rotate
from tape_jax._src.core.checks import choose, require
from tape_jax._src.core.sizes import Sizes
from tape_jax._src.parity import coupled_positions
from tape_jax._src.parity.deviations import Deviation, deviation
from tape_jax._src.positions.fixed.bias import alibi_slopes
from tape_jax._src.positions.fixed.frequencies import RopeScaling, frequencies
from tape_jax._src.positions.layer import Layer
from tape_jax._src.positions.protocol import Encoding, default_positions

Array = jax.Array
Arrays = dict[str, Any]

# Neither inputs nor results: the cotangent of ``o``, and the authors' own result in float32.
NOT_COMPARED = ("do", "o_f32", "meta", "pos_ids")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The mapping of a file on to this library.

    Attributes:
      encoding: the compared encoding.
      params: its parameters, each computed from the file's arrays.
      prepare: changes the file's arrays first.
      window: how many keys a query sees, itself among them; None: all.
      constants: recorded values that depend on no input, such as ALiBi's slopes.
      att_of: the encoding whose weights and their remainder were recorded, ``att`` and ``rem``, if
        the compared one adds something to them.
      intermediates: as ``INTERMEDIATES``, for names that mean something else here.
      order: the numbers of a head in the library's order, as indices of the file's; None: the same
        order.
      positions: of the tokens, from the file's arrays; None: 0, 1, ...
    """

    encoding: Encoding
    params: dict[str, Callable[[Arrays], Any]] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Arrays], Arrays] = lambda arrays: arrays
    window: int | None = None
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)
    att_of: Encoding | None = None
    intermediates: dict[str, str] = dataclasses.field(default_factory=dict)
    order: np.ndarray | None = None
    positions: Callable[[Arrays], Any] | None = None


Source = Callable[[Arrays, Mapping[str, Any]], Recorded]


def same(**names: str) -> dict[str, Callable[[Arrays], Any]]:
    """Maps parameters to unchanged arrays of the file: our names to the file's."""
    return {
        name: functools.partial(lambda source, arrays: arrays[source], source)
        for name, source in names.items()
    }


def _fox(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    return Recorded(positions.Fox(), same(forget_kernel="W_f", forget_bias="b_f"))


def _cable(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    return Recorded(positions.Cable(), same(decay_kernel="W_f", decay_bias="b_f"))


def _selective_rope(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    full = "W_phi" in arrays
    trained, heads = "temp" in arrays, arrays["k"].shape[-2]
    rfa = "temp_theta" in meta and meta["temp_theta"] < 1
    encoding = positions.SelectiveRope(
        rank=None if full else arrays["W_phi1"].shape[1],
        taps=arrays["conv_w"].shape[-1],
        spacing="rfa" if rfa else "rope",
        theta=meta.get("temp_theta", meta.get("theta")),
        temperature=meta.get("temp_max", 1.0),
        learn_temperature=trained,
        gate="standard" if "W_g" in arrays else "none",
        bias="phi_bias" in arrays,
    )
    names = {
        "phase_kernel": "W_phi",
        "phase_scale": "s_phi",
        "phase_down": "W_phi1",
        "phase_up": "W_phi2",
        "phase_bias": "phi_bias",
        "gate_kernel": "W_g",
        "gate_bias": "b_g",
        "temperature": "temp",
    }
    params = same(**{ours: theirs for ours, theirs in names.items() if theirs in arrays})
    params["conv_kernel"] = lambda a: a["conv_w"].reshape(heads, -1, a["conv_w"].shape[-1])
    temperatures = encoding.temperatures(arrays["q"].shape[-1])
    return Recorded(encoding, params, constants={"temperature": temperatures})


def _grape_m_ctx(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    encoding = positions.GrapeMultiplicative(
        per_head=arrays["W_omega"].shape[-1] > 1,
        frequencies_per_head=arrays["log_freq"].ndim > 1,
        step="sigmoid",
        sigmoid_scale=meta["omega_scale"],
    )
    names = {"step_kernel": "W_omega", "step_bias": "b_omega", "log_frequencies": "log_freq"}
    return Recorded(encoding, same(**names))


def _repo_swiglu(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    encoding = positions.Repo(base=meta["theta"], width=arrays["W_gate"].shape[-1])
    names = {"place_gate": "W_gate", "place_content": "W_content", "place_kernel": "W_final"}
    return Recorded(encoding, same(**names))


def _repo_linear(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    encoding = positions.Repo(form="linear", base=meta["theta"])
    return Recorded(encoding, same(place_kernel="W_map"))


def _mapformer(cls: type[positions.MapFormerWM]) -> Callable[..., Recorded]:
    def recorded(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
        encoding = cls(rank=arrays["W_in"].shape[-1], grid=meta["grid_size"])
        first = encoding.frequencies(arrays["q"].shape[-1])
        names = {"delta_in": "W_in", "delta_out": "W_out", "omega": "omega", "q0": "q0", "k0": "k0"}
        return Recorded(
            encoding,
            same(**{ours: theirs for ours, theirs in names.items() if theirs in arrays}),
            prepare=_halves,
            constants={"omega_init": np.broadcast_to(first, arrays["omega"].shape)},
        )

    return recorded


def _halves(arrays: Arrays) -> Arrays:
    """Moves pairs ``(2c, 2c + 1)`` of the rotated dimensions to ``(c, c + D/2)``."""
    rotated = {name: x for name, x in arrays.items() if name in ("q", "k", "q0", "k0")}
    return arrays | {
        name: jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1) for name, x in rotated.items()
    }


KERPLE = same(r1="bias_p", r2="bias_a")
MLP = same(w1="W1", b1="b1", w2="W2", b2="b2")


def _kerple(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    return Recorded(positions.Kerple(), KERPLE)


FIRE = same(w1="F1", b1="f1", w2="F2", b2="f2", c="c", multiplier="L_mult")


def _fire(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    return Recorded(positions.Fire(arrays["f1"].shape[0], meta["init_L"]), FIRE)


def _dape(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    width = arrays["b1"].shape[0]
    if "f1" in arrays:
        fire = {f"fire_{name}": make for name, make in FIRE.items()}
        encoding = positions.DapeFire(width, arrays["f1"].shape[0], meta["init_L"])
        return Recorded(encoding, {**fire, **MLP})
    if "taps" in meta:
        cls = positions.DapeV2Kerple if "bias_p" in arrays else positions.DapeV2Alibi
        return Recorded(
            cls(width, meta["taps"], published=True), MLP | (KERPLE if "bias_p" in arrays else {})
        )
    if "bias_p" in arrays:
        return Recorded(positions.DapeKerple(width), {**KERPLE, **MLP})
    return Recorded(positions.DapeAlibi(width), MLP)


def _cope(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    size, separate = arrays["pos_emb"].shape[-1], meta["sep_key"]
    encoding = positions.Cope(size, separate, divide=not meta["nodiv"])
    params = same(vectors="pos_emb")
    if not separate:
        return Recorded(encoding, params)

    def enters(arrays: Arrays) -> Arrays:
        """A layer whose input, projected by the identity, is these keys."""
        keys = arrays["k_cope"]
        return {**arrays, "x": keys.reshape(*keys.shape[:2], -1)}

    params["gate_key_kernel"] = lambda arrays: jnp.eye(arrays["x"].shape[-1])
    return Recorded(encoding, params, enters)


def _stickbreaking(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    alone = positions.StickBreaking(meta["attend_current"])
    remainder = "value" if meta["remainder_added"] else "none"
    return Recorded(dataclasses.replace(alone, remainder=remainder), att_of=alone)


def _grape_additive(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    params = same(omega="omega", key_direction="u")
    if "v_gate" not in arrays:
        return Recorded(positions.GrapeAdditive("key"), params)
    return Recorded(positions.GrapeAdditive(), {**params, **same(query_direction="v_gate")})


def _grape_path(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    width = arrays["W_p"].shape[-1] // arrays["q"].shape[-2]
    return Recorded(positions.GrapePath(width), same(path_kernel="W_p"))


def _dda_per_row(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    def half(number: int) -> Callable[[Arrays], Any]:
        return lambda arrays: jnp.split(arrays["W_gate"], 2, axis=-1)[number]

    encoding = positions.DdaPerRow(meta["dim_gate"], meta["post_log_scale"])
    return Recorded(encoding, {"query_gate_kernel": half(0), "key_gate_kernel": half(1)})


def _inkling(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    params = same(relative_kernel="W_r", table="W_dist")
    width, reach = arrays["W_dist"].shape
    if "window" in meta:
        return Recorded(positions.InklingLocal(width, reach), params)
    alpha, floor = meta.get("alpha", 0.1), meta.get("n_floor")
    return Recorded(positions.Inkling(width, reach, alpha, floor), params)


def _path(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    names = {"beta_kernel": "W_beta", "beta_bias": "b_beta"}
    optional = {"w_kernel": "W_w", "w_down": "W_w1", "w_up": "W_w2", "w_taps": "conv_w"}
    names |= {name: source for name, source in optional.items() if source in arrays}
    rank = arrays["W_w1"].shape[1] if "W_w1" in arrays else None
    taps = arrays["conv_w"].shape[1] if "conv_w" in arrays else 0
    return Recorded(positions.PathAttention(rank=rank, taps=taps), same(**names))


def _path_fox(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    path, fox = _path(arrays, meta), _fox(arrays, meta)
    gate = {f"fox_{name}": make for name, make in fox.params.items()}
    encoding = positions.create([path.encoding, positions.Fox(scaled=True)])
    return Recorded(encoding, path.params | gate)


def _wall(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    # Recorded texts are short: several chunks of them.
    wall = positions.Wall(chunk=4)
    encoding: Encoding = wall
    gates = {"log_f": "channel_log_gates", "log_fs": "log_gates"}
    params = same(forget_kernel="W_f", forget_bias="b_f")
    if "W_fs" in arrays:
        encoding = positions.create([wall, positions.Fox()])
        params |= same(fox_forget_kernel="W_fs", fox_forget_bias="b_fs")
    window = meta.get("window", meta.get("window_size"))
    return Recorded(encoding, params, window=window, intermediates=gates)


def _p_rope(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    scaling = RopeScaling("proportional", meta.get("factor") or 1.0)
    encoding = positions.PRope(meta["theta"], scaling, partial_rotary_factor=meta["p"])
    omega = frequencies(arrays["q"].shape[-1], encoding.base, encoding.scaling, None, meta["p"])
    return Recorded(encoding, constants={"inv_freq": omega})


def _longrope(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    dim, time = arrays["q"].shape[-1], arrays["q"].shape[1]
    scaling = RopeScaling(
        "longrope",
        factor=meta.get("factor") or meta["max"] / meta["original_max"],
        original_length=meta["original_max"],
        short_factor=tuple(meta["short_factor"]),
        long_factor=tuple(meta["long_factor"]),
    )
    share = meta["partial"]
    encoding = positions.LongRope(meta["theta"], scaling, partial_rotary_factor=share)
    omega = frequencies(dim, encoding.base, scaling, time, share)
    # The file's pairs are of those that rotate.
    turning = 2 * arrays["inv_freq"].size
    still = np.arange(turning, dim).reshape(2, -1)
    order = np.concatenate([np.arange(turning).reshape(2, -1), still], axis=-1).ravel()
    return Recorded(
        encoding,
        constants={
            "inv_freq": omega[: turning // 2],
            "attention_factor": scaling.state_magnitude,
        },
        order=order,
    )


def _mrope(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    encoding = positions.MRope(
        meta["theta"],
        axes=len(meta["section"]),
        sections=tuple(meta["section"]),
        interleaved=meta["layout"] == "interleaved",
    )
    dim = arrays["q"].shape[-1]
    # The published code silently distributes them differently than such sections say.
    dealt = np.bincount(encoding.axis_of_frequencies(dim), minlength=encoding.axes)
    encoding = dataclasses.replace(encoding, sections=tuple(dealt.tolist()))
    return Recorded(
        encoding,
        constants={"inv_freq": frequencies(dim, encoding.base)},
        positions=lambda a: jnp.moveaxis(a["pos_ids"], 0, -1),
    )


def _fope(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    length = meta["max_sequence_length"]
    encoding = positions.Fope(meta["theta"], original_length=length, learn=True)
    kept = arrays["sin_coef"].shape[1]
    omega = frequencies(arrays["q"].shape[-1], encoding.base)[:kept]
    return Recorded(
        encoding, same(sin_coef="sin_coef", cos_coef="cos_coef"), constants={"inv_freq": omega}
    )


def _rope_pp(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    encoding = positions.RopePP(meta["theta"])
    omega = frequencies(arrays["q"].shape[-1], encoding.base)
    return Recorded(encoding, constants={"inv_freq": omega})


def _pope(arrays: Arrays, meta: Mapping[str, Any]) -> Recorded:
    turning = meta["rotate_dim"]
    share = turning / arrays["q"].shape[-1]
    encoding = positions.Pope(meta["theta"], partial_rotary_factor=share)
    omega = frequencies(2 * turning, encoding.base)
    return Recorded(encoding, same(phase="phase_bias"), constants={"inv_freq": omega})


# By the name in ``meta``, or the file's up to its last underscore: from the arrays and ``meta``.
ENCODINGS: dict[str, Source] = {
    "cable": _cable,
    "cope": _cope,
    "cope_sepkey_nodiv": _cope,
    "dape_alibi": _dape,
    "dape_fire": _dape,
    "dape_kerple": _dape,
    "dapev2_alibi": _dape,
    "dapev2_kerple": _dape,
    "fire": _fire,
    "dda_per_row": _dda_per_row,
    "fope": _fope,
    "fox": _fox,
    "grape_m_ctx": _grape_m_ctx,
    "longrope": _longrope,
    "longrope_short": _longrope,
    "mrope": _mrope,
    "mrope_interleaved": _mrope,
    "mapformer_em": _mapformer(positions.MapFormerEM),
    "mapformer_wm": _mapformer(positions.MapFormerWM),
    "repo_linear": _repo_linear,
    "repo_swiglu": _repo_swiglu,
    "selective_rope": _selective_rope,
    "selective_rope_full": _selective_rope,
    "inkling": _inkling,
    "inkling_local": _inkling,
    "grape_a_kgated": _grape_additive,
    "grape_a_qkgated": _grape_additive,
    "grape_ap": _grape_path,
    "kerple": _kerple,
    "stickbreaking": _stickbreaking,
    "stickbreaking_current": _stickbreaking,
    "stickbreaking_rem": _stickbreaking,
    "p_rope": _p_rope,
    "pope": _pope,
    "path": _path,
    "path_fox": _path_fox,
    "wall": _wall,
    "wall_scalar": _wall,
    "rope_pp": _rope_pp,
}

# Intermediate values that files record, and the methods of encodings that compute them.
INTERMEDIATES = {
    "log_f": "log_gates",
    "decay": "decays",
    "rel": "relative",
    "bias": "relative_bias",
    "w": "vectors",
    "beta": "strengths",
    "pos": "places",
    "delta": "moves",
}

# Files of position ids, by their arrays.
IDS = {"position_coupling": coupled_positions.compare}


def is_one(arrays: Mapping[str, np.ndarray]) -> bool:
    """Returns whether these are the arrays of a :class:`ContextualFile`."""
    return "meta" in arrays


class ContextualFile:
    """One recorded run.

    Raises:
      ValueError: if the file is not one of this format.
    """

    def __init__(self, path: str | Path, arrays: dict[str, np.ndarray]):
        self.path, self.arrays = Path(path), arrays
        self.meta: dict[str, Any] = json.loads(str(arrays["meta"]))
        known = (*ENCODINGS, *IDS)
        require(isinstance(self.meta, dict), f"{path}: meta is no mapping but {self.meta!r}")
        self.name = self.meta.get("name")
        if self.name not in known:
            self.name = self.path.stem.rpartition("_")[0]
        what = f"encoding of {path}, by meta or its name up to the last underscore,"
        choose(what, self.name, known)

    def recorded(self, precision: str) -> Recorded:
        """Returns the mapping of the file on to this library."""
        arrays: Arrays = {
            name: jnp.asarray(x, precision) if x.dtype.kind == "f" else x
            for name, x in self.arrays.items()
        }
        return ENCODINGS[self.name](arrays, self.meta)


def compare(file: ContextualFile, precision: str) -> Iterator[Deviation | str]:
    """Yields a comparison for every recorded output and gradient.

    Raises:
      ValueError: if something recorded is unknown here, or something needed is not recorded.
    """
    with jax.enable_x64(precision == "float64"):
        try:
            if file.name not in IDS:
                yield from _compare(file, precision)
            elif precision == "float64":  # once: they are integers
                yield from IDS[file.name](file.arrays)
        except KeyError as missing:
            what = f"{missing} is recorded neither as an array nor in meta"
            raise ValueError(f"{file.path}: {what}") from missing


def _compare(file: ContextualFile, precision: str) -> Iterator[Deviation | str]:
    recorded = file.recorded(precision)
    inputs = {name: jnp.asarray(file.arrays[name], precision) for name in file.meta["inputs"]}
    fixed = {
        name: jnp.asarray(x, precision)
        for name, x in file.arrays.items()
        if x.dtype == np.float64 and name not in inputs
    }
    changes = {name: jnp.zeros_like(fixed[name]) for name in file.meta["intermediates"]}

    @jax.jit
    def outputs_and_gradients(inputs: Arrays, changes: Arrays) -> tuple[Any, Any, Any]:
        run = functools.partial(_run, recorded, fixed)
        o, pull, found = jax.vjp(run, inputs, changes, has_aux=True)
        return o, found, pull(fixed["do"])

    o, found, pulled = outputs_and_gradients(inputs, changes)
    found = {"o": o, **found, **recorded.constants}
    gradients = {f"grad_{name}": x for part in pulled for name, x in part.items()}
    compared = set()
    for name, value in {**found, **gradients}.items():
        if name in file.arrays:
            compared.add(name)
            yield deviation(name, precision, value, file.arrays[name])
    rest = set(file.arrays) - compared - set(inputs) - set(NOT_COMPARED)
    if rest:
        raise ValueError(f"{file.path}: recorded, but not known here: {sorted(rest)}")
    if "o" not in compared:
        raise ValueError(f"{file.path}: 'o', the output, is not recorded")
    if not any(name.startswith("grad_") for name in file.arrays):
        yield f"{precision}  gradients: not recorded in this file"


def _changed(
    encoding: Encoding, made: Mapping[str, str], changes: Arrays, found: Arrays
) -> Encoding:
    """The encoding with changes added to intermediate values, which ``found`` records.

    ``made`` are the methods that compute them, by the values' names.
    """
    if isinstance(encoding, positions.Combined):
        parts = encoding.encodings
        return positions.Combined(tuple(_changed(part, made, changes, found) for part in parts))

    def method(name: str, original: Callable[..., Array]) -> Callable[..., Array]:
        def compute(self: Encoding, *args: Any) -> Array:
            found[name] = original(self, *args)
            return found[name] + changes[name] if name in changes else found[name]

        return compute

    own = type(encoding)
    methods = {
        made_by: method(name, getattr(own, made_by))
        for name, made_by in made.items()
        if hasattr(own, made_by)
    }
    return type(own.__name__, (own,), methods)(**vars(encoding))


def _layer(recorded: Recorded, encoding: Encoding, params: Arrays, arrays: Arrays) -> Layer:
    """The layer that a file's arrays enter, with the state that the encoding makes."""
    q, k = arrays["q"], arrays["k"]
    batch, time, heads, dim = q.shape
    x = arrays.get("x", jnp.zeros((batch, time, heads * dim), q.dtype))
    sizes = Sizes(
        hidden_size=x.shape[-1],
        num_layers=1,
        num_heads=heads,
        num_kv_heads=k.shape[-2],
        head_dim=dim,
        vocab_size=2,
        dtype=q.dtype.name,
    )
    encoding.check(sizes)
    places = default_positions(time) if recorded.positions is None else recorded.positions(arrays)
    layer = Layer(x, places, None, True, sizes, q=q, k=k)
    state, _ = encoding.start_from_embeddings(params, layer)
    if state is None:
        places = places[None] if encoding.starts_by_head else places
        state = encoding.start(places, sizes, dtype=q.dtype, params=params)
    return dataclasses.replace(layer, state=state)


def _run(
    recorded: Recorded, fixed: Arrays, inputs: Arrays, changes: Arrays
) -> tuple[Array, Arrays]:
    """``o``, and everything else that a file may hold, with changes to intermediate values."""
    arrays = recorded.prepare({**fixed, **inputs})
    params = {name: make(arrays) for name, make in recorded.params.items()}
    order = recorded.order
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    if order is not None:
        q, k = q[..., order], k[..., order]
    noted: Arrays = {}
    made = INTERMEDIATES | recorded.intermediates
    encoding = _changed(recorded.encoding, made, changes, noted)
    layer = _layer(recorded, encoding, params, arrays | {"q": q, "k": k})
    state, (_, time, heads, dim) = layer.state, q.shape
    terms = encoding.layer_terms(params, layer)
    rotations = encoding.rotation(state) if terms.state is None else (terms.state, terms.state)
    scores = _all_pairs(q, k)
    if terms.features is not None:
        q, k = terms.features
    if rotations[0] is not None and rotations[1] is not None:
        q, k = rotate(q, rotations[0]), rotate(k, rotations[1])
    back = slice(None) if order is None else np.argsort(order)
    noted |= {"q_rot": q[..., back], "k_rot": k[..., back]}
    q, k = q + changes.get("q_rot", 0), k + changes.get("k_rot", 0)
    window = None if recorded.window is None else (recorded.window - 1, 0)
    options = {**terms.keywords(), "local_window_size": window}
    weights = options
    if recorded.att_of is not None:
        weights = recorded.att_of.layer_terms(params, layer).keywords()
    own = encoding.logits_scale(layer.sizes)
    scale = dim**-0.5 if own is None else own
    attend = functools.partial(
        attention, q, k, is_causal=True, implementation="reference", scale=scale
    )
    one_hot = jnp.broadcast_to(jnp.eye(time, dtype=q.dtype)[:, None], (*k.shape[:-1], time))
    att = attend(one_hot, **weights)[0].swapaxes(1, 2)
    logits = attend(one_hot, **options | {"weights_fn": _logits})[0].swapaxes(1, 2)
    seen = jnp.tril(jnp.ones((time, time), bool))
    scores = jnp.repeat(jnp.where(seen, scores, 0), logits.shape[1] // heads, axis=1)
    # The state that rotates queries and keys or, if none does, that the encoding uses otherwise.
    states = jax.tree.leaves((rotations, state))
    found = {
        "att": att,
        "rem": 1 - att.sum(-1).swapaxes(1, 2),
        "logits": logits,
        "scores": scores,
        "bias": logits - scores,
        "slopes": jnp.asarray(alibi_slopes(heads)),
    }
    if states:
        found |= dict(zip(("cos", "sin"), jnp.split(states[0], 2, axis=-1), strict=True))
    return attend(v, **options)[0], {**found, **noted}


def _all_pairs(q: Array, k: Array) -> Array:
    """``q k / sqrt(D)``, ``[B, H, T, S]``."""
    k = jnp.repeat(k, q.shape[-2] // k.shape[-2], axis=-2)
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5


def _logits(logits: Array, rows: AttentionRows) -> Array:
    return jnp.where(logits == -jnp.inf, 0, logits)
