"""Logical axes, rules that map them to mesh axes, and meshes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tape_jax._src.core.checks import choose, nearest, require, typed
from tape_jax._src.core.explicit import automatic, tuple_of

Array = jax.Array
Axes = tuple[str | None, ...]
Rule = tuple[str, str | tuple[str, ...] | None]

# The outermost first: neighbouring devices, with the fastest links, share a ``tensor`` group.
MESH_AXES = ("data", "fsdp", "sequence", "tensor")

# Rules for all logical axes; a user's own rules come first.
RULES: tuple[Rule, ...] = (
    # of activations
    ("batch", ("data", "fsdp")),
    ("sequence", "sequence"),
    ("hidden", None),
    # of both
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    # of parameters: the residual stream's width, experts (each is split along ``mlp``), and the
    # stack of layers of a scan
    ("embed", "fsdp"),
    ("experts", None),
    ("layers", None),
)


class ParameterSpec(NamedTuple):
    """A parameter as a model declares it.

    Attributes:
      shape: with its type.
      axes: one logical axis name, or None, for each dimension.
      role: the parameter's role in its model, by which rules choose what trains: ``position`` (of
        the encoding), ``norms``, ``embeddings`` (of tokens, and the output projection) or ``lora``;
        None: none of these.
    """

    shape: jax.ShapeDtypeStruct
    axes: Axes
    role: str | None = None


@runtime_checkable
class Model(Protocol):
    """A model that declares its parameters, such as :class:`tape_jax.Transformer`."""

    @property
    def config(self) -> Any: ...

    def parameters(self) -> dict[str, ParameterSpec]: ...


def _checked_rule(rule: Any) -> Rule:
    """Checks a rule and makes its list a tuple."""
    valid = isinstance(rule, Sequence) and len(rule) == 2 and isinstance(rule[0], str)
    valid = valid and isinstance(rule[1], Sequence | None)
    require(
        valid,
        f"sharding: a rule is a pair (logical axis, mesh axis, several or None); got {rule!r}",
    )
    name, target = rule
    targets = tuple_of(target)
    for axis in targets:
        choose(f"mesh axis of the sharding rule for {name!r}", axis, MESH_AXES)
    return name, target if target is None or isinstance(target, str) else targets


@dataclasses.dataclass(frozen=True)
class ShardingConfig:
    """A mesh and rules as plain data.

    Attributes:
      data, fsdp, sequence, tensor: sizes of the mesh axes; one may be -1: what the others leave.
      rules: pairs of a logical axis and a mesh axis, several mesh axes, or None. They precede
        :data:`RULES`: the first rule for an axis counts.
    """

    data: int = 1
    fsdp: int = 1
    sequence: int = 1
    tensor: int = 1
    rules: tuple[Rule, ...] = ()

    def __post_init__(self):
        for name in MESH_AXES:
            size = getattr(self, name)
            require(
                isinstance(size, int) and (size > 0 or size == -1),
                f"sharding: {name} must be a positive integer or -1; got {size!r}",
            )
        require(
            self._sizes.count(-1) <= 1,
            f"sharding: at most one axis may be -1, the rest of the devices; got {self._text}",
        )
        object.__setattr__(self, "rules", tuple(map(_checked_rule, self.rules)))

    @property
    def _sizes(self) -> list[int]:
        return [getattr(self, name) for name in MESH_AXES]

    @property
    def _text(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in MESH_AXES)

    def mesh_shape(self, devices: int) -> tuple[int, ...]:
        """Returns the sizes of :data:`MESH_AXES` for ``devices`` devices.

        Raises:
          ValueError: if they do not fit.
        """
        known = math.prod(size for size in self._sizes if size != -1)
        fits = devices % known == 0 if -1 in self._sizes else devices == known
        require(
            devices > 0 and fits,
            f"sharding: a mesh of {self._text} needs "
            f"{'a multiple of ' if -1 in self._sizes else ''}{known} devices; got {devices}",
        )
        return tuple(devices // known if size == -1 else size for size in self._sizes)

    def build(self, devices: Sequence[Any] | int | None = None) -> Sharding:
        """Builds the mesh with its rules.

        Args:
          devices: which; None: all. A number: a mesh without devices, for planning.

        Raises:
          ValueError: if the mesh does not fit the devices.
        """
        types = (AxisType.Auto,) * len(MESH_AXES)
        rules = (*self.rules, *RULES)
        if isinstance(devices, int):
            return Sharding(AbstractMesh(self.mesh_shape(devices), MESH_AXES, types), rules)
        found = jax.devices() if devices is None else list(devices)
        shape = self.mesh_shape(len(found))
        return Sharding(jax.make_mesh(shape, MESH_AXES, types, devices=found), rules)


# One device; the devices of one host, each with all parameters; the devices of many hosts on one
# fast network, which also split parameters and optimiser states.
PRESETS = {
    "device": ShardingConfig(),
    "host": ShardingConfig(data=-1),
    "pod_slice": ShardingConfig(fsdp=-1),
}


@typed
def preset(name: str, **changes: Any) -> ShardingConfig:
    """Returns preset ``device``, ``host`` or ``pod_slice``, with changed fields."""
    choose("sharding preset", name, PRESETS)
    return dataclasses.replace(PRESETS[name], **changes)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh, and rules that say which logical axes it splits. Hashable.

    Attributes:
      mesh: of devices, or abstract; rule axes that it lacks split nothing.
      rules: all rules; the first for a logical axis counts.
      strict: whether it is an error if the mesh does not divide a dimension; otherwise that
        dimension of that array is not split, which suits evaluation of odd batches.
    """

    mesh: Mesh | AbstractMesh
    rules: tuple[Rule, ...] = RULES
    strict: bool = True

    @property
    def inner(self) -> Mesh | AbstractMesh:
        """The mesh that this package uses internally, with explicit axes made automatic."""
        return automatic(self.mesh)

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """Returns the mesh axes that split a logical axis.

        Raises:
          ValueError: if no rule names it.
        """
        for name, target in self.rules:
            if name == axis:
                return tuple(n for n in tuple_of(target) if n in self.mesh.shape)
        known = dict.fromkeys(name for name, _ in self.rules)
        raise ValueError(
            f"sharding: no rule names the logical axis {axis!r}{nearest(axis, known)}; rules: "
            f"{', '.join(known)}"
        )

    def shards(self, axis: str) -> int:
        """Returns the number of parts of a logical axis."""
        return math.prod(self.mesh.shape[name] for name in self.mesh_axes(axis))

    def spec(self, axes: Axes, shape: Sequence[int], what: str = "an array") -> PartitionSpec:
        """Returns the PartitionSpec of an array with these logical axes.

        Args:
          axes: one logical axis name, or None, for each dimension.
          shape: of the array.
          what: its name, for errors.

        Raises:
          ValueError: if two of its axes would share a mesh axis, no rule names one, or the
            mesh does not divide a dimension (if ``strict``).
        """
        require(
            len(axes) == len(shape),
            f"sharding: {what} of shape {tuple(shape)} needs one logical axis for each dimension; "
            f"got {axes}",
        )
        owners: dict[str, str] = {}
        parts: list[tuple[str, ...] | str | None] = []
        for axis, size in zip(axes, shape, strict=True):
            names = () if axis is None else self.mesh_axes(axis)
            shards = math.prod(self.mesh.shape[name] for name in names)
            if size % shards and not self.strict:
                names, shards = (), 1
            for name in names:
                require(
                    name not in owners,
                    f"sharding: {what} has the axes {axes}, of which the rules put "
                    f"{owners.get(name)!r} and {axis!r} both on the mesh axis {name!r}: give one "
                    "of them another rule",
                )
                owners[name] = str(axis)
            require(
                size % shards == 0,
                f"sharding: {what} of shape {tuple(shape)} and axes {axes}: the mesh splits "
                f"{axis!r} into {shards} parts ({_joined(names)}), which do not divide {size}",
            )
            parts.append(names if len(names) > 1 else names[0] if names else None)
        return PartitionSpec(*parts)

    def named(self, axes: Axes, shape: Sequence[int], what: str = "an array") -> NamedSharding:
        """Returns the NamedSharding of an array: :meth:`spec` with the mesh."""
        return NamedSharding(self.mesh, self.spec(axes, shape, what))

    def check(self, model: Model, *, batch_size: int, length: int) -> None:
        """Raises ValueError unless the mesh divides all arrays of a step of ``model``.

        Args:
          model: the model.
          batch_size: sequences in a batch, over all devices.
          length: tokens in each.
        """
        c, parameters = model.config, model.parameters()
        known = {axis for p in parameters.values() for axis in p.axes} | set(dict(RULES))
        for name, _ in self.rules:
            require(
                name in known,
                f"sharding: the rule for {name!r} matches no axis of the model"
                f"{nearest(name, filter(None, known))}; its axes: "
                f"{', '.join(sorted(filter(None, known)))}",
            )
        self.check_activations(c, batch_size, length)
        for path, parameter in parameters.items():
            self.spec(parameter.axes, parameter.shape.shape, path)

    def check_activations(self, config: Any, batch_size: int, length: int) -> None:
        """Raises ValueError unless the mesh divides batch, length and heads; see :meth:`check`.

        Without ``strict``, any sizes pass.
        """
        if not self.strict:
            return
        sizes = {
            "batch": batch_size,
            "sequence": length,
            "heads": config.num_heads,
            "kv_heads": config.kv_heads,
            "mlp": config.mlp_size,
        }
        for axis, size in sizes.items():
            shards = self.shards(axis)
            # A ring of devices takes a chunk from either end of the sequence.
            shards *= 2 if axis == "sequence" and shards > 1 else 1
            require(
                size % shards == 0,
                f"sharding: {axis} = {size} is not a multiple of {shards}: the mesh "
                f"({_shape_text(self.mesh)}) splits it over {_joined(self.mesh_axes(axis))}"
                + (", into two chunks for each device" if axis == "sequence" else ""),
            )

    def of(self, model: Model, tree: Any) -> Any:
        """Returns shardings for a tree shaped like the parameters of ``model``.

        Args:
          model: whose parameters they are.
          tree: any pytree of arrays or ShapeDtypeStructs, such as variables, or a training state
            with optimiser moments. A leaf whose path ends in a parameter's path, with the same
            shape, goes where the parameter goes; every other leaf is copied to all devices.

        Returns:
          The same tree of NamedShardings.

        Raises:
          ValueError: if the rules cannot split a parameter.
        """
        parameters = model.parameters()

        def place(path: Any, x: Any) -> NamedSharding:
            names = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
            for start in range(len(names)):
                found = parameters.get(name := "/".join(names[start:]))
                if found is not None and found.shape.shape == x.shape:
                    return self.named(found.axes, x.shape, name)
            return NamedSharding(self.mesh, PartitionSpec())

        return jax.tree.map_with_path(place, tree)

    def share(self) -> tuple[int, int]:
        """Returns which part of every batch this process provides, and the number of parts.

        Processes that hold other heads or times of the same rows share a part.

        Raises:
          ValueError: if the rows of two processes overlap but are not the same.
        """
        assert isinstance(self.mesh, Mesh)
        batch = [self.mesh.axis_names.index(name) for name in self.mesh_axes("batch")]
        processes = np.vectorize(lambda device: device.process_index)(self.mesh.devices)
        rows = np.moveaxis(processes, batch, range(len(batch)))
        return process_share(rows.reshape(self.shards("batch"), -1), jax.process_index())

    def place(self, batch: Any) -> Any:
        """Puts arrays ``[B, T, ...]`` of a batch on devices.

        Args:
          batch: pytree of arrays; each process gives its :meth:`share` of the rows.

        Raises:
          ValueError: if the mesh does not divide them.
        """
        _, parts = self.share()

        def put(x: Any) -> Array:
            x = np.asarray(x)
            axes = ("batch", "sequence", *[None] * x.ndim)[: x.ndim]
            whole = (x.shape[0] * parts, *x.shape[1:]) if x.ndim else ()
            sharding = self.named(axes, whole, "a batch's array")
            return jax.make_array_from_process_local_data(sharding, x, whole)

        return jax.tree.map(put, batch)

    def table(self, model: Model) -> str:
        """Lists all parameters with shape, logical axes, placement, and bytes per device."""
        rows = [("parameter", "shape", "type", "logical axes", "split over", "bytes per device")]
        total = 0
        for path, (x, axes, _) in model.parameters().items():
            spec = self.spec(axes, x.shape, path)
            held = math.prod(NamedSharding(self.mesh, spec).shard_shape(x.shape)) * x.dtype.itemsize
            total += held
            shape = " x ".join(map(str, x.shape)) or "scalar"
            split = ", ".join("-" if part is None else str(part) for part in spec) or "-"
            names = ", ".join("-" if axis is None else axis for axis in axes) or "-"
            rows.append((path, shape, x.dtype.name, names, split, f"{held:,}"))
        rows.append(("all", "", "", "", "", f"{total:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

        def line(row: Sequence[str]) -> str:
            *texts, number = row
            cells = [text.ljust(width) for text, width in zip(texts, widths, strict=False)]
            return "  ".join([*cells, number.rjust(widths[-1])])

        heading = f"mesh: {_shape_text(self.mesh)} ({self.mesh.size} devices)"
        return "\n".join([heading, *map(line, rows)])


@typed
def constrain(sharding: Sharding | None, x: Array, *axes: str | None) -> Array:
    """Constrains ``x`` to the sharding of these logical axes; without one, returns ``x``.

    Args:
      sharding: a mesh and rules, or None.
      x: an array inside of a jitted function.
      *axes: of its first dimensions; others are not split.
    """
    if sharding is None:
        return x
    axes = (*axes, *[None] * (x.ndim - len(axes)))
    spec = sharding.spec(axes, x.shape, "an activation")
    return jax.lax.with_sharding_constraint(x, NamedSharding(sharding.inner, spec))


def process_share(processes: np.ndarray, process: int) -> tuple[int, int]:
    """Returns a process's part of a batch and their number; see :meth:`Sharding.share`.

    Args:
      processes: ``[parts of the batch, devices that hold each]``, the process of each device.
      process: the process.
    """
    rows = {p: tuple(np.flatnonzero((processes == p).any(1))) for p in np.unique(processes)}
    parts = sorted(set(rows.values()))
    require(
        sum(map(len, parts)) == len(processes) and len(set(map(len, parts))) == 1,
        f"sharding: processes must hold equal or disjoint parts of a batch; got {rows}",
    )
    return parts.index(rows[process]), len(parts)


def _joined(names: Sequence[str]) -> str:
    return " x ".join(names) or "nothing"


def _shape_text(mesh: Mesh | AbstractMesh) -> str:
    sizes: Mapping[str, int] = mesh.shape
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def splits_sequence(sharding: Sharding | None) -> bool:
    """Returns whether a mesh splits sequences."""
    return sharding is not None and sharding.shards("sequence") > 1
