"""Plans: what can be tested without the compilers of other machines."""

import dataclasses
import re
import types

import jax
import pytest
import safetensors.numpy

from tape_jax._src.pretrained import folder
from tape_jax.sharding import ShardingConfig
from tests.paths import ROOT
from tests.train.training.tiny import an_experiment
from train.analysis import ahead_of_time, plan
from train.analysis.ahead_of_time import TARGETS, Machine
from train.analysis.collectives import Collective
from train.main import main
from train.training import flops


def device(process, platform="cuda"):
    return types.SimpleNamespace(process_index=process, platform=platform)


def machine(kind="h100", hosts=2, each=2):
    platform = "tpu" if kind.startswith("v") else "cuda"
    devices = tuple(device(host, platform) for host in range(hosts) for _ in range(each))
    return Machine(f"{kind}:{hosts}x{each}", TARGETS[kind], devices)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e", "expected a chip and a layout"),
        ("v9:2x2", "unknown chip of the topology 'v9'"),
        ("v5e:2-2", "shape of a slice"),
        ("h100:9", "up to 8, or hosts x GPUs"),
        ("v5e:2x2", "pip install libtpu"),
        ("h100:8", "jax-cuda13-plugin"),
    ],
)
def test_a_topology_that_there_is_not(name, message, monkeypatch):
    monkeypatch.setattr(ahead_of_time.importlib.util, "find_spec", lambda name: None)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        ahead_of_time.machine(name)


def test_code_that_asks_for_its_platform_finds_the_target():
    here = jax.default_backend()
    for name, platform in (("v5e", "tpu"), ("h100", "gpu")):
        with ahead_of_time.as_if_on(TARGETS[name], None):
            assert jax.default_backend() == platform
    assert jax.default_backend() == here


def test_traffic_inside_a_host_and_between_hosts():
    shapes = (("f32", (1000,)),)
    inside = Collective("all-gather", shapes, ((0, 1), (2, 3)), ("fsdp",), 3, "")
    between = Collective("all-reduce", shapes, ((0, 2), (1, 3)), ("data",), 1, "")
    links, network = sorted(
        plan.traffic([inside, between, inside], machine().devices), key=lambda t: t.hosts
    )
    assert (links.count, links.bytes, links.hosts) == (6, 6 * 2000, False)
    assert (network.count, network.bytes, network.hosts) == (1, 4000, True)
    # All chips of a slice are joined by links.
    assert not any(t.hosts for t in plan.traffic([between], machine("v5e").devices))


def a_plan(memory, operations=1e12, traffic=(), **mesh):
    sizes = {"data": 1, "fsdp": 1, "sequence": 1, "tensor": 1, **mesh}
    return plan.Plan(sizes, machine(), "", {"in between": memory}, operations, traffic, tokens=10)


def test_the_best_fits_and_may_be_fastest():
    chip = flops.CHIPS["h100"]
    slow = a_plan(10**9, 2e15, fsdp=4)
    fast = a_plan(2 * 10**9, 1e15, fsdp=2, tensor=2)
    large = a_plan(chip.memory, 1e12, data=4)
    impossible = dataclasses.replace(large, error="heads = 3 is not a multiple of 4")
    found = [slow, impossible, fast, large]
    assert plan.best(found) is fast
    assert plan.best([large, impossible]) is None
    assert fast.times["compute"] == pytest.approx(1e15 / chip.operations)
    assert fast.times["memory"] == pytest.approx(4e9 / chip.bandwidth)
    text = re.sub(" +", " ", plan.summary(found))
    assert "| fsdp=2, tensor=2 | 2.00 | yes |" in text
    assert "not possible: heads = 3" in text


def test_meshes_worth_trying_fit_and_differ():
    found = list(plan.meshes(32, together=8))
    assert len(set(found)) == len(found)
    for mesh in found:
        assert mesh.mesh_shape(32)
        assert mesh.tensor * mesh.sequence <= 8
    assert ShardingConfig(fsdp=32) in found
    assert ShardingConfig(data=4, fsdp=8) in found


FOLDER = ROOT / "tests" / "golden" / "hf" / "gemma2_tiny"


def test_bytes_of_each_device(capsys, monkeypatch):
    """As much as the parameters take, the split ones half of it; no tensor is read."""
    monkeypatch.setattr(folder.File, "read", None)
    assert main(["plan", f"--pretrained={FOLDER}", "--mesh=data=1", "--mesh=fsdp=2"]) in (None, 0)
    whole, split = re.findall(r"^all +([\d,]+)", capsys.readouterr().out, re.MULTILINE)
    tensors = safetensors.numpy.load_file(FOLDER / "model.safetensors")
    total = sum(x.nbytes for x in tensors.values())
    norms = sum(x.nbytes for x in tensors.values() if x.ndim == 1)
    assert int(whole.replace(",", "")) == total
    assert int(split.replace(",", "")) == norms + (total - norms) // 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (f"--pretrained={FOLDER} --topology=v5e:2x2", "no --topology"),
        (f"--pretrained={FOLDER} --config.train.steps=3", "fields of a config"),
        (f"--pretrained={FOLDER} --mesh=fsdp=-1", "needs sizes above 0; got 'fsdp=-1'"),
        (f"--pretrained={FOLDER} --mesh=fsdp", "expected such as fsdp=8,tensor=4; got 'fsdp'"),
        ("--config=configs/c4_pretrain.py", "--config needs --topology"),
        ("--config=configs/addition_demo.py --topology=v5e", "expected a chip and a layout"),
    ],
)
def test_wrong_calls(options, message, capsys):
    assert main(["plan", *options.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("packing", ["concatenated", "documents"])
def test_the_batch_is_like_those_of_training(packing, tmp_path):
    (tmp_path / "text.txt").write_text("Some words of a text that goes on and on. " * 40)
    task = {"name": "text", "source": f"{tmp_path}/text.txt", "sequence_length": 16,
            "held_out": 0.2, "cache": f"{tmp_path}/cache", "packing": packing}  # fmt: skip
    wanted = an_experiment(task, batch_size=4, accumulate=1)
    _, (_, planned, _) = plan.abstract_step(wanted, ShardingConfig().build(jax.devices()[:1]))
    batch = next(iter(wanted.task.dataset(0, 4)))
    assert {name: (x.shape, x.dtype) for name, x in planned.items()} == {
        name: (x.shape, x.dtype) for name, x in batch.items()
    }


def test_a_mesh_must_divide_the_batch_that_is_trained_on():
    """Of 16 sequences of 12 tokens, in place of 4 of 48."""
    task = {"name": "text", "sequence_length": 48, "train_length": 12}
    wanted = an_experiment(task, batch_size=4, accumulate=1)
    _, (_, batch, _) = plan.abstract_step(wanted, ShardingConfig(data=8).build())
    assert batch["inputs"].shape == (16, 12)
    with pytest.raises(ValueError, match="sequence = 12 is not a multiple of 16"):
        plan.abstract_step(wanted, ShardingConfig(sequence=8).build())
