"""The README's code runs and prints what it says."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_code_prints_what_the_readme_shows():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```python")
    namespace: dict = {}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        assert printed.getvalue() == shown


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
