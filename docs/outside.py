"""For mkdocs: links from the pages to files outside docs/ become the file's name, for the pages do not hold them.

A link whose file does not exist is an error. In the repository the same links lead to the files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A page's text with such links replaced; those to other pages stay. Raises `FileNotFoundError`."""
    folder = (DOCS / page.file.src_uri).parent
    return OUTSIDE.sub(lambda link: named(link, folder), markdown)


def named(link: re.Match[str], folder: Path) -> str:
    """The link's text, and the path from the top of the repository where the text does not say it."""
    path = (folder / link[2]).resolve(strict=True)
    if path.is_relative_to(DOCS):
        return link[0]
    name = str(path.relative_to(DOCS.parent))
    return f"`{name}`" if link[1].strip("`") in (name, path.name) else f"{link[1]} (`{name}`)"
