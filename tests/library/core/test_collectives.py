"""Collectives read from compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train.analysis.collectives import collectives

MESH = AbstractMesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)


def line(operation):
    return f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  %y = {operation}\n}}"


@pytest.mark.parametrize(
    ("written", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("tensor",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("{}", ("data", "tensor")),
        ("[2,4]<=[8]", ("tensor",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("mesh['a'=2,'b'=4] {'b'}", ("tensor",)),
        ("mesh['a'=8] {'a':(1)2}", ("data",)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("data",)),
        ("mesh['a'=2,'b'=4], device_ids=(0,4,1,5,2,6,3,7) {'a'}", ("tensor",)),
    ],
)
def test_groups_of_devices(written, axes):
    text = line(f"f32[8]{{0}} all-reduce(%x), replica_groups={written}, to_apply=%add")
    (found,) = collectives(text, MESH)
    assert found.axes == axes
    assert sorted(d for group in found.groups for d in group) == list(range(8))


def test_sizes_and_traffic():
    groups = "replica_groups=[2,4]<=[8]"
    for operation, size, traffic in (
        (f"(bf16[8,2]{{1,0}}, f32[]) all-reduce(%a, %b), {groups}", 36, 2 * 36 * 3 / 4),
        (f"(f32[2]{{0}}, f32[8]{{0}}) all-gather-start(%x), {groups}", 32, 24),
        (f"f32[2]{{0}} reduce-scatter(%x), {groups}", 32, 24),
        (
            "(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), "
            "source_target_pairs={{0,1},{1,0}}",
            32,
            32,
        ),
    ):
        (found,) = collectives(line(operation), MESH)
        assert (found.bytes, found.traffic) == (size, traffic), operation


def test_parts_of_one_collective_in_several_fusions():
    part = """%fused.{n} (x: f32[2]) -> f32[8] {{
  %a.{n} = f32[8]{{0}} all-gather(%x), channel_id={channel}, replica_groups=[2,4]<=[8]
}}
"""
    parts = "".join(part.format(n=n, channel=c) for n, c in enumerate((7, 7, 8)))
    calls = "".join(f"\n  %y.{n} = f32[8] fusion(%x), calls=%fused.{n}" for n in range(3))
    text = f"{parts}ENTRY %main (x: f32[2]) -> f32[8] {{{calls}\n}}"
    assert [c.times for c in collectives(text, MESH)] == [1, 1]


def test_groups_of_one_device_and_unreadable_ones():
    alone = line("f32[8]{0} all-reduce(%x), replica_groups={{0},{1}}")
    assert collectives(alone) == []
    with pytest.raises(ValueError, match=r"cannot be read: .*replica_groups=strange"):
        collectives(line("f32[8]{0} all-reduce(%x), replica_groups=strange"))


@pytest.mark.parametrize(
    ("condition", "times"),
    [
        ("compare(%i, %n), direction=LT", 7),
        ("compare(%i, %m), direction=LT", None),
        ("compare(%i, %n), direction=GT", None),
    ],
)
def test_loops_whose_length_only_their_condition_tells(condition, times):
    """As programs for TPUs are written."""
    text = f"""%until (c: (s32[])) -> pred[] {{
  %n = s32[]{{:T(128)}} constant(7)
  ROOT %lt = pred[]{{:T(512)}} {condition}
}}
%inside (c: (s32[])) -> (s32[]) {{
  %g = f32[8] all-gather(%x), replica_groups=[2,4]<=[8]
}}
ENTRY %main (x: f32[2]) -> f32[8] {{
  %w = (s32[]) while(%c), condition=%until, body=%inside
}}"""
    (found,) = collectives(text, MESH)
    assert found.times == times


def test_compiled_program():
    """Kinds, axes, sizes, and how often a nested loop runs them."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))

    def on_device(x):
        def inner(_, x):
            return lax.ppermute(jnp.sin(x), "tensor", [(d, (d + 1) % 4) for d in range(4)])

        x = lax.fori_loop(0, 3, lambda _, x: jnp.cos(lax.fori_loop(0, 5, inner, x)), x)
        return lax.all_gather(x, "tensor", tiled=True), lax.psum(x.sum(), ("data", "tensor"))

    specs = {"in_specs": P(("data", "tensor")), "out_specs": (P("data"), P())}
    function = jax.shard_map(on_device, mesh=mesh, check_vma=False, **specs)
    x = jax.device_put(jnp.zeros(16), NamedSharding(mesh, P(("data", "tensor"))))
    found = {c.kind: c for c in collectives(jax.jit(function).lower(x).compile().as_text(), mesh)}
    summary = {kind: (c.axes, c.bytes, c.times) for kind, c in found.items()}
    assert summary == {
        "collective-permute": (("tensor",), 8, 15),
        "all-gather": (("tensor",), 32, 1),
        "all-reduce": (("data", "tensor"), 4, 1),
    }
