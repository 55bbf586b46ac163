"""Runs this project's command line on the hosts of a TPU slice through Ray Train.

    pip install 'ray[train]'
    python -m examples.ray_train --topology=4x4 --accelerator=TPU-V6E --hosts=4 \\
        train --config=configs/c4_pretrain.py --run=/shared/runs/c4 --resume \\
        --config.sharding.fsdp=-1

Ray joins the processes, so do not give ``--distributed``. Ray replaces a host that dies, and
``--resume`` continues the run from its newest intact checkpoint. The run folder must be shared.
"""

from __future__ import annotations

import argparse
from typing import Any

FAILURES = 10


def work(config: dict[str, Any]) -> None:
    """Runs the command line on one host."""
    from train.main import main

    code = main(config["arguments"])
    if code:
        raise RuntimeError(f"training ended with exit code {code}")


def main() -> None:
    """Starts the hosts and waits for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", required=True, help="of the slice, such as 4x4")
    parser.add_argument("--accelerator", required=True, help="such as TPU-V6E")
    parser.add_argument("--hosts", type=int, required=True, help="of the slice")
    options, arguments = parser.parse_known_args()
    try:
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.v2.jax import JaxTrainer
    except ImportError as error:
        parser.error(f"Ray is not installed ({error}): pip install 'ray[train]'")
    trainer = JaxTrainer(
        work,
        train_loop_config={"arguments": arguments},
        scaling_config=ScalingConfig(
            use_tpu=True,
            num_workers=options.hosts,
            topology=options.topology,
            accelerator_type=options.accelerator,
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=FAILURES)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
