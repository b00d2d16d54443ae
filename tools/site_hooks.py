"""What `make site` needs of mkdocs: README.md as the first page, and links within the site only."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"\[((?:[^][]|\[[^]]*\])+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


# The theme writes a cell in one line, and a page 800 pixels wide.
STYLE = """.wy-table-responsive table td, .wy-table-responsive table th { white-space: normal }
.wy-nav-content { max-width: 1100px }
"""


def on_files(files: Files, config: Any) -> Files:
    """Add README.md as index.md, and a style sheet."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    files.append(File.generated(config, "site.css", content=STYLE))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of the README as they are from docs/; a link to a file outside of docs/ is text."""
    index = page.file.src_uri == "index.md"
    base = ROOT if index else (DOCS / page.file.src_uri).parent

    def inside(link: re.Match[str]) -> str:
        target = (base / link[2]).resolve()
        if target.is_relative_to(DOCS) or not target.exists():
            path = link[2].removeprefix("docs/") if index else link[2]
            return f"[{link[1]}]({path}{link[3] or ''})"
        return link[1]

    return _LINK.sub(inside, markdown)
