import jax
import jax.numpy as jnp

from benchmarks.moves import KINDS, Move, moves

TEXT = """HloModule jit_step, is_scheduled=true

%fused_cut (p: f32[12,64,8], i: s32[]) -> f32[1,64,8] {
  %p = f32[12,64,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %one = s32[] constant(1)
  %before = s32[] subtract(%i, %one)
  %zero = s32[] constant(0)
  ROOT %cut = f32[1,64,8]{2,1,0} dynamic-slice(%p, %before, %zero, %zero)
}

%fused_put (q: f32[12,64,8], i.1: s32[], x: bf16[64,8]) -> f32[12,64,8] {
  %q = f32[12,64,8]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %x = bf16[64,8]{1,0} parameter(2)
  %wide = f32[64,8]{1,0} convert(%x)
  %cast = f32[1,64,8]{2,1,0} bitcast(%wide)
  %zero.1 = s32[] constant(0)
  ROOT %put = f32[12,64,8]{2,1,0} dynamic-update-slice(%q, %cast, %i.1, %zero.1, %zero.1)
}

%fused_sine (y: f32[64,8]) -> (f32[64,8], f32[8,64]) {
  %y = f32[64,8]{1,0} parameter(0)
  %sine = f32[64,8]{1,0} sine(%y)
  %turned = f32[8,64]{1,0} transpose(%sine), dimensions={1,0}
  ROOT %both = (f32[64,8]{1,0}, f32[8,64]{1,0}) tuple(%sine, %turned)
}

%body (s: (s32[], f32[12,64,8], bf16[64,8])) -> (s32[], f32[12,64,8], bf16[64,8]) {
  %s = (s32[], f32[12,64,8]{2,1,0}, bf16[64,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %stack = f32[12,64,8]{2,1,0} get-tuple-element(%s), index=1
  %new = bf16[64,8]{1,0} get-tuple-element(%s), index=2
  %cut-start = (f32[12,64,8]{2,1,0}, f32[1,64,8]{2,1,0}) fusion-start(%stack, %n), calls=%fused_cut
  %cut-done = f32[1,64,8]{2,1,0} fusion-done(%cut-start)
  %put.1 = f32[12,64,8]{2,1,0} fusion(%stack, %n, %new), kind=kLoop, calls=%fused_put
  ROOT %out = (s32[], f32[12,64,8]{2,1,0}, bf16[64,8]{1,0}) tuple(%n, %put.1, %new)
}

%condition (c: (s32[], f32[12,64,8], bf16[64,8])) -> pred[] {
  %c = (s32[], f32[12,64,8]{2,1,0}, bf16[64,8]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (a: f32[64,8]) -> f32[8,64] {
  %a = f32[64,8]{1,0} parameter(0)
  %relaid = f32[64,8]{0,1} copy(%a), metadata={op_name="x"}
  %same = f32[64,8]{1,0} copy(%a)
  %begin = (s32[], f32[12,64,8]{2,1,0}, bf16[64,8]{1,0}) custom-call(%a), custom_call_target="x"
  %loop = (s32[], f32[12,64,8]{2,1,0}) while(%begin), body=%body, x={"known_trip_count":{"n":"12"}}
  %two = (f32[64,8]{1,0}, f32[8,64]{1,0}) fusion(%a), kind=kLoop, calls=%fused_sine
  ROOT %end = f32[8,64]{1,0} get-tuple-element(%two), index=1
}
"""


def test_each_kind_as_often_as_loops_turn():
    row = 64 * 8 * 4
    found = moves(TEXT)
    assert found.pop("all").count == 2 * 12 + 2 + 1 + 1
    assert {kind: move for kind, move in found.items() if move.count} == {
        "into stacks": Move(12, 12 * row),
        "out of stacks": Move(12, 12 * row),
        "transposes": Move(1, row),
        "copies": Move(1, row),
    }
    # What computes is no move, whatever it moves beside.
    without = TEXT.replace("sine(%y)", "copy(%y)")
    assert moves(without)["transposes"] == Move(2, 3 * row)


def test_of_a_program_here():
    @jax.jit
    def f(x):
        return jnp.sin(x) @ x

    text = f.lower(jnp.ones((64, 64))).compile().as_text()
    found = moves(text)
    assert set(found) == {"all", *KINDS}
    assert found["all"].written >= 2 * 64 * 64 * 4
    assert sum(found[kind].written for kind in KINDS) < 64
