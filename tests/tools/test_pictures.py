# The committed pictures of the documentation equal what their scripts draw, and show the figures of the lab's lines.

import json
import re
import sys
from pathlib import Path

import pytest

import gossamer as gs

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "mkdocs.yml").exists())
PICTURES = ROOT / "docs" / "pictures"

sys.path[:0] = [str(ROOT / "benchmarks" / "netlab"), str(PICTURES)]

import diagrams  # noqa: E402
import pictures  # noqa: E402

DRAWN = pictures.DRAWN | diagrams.DRAWN


@pytest.mark.parametrize("file", DRAWN)
def test_committed_picture_is_what_its_script_draws(file) -> None:
    drawn = DRAWN[file]().svg()
    assert (PICTURES / file).read_text() == drawn, "run its script, and commit the picture"


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


def test_every_picture_has_a_script() -> None:
    assert {file.name for file in PICTURES.glob("*.svg")} == set(DRAWN)


def test_picture_of_wires_shows_the_sizes_of_the_codecs() -> None:
    codecs = {
        "float32": gs.Identity(),
        "BF16, FP16": gs.BF16(),
        "MinMaxUInt8": gs.MinMaxUInt8(),
        "Int8(block=64)": gs.Int8(block=64),
        "Int4(block=32)": gs.Int4(block=32),
        "OneBit(block=128)": gs.OneBit(block=128),
        "TopK(0.01)": gs.TopK(0.01),
    }
    shown = {name: sum(size for size, _ in parts) for name, parts, _ in diagrams.ROWS}
    assert shown == {name: codec.wire_bytes(diagrams.ELEMENTS) for name, codec in codecs.items()}
