"""Draws what the study's lines say about the time to a loss, for the README and docs/slow-networks.md.

    python benchmarks/netlab/pictures.py

reads results/loss-*.jsonl beside this file and writes docs/pictures/loss-over-time.svg and time-to-loss.svg. Run it
when the study has new lines; a test compares the committed pictures with the lines.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PICTURES = HERE.parent.parent / "docs" / "pictures"
RESULTS = HERE / "results"
SEEDS = 3
TIMES = "\N{MULTIPLICATION SIGN}"

sys.path.insert(0, str(PICTURES))

from drawing import Drawing  # noqa: E402

# Variant of the study -> its name in the pictures, its colour.
VARIANTS = {
    "ddp": ("torch DDP", "grey"),
    "ddp_fp16_hook": ("DDP, fp16 hook", "brown"),
    "bytegrad": ("ByteGrad", "blue"),
    "int4": ("Int4", "green"),
    "local_sgd": ("LocalSGD", "purple"),
    "powersgd": ("PowerSGD", "purple"),
    "onebit": ("OneBit", "orange"),
    "streaming_diloco": ("streaming DiLoCo", "purple"),
    "diloco": ("DiLoCo", "red"),
}
CURVES = ("ddp", "ddp_fp16_hook", "bytegrad", "int4", "onebit", "diloco")


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def medians(part: str) -> dict[str, dict[str, Any]]:
    """Variant -> its line of a part of the study: medians over the seeds, and each seed's seconds."""
    return {line["algorithm"]: line for line in read(RESULTS / f"{part}.jsonl")}


def curves(part: str, variant: str) -> list[dict[str, Any]]:
    """A variant's training in each seed: `seconds` and `losses` of each validation."""
    every = [line for seed in range(SEEDS) for line in read(RESULTS / f"{part}-curves-{seed}.jsonl")]
    return [line for line in every if line["algorithm"] == variant]


def loss_over_time() -> Drawing:
    """Validation loss against time, each variant until it has the loss that stock DDP ends with."""
    lines = medians("loss-gpt")
    drawing = Drawing(570, 420, "Validation loss against time on four hosts joined by links of 100 Mbit/s")
    left, right, top, bottom = 62, 554, 62, 366
    most_seconds, least_loss, most_loss = 260, 2.5, 3.5

    def place(second: float, loss: float) -> tuple[float, float]:
        x = left + (right - left) * second / most_seconds
        return x, bottom - (bottom - top) * (loss - least_loss) / (most_loss - least_loss)

    drawing.text(20, 32, "A GPT trained on four hosts, links of 100 Mbit/s", size=18, bold=True)
    for tenth in range(25, 36, 2):
        _, y = place(0, tenth / 10)
        drawing.line([(left, y), (right, y)])
        drawing.text(left - 10, y + 5, f"{tenth / 10}", colour="pale", size=14, anchor="end")
    for second in range(0, most_seconds, 50):
        x, _ = place(second, 0)
        drawing.text(x, bottom + 22, f"{second} s", colour="pale", size=14, anchor="middle")
    drawing.text(
        22, (top + bottom) / 2, "validation loss", colour="pale", size=14, anchor="middle", turned=True
    )
    drawing.text((left + right) / 2, bottom + 44, "time of training", colour="pale", size=14, anchor="middle")
    for variant in CURVES:
        _, colour = VARIANTS[variant]
        for curve in curves("loss-gpt", variant):
            seconds = curve["seconds"][-1] + curve["consensus_s"]
            median = abs(seconds - lines[variant]["value"]) < 0.01
            points = [place(*point) for point in zip(curve["seconds"], curve["losses"], strict=True)]
            points = from_top(points, top)
            drawing.line(points, colour=colour, width=2.6 if median else 1, opacity=1 if median else 0.45)
            if median:
                drawing.dot(*points[-1], 5, fill=colour, stroke="paper")
    table(drawing, lines)
    return drawing


def from_top(points: list[tuple[float, float]], top: float) -> list[tuple[float, float]]:
    """Cuts off the points above the frame: the loss falls from 5.7 in the first steps."""
    for position, ((x0, y0), (x, y)) in enumerate(pairwise(points)):
        if y > top:
            return [(x0 + (x - x0) * (top - y0) / (y - y0), top), *points[position + 1 :]]
    return points


def table(drawing: Drawing, lines: dict[str, dict[str, Any]]) -> None:
    """The key, with the median seconds of each variant and how many times sooner than stock DDP that is."""
    x, y = 230, 90
    drawing.box(x - 8, y - 18, 334, 174, fill="paper")
    drawing.text(x + 240, y, "to DDP's last loss", colour="pale", size=14, anchor="end")
    drawing.text(x + 316, y, "sooner", colour="pale", size=14, anchor="end")
    for row, variant in enumerate(CURVES, 1):
        name, colour = VARIANTS[variant]
        line, below = lines[variant], y + 23 * row
        drawing.line([(x, below - 5), (x + 22, below - 5)], colour=colour, width=3)
        drawing.text(x + 32, below, name)
        drawing.text(x + 240, below, f"{two_digits(line['value'])} s", anchor="end")
        if variant != "ddp":
            drawing.text(x + 316, below, f"{two_digits(line['ratio'])}{TIMES}", anchor="end", bold=True)


def two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def time_to_loss() -> Drawing:
    """A bar for each variant, as long as its median time to the loss that stock DDP ends with; a dot for each seed."""
    lines = sorted(medians("loss-gpt").values(), key=lambda line: -line["value"])
    drawing = Drawing(570, 84 + 30 * len(lines), "Seconds until the validation loss that stock DDP ends with")
    drawing.text(20, 32, "Seconds to the loss that torch DDP ends with", size=18, bold=True)
    drawing.text(20, 54, "four hosts, 100 Mbit/s; bars: median, dots: three seeds", colour="pale", size=14)
    left, right, most_seconds = 164, 510, 260
    for row, line in enumerate(lines):
        name, colour = VARIANTS[line["algorithm"]]
        y = 84 + 30 * row
        drawing.text(left - 12, y + 5, name, anchor="end")
        width = (right - left) * line["value"] / most_seconds
        drawing.box(left, y - 10, width, 20, fill=colour, radius=2)
        places = [left + (right - left) * seconds / most_seconds for seconds in line["seconds"]]
        for x in places:
            drawing.dot(x, y, 3.5, fill="ink", stroke="paper")
        sooner = "" if line["algorithm"] == "ddp" else f", {two_digits(line['ratio'])}{TIMES} sooner"
        drawing.text(max([left + width, *places]) + 12, y + 5, f"{two_digits(line['value'])} s{sooner}")
    return drawing


# File in docs/pictures -> what draws it.
DRAWN = {"loss-over-time.svg": loss_over_time, "time-to-loss.svg": time_to_loss}


def main() -> None:
    for file, draw in DRAWN.items():
        draw().save(PICTURES / file)


if __name__ == "__main__":
    main()
