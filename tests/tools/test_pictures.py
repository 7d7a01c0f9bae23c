# The committed pictures of the documentation are what their scripts draw, and say what the lab's lines say.

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"

sys.path.insert(0, str(ROOT / "benchmarks" / "netlab"))

import pictures  # noqa: E402


@pytest.mark.parametrize("file", pictures.DRAWN)
def test_committed_picture_is_what_its_script_draws(file) -> None:
    drawn = pictures.DRAWN[file]().svg()
    assert (PICTURES / file).read_text() == drawn, (
        "run `python benchmarks/netlab/pictures.py` and commit the pictures"
    )


@pytest.mark.parametrize("file", pictures.DRAWN)
def test_picture_of_losses_says_the_seconds_of_the_lab(file) -> None:
    texts = re.findall(r">([^<]+)</text>", (PICTURES / file).read_text())
    lines = (ROOT / "benchmarks" / "netlab" / "results" / "loss-gpt.jsonl").read_text().splitlines()
    seconds = {line["algorithm"]: line["value"] for line in map(json.loads, lines)}
    for variant, name in {
        "ddp": "torch DDP",
        "bytegrad": "ByteGrad",
        "int4": "Int4",
        "diloco": "DiLoCo",
    }.items():
        shown = texts[texts.index(name) + 1]
        assert float(shown.split(" s")[0]) == pytest.approx(seconds[variant], rel=0.02), name
