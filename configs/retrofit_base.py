"""A small RoPE model trained on the sources of installed packages, the base of retrofits.

Claim: none; it is what configs/retrofit_demo.py adapts.
Cost: 2.3 hours of one core, judged by the first 300 steps. A checkpoint in bfloat16 has 3.7 MB.
Command:
    python -m train.main train --config=configs/retrofit_base.py --run=runs/short_base --resume
It reads 30 MB of the packages next to the interpreter, those whose names begin with a, f, g, j, t
or x, not followed by o. One sequence in ten is a short passkey. It makes one pass over the text,
with about 17 bytes per parameter.
"""

import sysconfig

from ml_collections import ConfigDict

from configs import bytes_demo


def get_config() -> ConfigDict:
    """Fields that differ from the defaults of :mod:`train.experiment`."""
    config = bytes_demo.get_config()
    config.name = "short base"
    config.task.update(
        {
            "source": f"{sysconfig.get_paths()['purelib']}/[afgjtx][!o]*/**/*.py",
            "sequence_length": 512,
            "passkeys": 0.1,
            "passkey_form": "short",
        }
    )
    config.model.update(
        {
            "hidden_size": 192,
            "num_layers": 4,
            "num_heads": 6,
            "intermediate_size": 512,
            "position": {"kind": "rope"},
        }
    )
    config.train.update(
        {"steps": 8000, "batch_size": 8, "save_every": 150, "keep": 60, "log_every": 25}
    )
    return config
