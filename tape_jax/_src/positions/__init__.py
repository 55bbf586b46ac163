"""Position encodings: one protocol, one registry."""

from tape_jax._src.positions.ablations import (
    MixHeadDim,
    NoEquivariance,
    PlaceWeights,
    RelaxedEquivariance,
    SeparateCosSin,
)
from tape_jax._src.positions.additive import Abacus, Learned, Sinusoidal
from tape_jax._src.positions.bias import Alibi, Fire, Kerple, T5Bias
from tape_jax._src.positions.combined import Combined
from tape_jax._src.positions.cope import Cope
from tape_jax._src.positions.coupling import PositionCoupling
from tape_jax._src.positions.creation import create, registry
from tape_jax._src.positions.dape import DapeAlibi, DapeKerple
from tape_jax._src.positions.forget import Fox
from tape_jax._src.positions.grape import GrapeAdditive, GrapePath
from tape_jax._src.positions.grape_rotary import GrapeMultiplicative
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.mapformer import MapFormerEM, MapFormerWM
from tape_jax._src.positions.path import PathAttention
from tape_jax._src.positions.protocol import Encoding, Param
from tape_jax._src.positions.repo import Repo
from tape_jax._src.positions.rotary import RandomRope, Rope, Xpos, Yarn, rotary_state
from tape_jax._src.positions.selective import SelectiveRope
from tape_jax._src.positions.stickbreaking import StickBreaking
from tape_jax._src.positions.tape import Tape, init_update, tensor_state
from tape_jax._src.positions.update import update_state

__all__ = [
    "Abacus",
    "Alibi",
    "Combined",
    "Cope",
    "DapeAlibi",
    "DapeKerple",
    "Encoding",
    "Fire",
    "Fox",
    "GrapeAdditive",
    "GrapeMultiplicative",
    "GrapePath",
    "Kerple",
    "Layer",
    "Learned",
    "MapFormerEM",
    "MapFormerWM",
    "MixHeadDim",
    "NoEquivariance",
    "Param",
    "PathAttention",
    "PlaceWeights",
    "PositionCoupling",
    "RandomRope",
    "RelaxedEquivariance",
    "Repo",
    "Rope",
    "SelectiveRope",
    "SeparateCosSin",
    "Sinusoidal",
    "StickBreaking",
    "T5Bias",
    "Tape",
    "Terms",
    "Xpos",
    "Yarn",
    "create",
    "init_update",
    "registry",
    "rotary_state",
    "tensor_state",
    "update_state",
]
