"""The end of docs/results.md: sections that other commands measured, each in a file of benchmarks/results/. Owns their
order and place on the page; what stands in them belongs to the commands that write the files.

    python -m benchmarks.paper.measured     # put the page's end together anew
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.paths import DOCS, RESULTS

MARKER = "<!-- measured by other commands -->"
SECTIONS = ("routers", "ray")


def with_sections(page: str, folder: Path) -> str:
    """The page with everything from the marker on replaced by the sections in `folder`, those that exist. A page
    without the marker gets it at its end."""
    own = page.partition(MARKER)[0].rstrip("\n")
    files = [folder / f"{name}.md" for name in SECTIONS]
    parts = [own, MARKER, *(file.read_text().strip("\n") for file in files if file.exists())]
    return "\n\n".join(parts) + "\n"


def update(page: Path = DOCS / "results.md", folder: Path = RESULTS) -> None:
    """Write the page's end anew."""
    page.write_text(with_sections(page.read_text(), folder))


if __name__ == "__main__":
    update()
