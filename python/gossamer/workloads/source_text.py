"""The text to train on: the source of the Python standard library on this machine.

Every worker reads the whole text. All workers get the same bytes, and draw the same global batches.
"""

import hashlib
import sysconfig
from functools import cache
from pathlib import Path

import torch

SKIP = {"site-packages", "dist-packages", "test", "encodings"}  # not the library, or tables rather than text


@cache
def standard_library() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns 4 MB to train on, and one file in ten (by a hash of its path) to validate with, both uint8 [bytes]."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for top in root.iterdir() if top.name not in SKIP for f in (top, *top.rglob("*.py"))]
    by_hash = {hashlib.sha256(str(f.relative_to(root)).encode()).digest(): f for f in files}
    train, validation = bytearray(), bytearray()
    for key, file in sorted(by_hash.items()):
        if file.suffix == ".py" and len(train) < 4_000_000:
            (validation if key[-1] % 10 == 0 else train).extend(file.read_bytes())
    if min(len(train), len(validation)) < 20_000:
        raise RuntimeError(f"{root}/**/*.py: need 20000 bytes, got {len(train)} and {len(validation)}")
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)


def batch(text: torch.Tensor, *, seed: int, rows: int, context: int) -> torch.Tensor:
    """Returns a global batch, int64 [rows, context + 1]. A seed gives the same batch on every rank, in every run."""
    starts = torch.randint(len(text) - context, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return text[starts + torch.arange(context + 1)].long()
