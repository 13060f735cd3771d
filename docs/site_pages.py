"""A hook of mkdocs.yml: pages of the site that do not lie in docs/, and links between pages.

Pages name files of the repository by their paths, `docs/job.md` say. Elsewhere that is text; on the
site it becomes a link where the file is a page. So a page that is gone is a broken link there,
which ends the build.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
}
"""By page of the site, the file of the repository that it is made of."""
_PAGE = {source: page for page, source in ELSEWHERE.items()}
_NAMED = re.compile(r"(?<![\[`])`((?:[\w.-]+/)*[\w-]+\.md)`(?!`)")
"""A page by its path from the root of the repository, as code."""
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_startup(*, command: str, dirty: bool) -> None:
    """The root of the repository is the package `shoal`, whatever its folder is called: a link by
    that name is where docstrings are read, before anybody looks for it."""
    link = ROOT / ".cache" / "types" / "shoal"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.unlink(missing_ok=True)  # one that leads nowhere any more
        link.symlink_to(ROOT)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    parts = _FENCE.split(markdown)  # every second one is a block of code
    up = "../" * page.file.src_uri.count("/")
    parts[::2] = [_NAMED.sub(lambda named: _link(named, up), text) for text in parts[::2]]
    if page.file.src_uri in ELSEWHERE:  # pictures, from the root of the repository
        parts[::2] = [text.replace("](docs/", "](") for text in parts[::2]]
    return "".join(parts)


def _link(named: re.Match[str], up: str) -> str:
    """Return the link for a page by its path, from a page that has `up` before the root's."""
    path = named[1]
    if path in _PAGE:
        return f"[`{path}`]({up}{_PAGE[path]})"
    if path.startswith("docs/"):
        return f"[`{path}`]({up}{PurePosixPath(path).relative_to('docs')})"
    return named[0]
