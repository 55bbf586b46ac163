"""The site's view of the repository: pages that lie outside docs/, and the links to them.

mkdocs loads this; see ``hooks`` in ``mkdocs.yml``. A page keeps its path in the repository, but for
``docs/`` itself, so that every link is right both there and on the site.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "examples/README.md",
    "benchmarks/results/*.md",
    "benchmarks/results/*.png",
    "research/*.md",
    "research/images/**/*.png",
)
PRIVATE_HINT = re.compile(r' title="[^"]*tape_jax\._src[^"]*"')
LINK = re.compile(r"\[([^][]+)\]\(([^()#\s]+)(#[^()\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages outside docs/."""
    for path in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=os.fspath(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links into those of the site; what the site lacks is named without a link."""
    here = page.file.src_uri
    inside = Path(config.docs_dir, here).exists()
    folder = posixpath.dirname(f"docs/{here}" if inside else here)

    def on_site(link: re.Match) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if "://" in target:
            return link[0]
        uri = posixpath.normpath(posixpath.join(folder, target)).removeprefix("docs/")
        if files.get_file_from_path(uri) is None:
            return link[0] if uri.endswith(".md") else text
        return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(on_site, markdown)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Leaves out hints that would show where in the package a public name is defined."""
    return PRIVATE_HINT.sub("", output)
