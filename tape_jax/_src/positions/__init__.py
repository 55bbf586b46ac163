"""Position encodings: the names that other packages use."""

# ruff: noqa: F401
from tape_jax._src.positions.ablations import (
    MixHeadDim,
    NoEquivariance,
    PlaceWeights,
    RelaxedEquivariance,
    SeparateCosSin,
)
from tape_jax._src.positions.combined import Combined
from tape_jax._src.positions.contextual.cope import Cope
from tape_jax._src.positions.contextual.dape import (
    DapeAlibi,
    DapeFire,
    DapeKerple,
    DapeV2Alibi,
    DapeV2Kerple,
)
from tape_jax._src.positions.contextual.forget import Cable, DdaPerRow, Fox
from tape_jax._src.positions.contextual.grape import GrapeAdditive, GrapeMultiplicative, GrapePath
from tape_jax._src.positions.contextual.inkling import Inkling, InklingLocal
from tape_jax._src.positions.contextual.mapformer import MapFormerEM, MapFormerWM
from tape_jax._src.positions.contextual.path import PathAttention
from tape_jax._src.positions.contextual.repo import Repo
from tape_jax._src.positions.contextual.selective import SelectiveRope
from tape_jax._src.positions.contextual.stickbreaking import StickBreaking
from tape_jax._src.positions.contextual.wall import Wall
from tape_jax._src.positions.creation import registry
from tape_jax._src.positions.fixed.additive import Abacus, Learned, Sinusoidal
from tape_jax._src.positions.fixed.bias import Alibi, Fire, Kerple, T5Bias
from tape_jax._src.positions.fixed.coupling import PositionCoupling
from tape_jax._src.positions.fixed.features import Pope, RopePP
from tape_jax._src.positions.fixed.fourier import Fope
from tape_jax._src.positions.fixed.rope import LongRope, MRope, PRope, RandomRope, Rope, Xpos, Yarn
from tape_jax._src.positions.fixed.rotary import rotary_state
from tape_jax._src.positions.fixed.window import Window
from tape_jax._src.positions.layer import Layer, Terms
from tape_jax._src.positions.protocol import Encoding, Param
from tape_jax._src.positions.schedule import Layers, create
from tape_jax._src.positions.tape.encoding import Tape, init_update, tensor_state
from tape_jax._src.positions.tape.polar import TapePope
from tape_jax._src.positions.tape.update import update_state
