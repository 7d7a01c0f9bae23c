"""Follows a page of docs/ that says how to add something: makes a copy of the repository and does what the page says.

`<!-- new file: PATH -->` before a block of code: the block is that file. `<!-- in PATH, after: TEXT -->`: the block's
lines come after the first line of that file that holds TEXT. Used by the tests of the adding-*.md pages.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests import ROOT

BLOCK = re.compile(
    r"^<!-- (?:new file: (?P<new>[\w./-]+)|in (?P<old>[\w./-]+), after: (?P<text>[^\n]+)) -->\n"
    r"```\w*\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def follow(page: str, copy: Path) -> list[str]:
    """Copies the repository to `copy`, does what the page says, and returns the paths of the files that it names."""
    for folder in ("python", "csrc", "docs", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / file, copy / file)
    named = []
    for block in BLOCK.finditer((ROOT / page).read_text()):
        path = block["new"] or block["old"]
        file = copy / path
        if block["new"]:
            assert not file.exists(), f"{page}: {path} exists already"
            file.write_text(block["code"])
        else:
            lines = file.read_text().splitlines(keepends=True)
            at = next(number for number, line in enumerate(lines) if block["text"] in line)
            file.write_text("".join([*lines[: at + 1], block["code"], *lines[at + 1 :]]))
        named.append(path)
    return named


def pytest_in(copy: Path, *arguments: str) -> str:
    """Runs pytest in the copy, with the copy's package. Returns what it prints."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(copy / "python")}
    run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    return run.stdout
