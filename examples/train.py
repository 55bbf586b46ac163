"""Needs: optax, grain, orbax-checkpoint. Trains a TAPE model on bytes: one file to fork.

A minute on one CPU; the same file runs on all devices of a host, or on a pod:

    python -m examples.train
    python -m examples.train --text='books/**/*.txt' --out=/shared/runs/books --distributed

After a stop, the same command continues from its newest checkpoint and place in the data.
"""

import argparse
import glob
import itertools
import sysconfig
import time
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint.args import Composite, JsonRestore, JsonSave, StandardRestore, StandardSave

import tape_jax as tape
from tape_jax.losses import cross_entropy
from tape_jax.sharding import ShardingConfig


class Windows:
    """A random-access source of text windows, with the bytes that follow as targets."""

    def __init__(self, text, length):
        self.text, self.length = text, length

    def __len__(self):
        return (self.text.size - 1) // self.length

    def __getitem__(self, i):
        window = self.text[i * self.length : (i + 1) * self.length + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}


def read(pattern, length):
    """Returns the bytes of all matching files: a training part and a held-out twentieth."""
    text = b"\n".join(Path(p).read_bytes() for p in sorted(glob.glob(pattern, recursive=True)))
    block = 80 * length
    if len(text) < block:
        raise ValueError(f"{pattern!r} has {len(text)} bytes; at least {block} are needed")
    whole = np.frombuffer(text, np.uint8)[: len(text) // block * block]
    blocks = whole.reshape(-1, 20, 4 * length)
    return blocks[:, 1:].reshape(-1), blocks[:, 0].reshape(-1)


def batches(text, mesh, args):
    """Returns an endless iterator over this process's share of each batch."""
    rows = grain.MapDataset.source(Windows(text, args.length)).shuffle(seed=args.seed).repeat()
    share, shares = mesh.share()
    rows = rows[share::shares].batch(args.batch // shares)
    return iter(rows.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def make_model(args):
    mesh = ShardingConfig(data=args.data, fsdp=args.fsdp, tensor=args.tensor).build()
    sizes = {"hidden_size": args.width, "num_layers": args.layers, "num_heads": args.heads}
    config = tape.ModelConfig(vocab_size=256, position=args.position, **sizes)
    model = tape.Transformer(config, sharding=mesh)
    mesh.check(model, batch_size=args.batch, length=args.length)
    return model, mesh


def make_step(model, mesh, args):
    """Returns the initial state and two compiled functions: a training step and a batch's loss."""
    rate = optax.warmup_cosine_decay_schedule(0.0, args.rate, args.steps // 20, args.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.01))

    def init(key):
        variables = model.init(key, jnp.zeros((args.batch, args.length), jnp.int32))
        return {"variables": variables, "optimizer": optimizer.init(variables)}

    def loss_of(variables, batch):
        hidden = model.apply(variables, batch["inputs"], output="hidden")
        kernel = model.output_kernel(variables)
        return cross_entropy(hidden, kernel, batch["targets"], sharding=mesh) / hidden[..., 0].size

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_of)(state["variables"], batch)
        updates, moments = optimizer.update(grads, state["optimizer"], state["variables"])
        variables = optax.apply_updates(state["variables"], updates)
        return {"variables": variables, "optimizer": moments}, loss

    key = jax.random.key(args.seed)
    places = mesh.of(model, jax.eval_shape(init, key))
    rows = mesh.named(("batch", "sequence"), (args.batch, args.length))
    given = places, {"inputs": rows, "targets": rows}
    step = jax.jit(step, in_shardings=given, out_shardings=(places, None), donate_argnums=0)
    loss_of = jax.jit(loss_of, in_shardings=(places["variables"], given[1]))
    return jax.jit(init, out_shardings=places)(key), step, loss_of


def main(argv=None):
    """Trains, and returns each step's loss, followed by that of held-out text."""
    args = parse(argv)
    if args.distributed:
        jax.distributed.initialize()
    model, mesh = make_model(args)
    text, held_out = read(args.text, args.length)
    data = batches(text, mesh, args)
    state, step, loss_of = make_step(model, mesh, args)
    saved = ocp.CheckpointManager(Path(args.out).absolute())
    if begun := saved.latest_step() or 0:
        kept = {"state": StandardRestore(state), "data": JsonRestore()}
        found = saved.restore(begun, args=Composite(**kept))
        state = found["state"]
        data.set_state(found["data"])
    losses, start = [], time.monotonic()
    for number in range(begun + 1, args.steps + 1):
        state, loss = step(state, mesh.place(next(data)))
        losses.append(loss)
        if number % args.save_every == 0 or number == args.steps:
            kept = {"state": StandardSave(state), "data": JsonSave(data.get_state())}
            saved.save(number, args=Composite(**kept))
            saved.wait_until_finished()
            spent = (time.monotonic() - start) / len(losses)
            print(f"step {number}: loss {loss:.3f}, {spent:.3f} s a step", flush=True)
    saved.close()
    tested = itertools.islice(batches(held_out, mesh, args), 8)
    final = np.mean([loss_of(state["variables"], mesh.place(batch)) for batch in tested])
    print(f"held out: {final / np.log(2):.3f} bits per byte")
    return [*map(float, losses), float(final)]


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sources = sysconfig.get_paths()["stdlib"] + "/*.py"
    for name, value in {"text": sources, "out": "runs/example", "position": "tape"}.items():
        parser.add_argument(f"--{name}", default=value)
    sizes = {"steps": 200, "batch": 16, "length": 128, "width": 128, "layers": 3, "heads": 4}
    for name, value in {**sizes, "save_every": 100, "seed": 0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    for axis, size in {"data": 1, "fsdp": -1, "tensor": 1}.items():
        parser.add_argument(f"--{axis}", type=int, default=size, help="devices; -1: all others")
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--distributed", action="store_true", help="one of several processes")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
