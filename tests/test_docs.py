"""What the pages promise: the tutorial runs, and links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_tutorial_runs(tmp_path: Path) -> None:
    """Its files are written, its commands run, and the files that it lists are there."""
    page = (DOCS / "tutorial.md").read_text()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for kind, block in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if kind in ("python", "yaml"):
            name = block.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(block)
        elif kind == "sh":
            subprocess.run(
                ["bash", "-ec", block],
                cwd=tmp_path,
                env=environment,
                check=True,
                stdout=subprocess.DEVNULL,
            )
        elif kind == "files":
            there = {f"data/{path.name}" for path in (tmp_path / "data").iterdir()}
            assert there == set(block.split())


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]
    for page in pages:
        text = page.read_text()
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
            path = page.parent / target if target else page
            assert path.exists(), f"{page}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles}
                assert anchor in slugs, f"{page}: {target}#{anchor}"
