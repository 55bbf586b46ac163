"""The description of an experiment, made from a config file, the command line, or JSON.

A config file is a Python file whose ``get_config()`` returns an ``ml_collections.ConfigDict``. It
is read once, merged with the ``--config.a.b=value`` options of the command line, and turned into
the frozen dataclass :class:`Experiment`; nothing downstream sees a ConfigDict. A file sets only
fields that differ from the defaults, but the command line accepts every field.
"""

from train.experiment.description import USUALLY_NOT_DECAYED, Experiment, TrainConfig
from train.experiment.files import (
    THIS_SCALE,
    change,
    change_evaluation,
    from_file,
    help_config,
    take_scale,
)
from train.experiment.records import (
    FORMAT,
    changed_fields,
    differences,
    from_mapping,
    read_record,
    to_json,
)

__all__ = [
    "FORMAT",
    "THIS_SCALE",
    "USUALLY_NOT_DECAYED",
    "Experiment",
    "TrainConfig",
    "change",
    "change_evaluation",
    "changed_fields",
    "differences",
    "from_file",
    "from_mapping",
    "help_config",
    "read_record",
    "take_scale",
    "to_json",
]
