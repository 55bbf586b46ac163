"""Writes requirements.lock: what both supported Pythons have installed, to the last version.

python .ci/lock.py .venv .venv-next > requirements.lock
"""

import re
import subprocess
import sys
from pathlib import Path

HEADER = "# The versions with which the tests last passed; made by `make lock`."


def frozen(environment: str) -> tuple[str, dict[str, str]]:
    """The Python version of an environment, and its packages' versions."""
    python = Path(environment) / "bin" / "python"
    version = subprocess.check_output(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True
    )
    listed = subprocess.check_output([python, "-m", "pip", "freeze", "--local"], text=True)
    return version.strip(), dict(re.findall(r"^([\w.\-]+)==(\S+)$", listed, re.MULTILINE))


def main() -> None:
    """Prints one line for a package whose version is the same everywhere, else one for each."""
    found = dict(map(frozen, sys.argv[1:]))
    if len(found) < len(sys.argv[1:]):
        sys.exit(f"environments must have different Pythons; got only {', '.join(found)}")
    print(HEADER)
    for name in sorted({name for packages in found.values() for name in packages}, key=str.lower):
        versions = {python: packages.get(name) for python, packages in found.items()}
        if len(set(versions.values())) == 1:
            print(f"{name}=={next(iter(versions.values()))}")
            continue
        for python, version in versions.items():
            if version is not None:
                print(f'{name}=={version}; python_version == "{python}"')


if __name__ == "__main__":
    main()
