"""The pages as the site's generator reads them: `python docs/outside.py FOLDER` copies docs/ there.

Links to files outside docs/ become the file's name, for the site does not hold them; in the repository the same links
lead to the files. A link or a picture whose file does not exist is an error, which names the page.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
KEPT = (".md", ".png", ".css")
CODE = re.compile(r"^( *)```.*?^\1```$", re.M | re.S)


def copied(to: Path) -> None:
    """Every page and picture, links replaced. Raises `FileNotFoundError` where a link leads nowhere."""
    shutil.rmtree(to, ignore_errors=True)
    for source in sorted(path for path in DOCS.rglob("*") if path.is_file() and path.suffix in KEPT):
        target = to / source.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(page(source.read_text("utf-8"), source), encoding="utf-8")
        else:
            shutil.copyfile(source, target)


def page(text: str, source: Path) -> str:
    """A page's text; code in blocks is left alone."""
    parts, at = [], 0
    for block in CODE.finditer(text):
        parts += [LINK.sub(lambda link: named(link, source), text[at : block.start()]), block[0]]
        at = block.end()
    return "".join(parts) + LINK.sub(lambda link: named(link, source), text[at:])


def named(link: re.Match[str], source: Path) -> str:
    """The link as it is, if it leads to a page or away; else its text, and the path where the text is not it."""
    text, to = link[2], link[3]
    if re.match(r"\w+:", to):
        return link[0]
    path = Path(os.path.normpath(source.parent / to))
    if not path.exists():
        raise FileNotFoundError(f"{source.relative_to(DOCS.parent)}: no file for the link to {to}")
    if path.is_relative_to(DOCS):
        return link[0]
    name = str(path.relative_to(DOCS.parent))
    return f"`{name}`" if text.strip("`") in (name, path.name) else f"{text} (`{name}`)"


if __name__ == "__main__":
    copied(Path(sys.argv[1]))
