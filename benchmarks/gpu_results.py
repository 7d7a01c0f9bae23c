"""What `make gpu-check` keeps: the lines that it prints, the logs, and the benchmarks' results, also as one archive.

In the folder of the run: summary.txt (the lines of all runs, one after the other), logs/ (one file a command, of its
latest run), rows/ (the results of each command), results.jsonl (all results).
"""

import json
import os
import tarfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

ARCHIVE = "gpu-check.tar.gz"


class Record:
    """Args:
    root: the folder of the run.
    folder: where the archive is written. None: nowhere.
    """

    def __init__(self, root: Path, folder: Path | None, *, commit: str) -> None:
        self.root, self.folder, self.commit = root, folder, commit
        for name in ("logs", "rows"):
            (root / name).mkdir(parents=True, exist_ok=True)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def say(self, line: str) -> None:
        print(line, flush=True)
        with (self.root / "summary.txt").open("a") as summary:
            summary.write(line + "\n")

    def keep(self, log: str, text: str) -> None:
        """Keeps the results in the output of a command in place of those of its last run, and writes the archive."""
        stamp = {"date": str(date.today()), "commit": self.commit}
        rows = [json.loads(line) | stamp for line in text.splitlines() if line.startswith('{"benchmark"')]
        (self.root / "rows" / f"{log}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = sorted((self.root / "rows").iterdir())
        (self.root / "results.jsonl").write_text("".join(file.read_text() for file in files))
        self.write_archive()

    def write_archive(self) -> None:
        """Writes the archive anew. It is complete at any moment, so that a run that is cut keeps what it had."""
        if self.folder is None:
            return
        unfinished = self.folder / f".{ARCHIVE}"
        with tarfile.open(unfinished, "w:gz") as archive:
            for name in ("summary.txt", "results.jsonl", "logs"):
                if (self.root / name).exists():
                    archive.add(self.root / name, arcname=f"gpu-check/{name}")
        os.replace(unfinished, self.folder / ARCHIVE)

    def rows(self) -> list[dict[str, Any]]:
        """Returns all results, those of earlier runs too."""
        file = self.root / "results.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def figure_of(row: dict[str, Any]) -> str:
    """Returns one result, formatted for docs/gpu-results.md."""
    text = f"{row['what']}: {row['value']:.4g} {row['unit']}"
    if row["baseline"] is not None:
        text += f"; {row['baseline']} {row['baseline_value']:.4g}, ratio {row['ratio']:.3g}"
    if "naive_times_as_long" in row:
        text += f"; naive takes {row['naive_times_as_long']:.3g} times as long"
    if "kernels" in row:
        text += f"; {row['kernels']}"
    if row["met"] is not None:
        sign, bound = ("at least", row["at_least"]) if row["at_most"] is None else ("at most", row["at_most"])
        text += f"; target {sign} {bound:g}: {'met' if row['met'] else 'missed'}"
    return text


def rows_of(lines: Sequence[str]) -> list[str]:
    """Returns rows of the table in docs/gpu-results.md."""
    rows = [json.loads(line) for line in lines if line.strip()]
    return [
        f"| {row['date']} | {row['commit']} | `{row['command']}` | {row.get('device', '')}, torch {row['torch']}: "
        f"{figure_of(row)} |"
        for row in rows
    ]
