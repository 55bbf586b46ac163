"""The memory, time and traffic of a training step on a machine that is not here, mesh by mesh.

The step that training runs is compiled ahead of time, and not run. Memory and collectives are the
compiler's; operations are those of :func:`train.training.flops.model_flops`. Times assume the rates
of the chips' data sheets, so no step can be faster.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tape_jax import Transformer
from tape_jax.sharding import MESH_AXES, Sharding, ShardingConfig
from train.analysis import ahead_of_time
from train.analysis.ahead_of_time import Cuda, Machine
from train.analysis.collectives import Collective, collectives
from train.evaluation.grids import text_table
from train.experiment import Experiment
from train.training import runs
from train.training.flops import step_flops
from train.training.step import TrainState, init_state, make_optimizer, make_step

# The share of memory that the runtime keeps for itself.
RESERVED = 0.08
# What takes time, as in :attr:`Plan.times`.
PARTS = ("compute", "memory", "links", "network")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The traffic of one device in a training step by one kind of collective.

    Attributes:
      kind: the collective's.
      axes: mesh axes over which it goes.
      count: how often.
      bytes: sent in all.
      hosts: whether it goes from host to host (between GPUs).
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: float
    hosts: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training step on a mesh; sizes in bytes on one device, times in seconds.

    Attributes:
      mesh: sizes of its axes.
      machine: the machine on which it would run.
      error: why it cannot run, with the later fields empty; or an empty string.
      memory: by kind.
      operations: of one device.
      traffic: by kind of collective and axes.
      tokens: of a batch.
      seconds: compile time.
    """

    mesh: dict[str, int]
    machine: Machine
    error: str = ""
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    operations: float = 0.0
    traffic: tuple[Traffic, ...] = ()
    tokens: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """The memory that the step takes on one device, in bytes."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """True if the step compiles and fits into a device's memory without the reserved part."""
        return not self.error and self.total <= self.machine.chip.memory * (1 - RESERVED)

    @property
    def times(self) -> dict[str, float]:
        """The least times of computing, moving data to and from memory, and sending."""
        chip = self.machine.chip
        seconds = (
            self.operations / chip.operations,
            # Everything there is written once and read once.
            2 * self.total / chip.bandwidth,
            sum(t.bytes for t in self.traffic if not t.hosts) / chip.link,
            sum(t.bytes for t in self.traffic if t.hosts) / chip.network,
        )
        return dict(zip(PARTS, seconds, strict=True))

    @property
    def fastest(self) -> float:
        """The seconds of a step if all of :attr:`times` overlap."""
        return max(self.times.values())

    @property
    def slowest(self) -> float:
        """The seconds of a step if nothing overlaps, still at full rates."""
        return sum(self.times.values())

    @property
    def name(self) -> str:
        """The sizes of the axes with more than one device, as text."""
        sizes = [f"{axis}={size}" for axis, size in self.mesh.items() if size > 1]
        return ", ".join(sizes) or "one device"


def meshes(devices: int, together: int) -> Iterator[ShardingConfig]:
    """Yields meshes worth trying.

    Args:
      devices: number of devices.
      together: how many of them fast links join.
    """
    seen = set()
    for tensor, sequence in itertools.product((1, 2, 4, 8), (1, 2, 4)):
        if devices % (tensor * sequence) or tensor * sequence > together:
            continue
        if tensor > 1 and sequence > 1:
            continue
        rest = devices // (tensor * sequence)
        copies = {1} | ({devices // together} if devices > together else set())
        for data in sorted(copies):
            if rest % data == 0 and (found := (data, rest // data, sequence, tensor)) not in seen:
                seen.add(found)
                data, fsdp, sequence, tensor = found
                yield ShardingConfig(data=data, fsdp=fsdp, sequence=sequence, tensor=tensor)


def plan(experiment: Experiment, machine: Machine, mesh: ShardingConfig) -> Plan:
    """Compiles a step of ``experiment`` on one mesh; the result says what does not fit."""
    devices = machine.devices
    try:
        sizes = dict(zip(MESH_AXES, mesh.mesh_shape(len(devices)), strict=True))
    except ValueError as error:
        sizes = {name: getattr(mesh, name) for name in MESH_AXES}
        return Plan(sizes, machine, str(error))
    start = time.perf_counter()
    try:
        sharding = mesh.build(devices)
        with ahead_of_time.as_if_on(machine.target, devices[0]):
            step, (state, batch, frozen) = abstract_step(experiment, sharding)
            options = ahead_of_time.cuda_options() if isinstance(machine.target, Cuda) else {}
            compiled = step.lower(state, batch, frozen).compile(compiler_options=options)
            operations = step_flops(experiment) / len(devices)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return Plan(sizes, machine, next(iter(str(error).splitlines()), type(error).__name__))
    arguments = {
        "parameters that train": size_on_device(state.params),
        "frozen parameters": size_on_device(frozen),
        "optimiser": size_on_device(state.opt_state),
        "batch": size_on_device(batch),
    }
    measured = compiled.memory_analysis()
    new = measured.output_size_in_bytes - measured.alias_size_in_bytes
    memory = arguments | {"in between": measured.temp_size_in_bytes, "new outputs": max(new, 0)}
    task, config = experiment.task, experiment.train
    return Plan(
        mesh=sizes,
        machine=machine,
        memory=memory,
        operations=operations,
        traffic=traffic(collectives(compiled.as_text(), sharding.mesh), devices),
        tokens=config.batch_size * task.sequence_length,
        seconds=time.perf_counter() - start,
    )


def size_on_device(tree: Any) -> int:
    """Returns the bytes of arrays, or ShapeDtypeStructs with shardings, on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def traffic(found: Sequence[Collective], devices: Sequence[Any]) -> tuple[Traffic, ...]:
    """Sums collectives by kind, axes and whether they leave a host."""
    sums: dict[tuple[str, tuple[str, ...], bool], tuple[int, float]] = {}
    for collective in found:
        hosts = any(
            len({devices[i].process_index for i in group}) > 1 and devices[0].platform != "tpu"
            for group in collective.groups
        )
        times = 1 if collective.times is None else collective.times
        key = collective.kind, collective.axes or (), hosts
        count, sent = sums.get(key, (0, 0.0))
        sums[key] = count + times, sent + times * collective.traffic
    order = sorted(sums.items(), key=lambda item: -item[1][1])
    return tuple(
        Traffic(kind, axes, count, sent, hosts) for (kind, axes, hosts), (count, sent) in order
    )


def best(plans: Sequence[Plan]) -> Plan | None:
    """Returns the plan that fits and might be fastest; if two tie, the one with less memory."""
    fitting = [p for p in plans if p.fits]
    return min(fitting, key=lambda p: (p.slowest, p.total), default=None)


def summary(plans: Sequence[Plan]) -> str:
    """Returns a table with one line for each mesh."""
    header = ["mesh", "GB per device", "fits", *PARTS, "step at least"]
    rows = []
    for p in plans:
        if p.error:
            rows.append([p.name, f"not possible: {p.error}", *[""] * 6])
            continue
        rows.append(
            [
                p.name,
                f"{p.total / 1e9:.2f}",
                "yes" if p.fits else f"no, {p.machine.chip.memory / 1e9:.0f} GB there",
                *(milliseconds(seconds) for seconds in p.times.values()),
                f"{milliseconds(p.fastest)} to {milliseconds(p.slowest)}",
            ]
        )
    return text_table(header, rows)


def details(p: Plan) -> str:
    """Describes a plan: its memory by kind, what is sent, and the least time of a step."""
    chip = p.machine.chip
    rate = p.tokens / p.fastest
    lines = [
        f"{p.name} on {p.machine.name}, {len(p.machine.devices)} x {chip.name}",
        f"  memory of a device, of {chip.memory / 1e9:.0f} GB:",
        *(f"    {size / 1e9:10.3f} GB  {kind}" for kind, size in p.memory.items() if size),
        f"    {p.total / 1e9:10.3f} GB  in all",
        f"  operations of a device: {p.operations / 1e12:.2f} x 10^12",
        "  sent by a device:" if p.traffic else "  nothing is sent",
    ]
    for t in p.traffic:
        where = "from host to host" if t.hosts else "by links"
        over = ", ".join(t.axes)
        lines.append(f"    {t.bytes / 1e9:10.3f} GB  {t.kind} over {over}, {t.count} x, {where}")
    lines.append(
        f"  a step of {p.tokens:,} tokens: at least {milliseconds(p.fastest)}, "
        f"{milliseconds(p.slowest)} if nothing overlaps; at most {rate:,.0f} tokens a second"
    )
    return "\n".join(lines)


def milliseconds(seconds: float) -> str:
    """Formats a time in milliseconds."""
    return f"{seconds * 1e3:,.1f} ms"


def joined(machine: Machine) -> int:
    """Returns how many devices fast links join: a host's GPUs, or a whole slice of TPUs."""
    if isinstance(machine.target, Cuda):
        hosts = len({device.process_index for device in machine.devices})
        return len(machine.devices) // hosts
    return len(machine.devices)


def plans(
    experiment: Experiment, machine: Machine, chosen: Sequence[ShardingConfig] = ()
) -> Iterator[Plan]:
    """Yields a plan for each mesh; without ``chosen``, for all worth trying."""
    for mesh in chosen or meshes(len(machine.devices), joined(machine)):
        yield plan(experiment, machine, mesh)


def abstract_step(
    experiment: Experiment, sharding: Sharding
) -> tuple[Any, tuple[TrainState, Any, Any]]:
    """Returns an experiment's step on a mesh, and its arguments without values.

    Returns:
      The jitted step, and (state, batch, frozen) of ``jax.ShapeDtypeStruct``.

    Raises:
      ValueError: if the mesh does not divide what it splits.
    """
    config, shape = experiment.train, experiment.batch_shape
    model = Transformer(experiment.model, sharding=sharding)
    sharding.check(model, batch_size=shape[0] // config.accumulate, length=shape[1])
    optimizer = make_optimizer(config)
    params, frozen = runs.abstract_params(experiment)
    state = jax.eval_shape(lambda params: init_state(experiment, optimizer, params), params)
    places = sharding.of(model, state)
    frozen = runs.placed(frozen, sharding.of(model, frozen))
    place = sharding.named(("batch", "sequence"), shape, "the batch")
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
    batch = {
        "inputs": tokens,
        "targets": tokens,
        "weights": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place),
    }
    if getattr(experiment.task, "packing", None) == "documents":
        batch |= {"segment_ids": tokens, "positions": tokens}
    step = make_step(model, optimizer, config, places)
    return step, (runs.placed(state, places), batch, frozen)
