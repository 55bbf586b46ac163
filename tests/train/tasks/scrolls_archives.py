"""A tiny benchmark in the layout of SCROLLS."""

import json
import zipfile
from pathlib import Path

HARBOUR = "Ships land at the old pier every morning. Fishermen mend nets beside it."


def record(name, text, output):
    return {"id": name, "pid": f"{name}_0", "input": text, "output": output}


def nli(name, output):
    return record(name, f"Is {name} fair?\n\n{HARBOUR} Clause {name}.", output)


def qa(name, output, question="What do fishermen mend?"):
    return record(name, f"{question}\n\n{HARBOUR}", output)


RECORDS = {
    "contract_nli": {
        "train": [nli(f"t{i}", "yes") for i in range(5)],
        "validation": [nli("v1", "Yes."), nli("v2", "yes"), nli("v3", "no")],
        "test": [nli("s1", None), nli("s2", None)],
    },
    "qasper": {
        "train": [qa("a", "nets"), qa("a", "their nets"), qa("b", "the pier")],
        "validation": [qa("c", "nets"), qa("d", "a pier"), qa("c", "old nets")],
        "test": [qa("e", None)],
    },
}


def lines(records):
    return "".join(json.dumps(r) + "\n" for r in records)


def write(folder: Path, *, unpacked=("contract_nli",), records=RECORDS) -> Path:
    """The subsets of ``records``, those of ``unpacked`` as folders and the others as archives."""
    folder.mkdir(exist_ok=True)
    for subset, splits in records.items():
        if subset in unpacked:
            (folder / subset).mkdir()
            for split, content in splits.items():
                (folder / subset / f"{split}.jsonl").write_text(lines(content))
        else:
            members = {f"{subset}/{split}.jsonl": lines(x) for split, x in splits.items()}
            archive(folder / f"{subset}.zip", members)
    return folder


def archive(path: Path, members) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path
