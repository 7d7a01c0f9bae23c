"""Draws the diagrams of the documentation beside this file.

    python docs/pictures/diagrams.py

Run it after a change here; a test compares the committed pictures with what this draws, and the sizes with the codecs.
"""

from itertools import pairwise
from pathlib import Path

from drawing import Drawing

PICTURES = Path(__file__).resolve().parent

# ---- how a gradient travels

BOX_HEIGHT, BOX_STEP = 50, 68
MIDDLE = BOX_HEIGHT / 2


def gradient() -> Drawing:
    """From the hook on a parameter to the other ranks, and back into param.grad; each box names its room in csrc/."""
    drawing = Drawing(570, 624, "How a gradient travels: from the autograd hook to the other ranks and back")
    lanes = (
        (12, 108, 26, "training thread"),
        (132, 388, 160, "worker thread; on GPUs a side stream"),
        (532, 80, 306, "training thread:"),
    )
    for top, height, left, title in lanes:
        drawing.box(12, top, 546, height, stroke="rule", radius=8)
        drawing.text(left, top + 26, title, colour="pale")
    ready = (
        ("hook", "param.grad is written", "engine/"),
        ("bucket", "its gradients are there", "engine/"),
        ("flight", "it goes in plan order", "engine/"),
    )
    for index, texts in enumerate(ready):
        box(drawing, 24 + 181 * index, 54, 160, "blue", *texts)
    for index in range(2):
        arrow(drawing, (184 + 181 * index, 54 + MIDDLE), (205 + 181 * index, 54 + MIDDLE))
    out = (
        ("gather", "into flat memory", "flat/"),
        ("collective", "what is computed", "collectives/"),
        ("codec", "a row for each rank", "codec/"),
        ("route", "how the rows travel", "route/"),
        ("communicator", "an operation of the group", "comm/"),
    )
    back = (
        ("param.grad", "a view of flat memory", ""),
        ("decode", "equal bits on every rank", "codec/"),
        ("gather of rows", "the same bytes for all", "route/"),
        ("owner", "adds up its row", "collectives/"),
        ("the other ranks", "send this rank their rows", ""),
    )
    bottom = column(drawing, 24, 240, 172, "green", out)
    column(drawing, 306, 240, 172, "orange", back, upwards=True)
    arrow(drawing, (466, 54 + BOX_HEIGHT), (466, 126), (144, 126), (144, 172))
    arrow(drawing, (264, bottom + MIDDLE), (306, bottom + MIDDLE))
    box(drawing, 24, 547, 240, "blue", "ending", "waits for all buckets", "engine/ending")
    drawing.text(306, 582, "loss.backward() returns", colour="pale")
    return drawing


def arrow(drawing: Drawing, *points: tuple[float, float]) -> None:
    drawing.line(list(points), colour="ink", width=1.6, arrow=True)


def column(
    drawing: Drawing,
    left: float,
    width: float,
    top: float,
    colour: str,
    boxes: tuple[tuple[str, str, str], ...],
    *,
    upwards: bool = False,
) -> float:
    """Boxes below each other with arrows between them; the top of the last one."""
    tops = [top + BOX_STEP * row for row in range(len(boxes))]
    middle = left + width / 2
    for y, texts in zip(tops, boxes, strict=True):
        box(drawing, left, y, width, colour, *texts)
    for upper, lower in pairwise(tops):
        ends = [(middle, upper + BOX_HEIGHT), (middle, lower)]
        arrow(drawing, *(ends[::-1] if upwards else ends))
    return tops[-1]


def box(
    drawing: Drawing, left: float, top: float, width: float, colour: str, name: str, text: str, room: str
) -> None:
    drawing.box(left, top, width, BOX_HEIGHT, fill=colour, opacity=0.14)
    drawing.box(left, top, width, BOX_HEIGHT, stroke=colour)
    drawing.text(left + 10, top + 20, name, bold=True)
    drawing.text(left + width - 10, top + 20, room, colour="pale", size=12, anchor="end", monospace=True)
    drawing.text(left + 10, top + 40, text, size=13)


# ---- one step in time


def step() -> Drawing:
    """What the training thread and the worker do at the same time; a dot is a gradient that backward has written."""
    drawing = Drawing(570, 236, "One training step in time: buckets travel while backward goes on")
    for y, name in ((48, "training"), (66, "thread"), (124, "gradients"), (186, "worker"), (204, "thread")):
        drawing.text(14, y, name, colour="pale", size=14)
    for left, right, name, colour in (
        (90, 162, "forward", "grey"),
        (166, 436, "loss.backward()", "blue"),
        (508, 556, "step", "grey"),
    ):
        block(drawing, left, right, 32, name, colour)
    drawing.box(436, 32, 68, 44, stroke="blue", dashed=True)
    drawing.text(470, 59, "waits", size=14, anchor="middle")
    buckets = (
        ("bucket 0", "green", 180, 250, 334),
        ("bucket 1", "orange", 262, 338, 418),
        ("last", "purple", 350, 422, 504),
    )
    for name, colour, first, begin, end in buckets:
        gradients = [first + (begin - 10 - first) * index / 3 for index in range(4)]
        for x in gradients:
            drawing.dot(x, 119, 6, fill=colour)
        arrow(drawing, (gradients[-1], 128), (gradients[-1], 150), (begin + 8, 168))
        block(drawing, begin, end, 170, name, colour)
    drawing.text(166, 100, "last layers", colour="pale", size=13)
    drawing.text(436, 100, "first layers", colour="pale", size=13, anchor="end")
    return drawing


def block(drawing: Drawing, left: float, right: float, top: float, name: str, colour: str) -> None:
    drawing.box(left, top, right - left, 44, fill=colour, opacity=0.18)
    drawing.box(left, top, right - left, 44, stroke=colour)
    drawing.text((left + right) / 2, top + 27, name, size=14, anchor="middle")


# ---- the wire

ELEMENTS = 256

# Codec, the parts of its row for 256 float32 elements: bytes, what they are, how that is drawn; and in words.
SCALE, CODE, INDEX, ZERO = "orange", "blue", "green", "rule"
ROWS = (
    ("float32", ((1024, CODE),), "256 elements of 4 bytes: the gradient as it is"),
    ("BF16, FP16", ((512, CODE),), "256 elements of 2 bytes"),
    ("MinMaxUInt8", ((8, SCALE), (24, ZERO), (256, CODE)), "min and max, zeros, 256 codes of 1 byte"),
    (
        "Int8(block=64)",
        ((8, SCALE), (8, ZERO), (256, CODE)),
        "4 peaks of 2 bytes, zeros, 256 codes of 1 byte",
    ),
    ("Int4(block=32)", ((16, SCALE), (128, CODE)), "8 scales of 2 bytes, 256 codes, two a byte"),
    (
        "OneBit(block=128)",
        ((4, SCALE), (12, ZERO), (32, CODE)),
        "2 scales of 2 bytes, zeros, 256 signs, eight a byte",
    ),
    ("TopK(0.01)", ((12, INDEX), (12, CODE)), "3 indices of 4 bytes, 3 values of 4 bytes"),
)


def wires() -> Drawing:
    """A row of 256 float32 elements in every codec's bytes, to scale."""
    drawing = Drawing(570, 110 + 50 * len(ROWS), "The bytes of a row of 256 elements in each codec, to scale")
    drawing.text(20, 32, "A row of 256 float32 elements on the wire, to scale", size=18, bold=True)
    x = 20.0
    for colour, name in ((CODE, "elements or codes"), (SCALE, "scales"), (INDEX, "indices"), (ZERO, "zeros")):
        drawing.box(x, 50, 14, 14, fill=colour, radius=2)
        drawing.text(x + 20, 62, name, colour="pale", size=14)
        x += 46 + 8 * len(name)
    left, pixels_a_byte = 160, 0.29
    for row, (name, parts, words) in enumerate(ROWS):
        y = 92 + 50 * row
        drawing.text(left - 14, y + 16, name, size=14, anchor="end")
        x = left
        for size, colour in parts:
            drawing.box(x, y, size * pixels_a_byte, 22, fill=colour, radius=0)
            x += size * pixels_a_byte
        total = sum(size for size, _ in parts)
        drawing.text(x + 10, y + 16, f"{total:,} bytes", bold=True)
        drawing.text(left, y + 38, words, colour="pale", size=13)
    return drawing


# ---- two levels of hosts

PARTS = ("blue", "green", "orange", "purple")


def hosts() -> Drawing:
    """Two hosts of four ranks: exact sums inside, a codec between."""
    drawing = Drawing(620, 400, "Sums by hosts: exact inside a host, through the codec between hosts")
    drawing.text(20, 34, "1", size=18, bold=True)
    drawing.text(42, 34, "Inside a host: each rank adds up one part of all gradients, exactly.")
    for host, left in enumerate((16, 364)):
        drawing.box(left, 52, 240, 262, stroke="pale", radius=8)
        drawing.text(left + 14, 78, f"host {host}", bold=True)
        for rank, colour in enumerate(PARTS):
            y = 94 + 54 * rank
            drawing.text(left + 14, y + 21, f"rank {4 * host + rank}", size=14)
            for part in range(len(PARTS)):
                place = (left + 84 + 36 * part, y, 32, 32)
                if part == rank:
                    drawing.box(*place, fill=colour)
                else:
                    drawing.box(*place, stroke="rule")
    for rank, colour in enumerate(PARTS):
        y = 110 + 54 * rank
        drawing.line([(310, y), (262, y)], colour=colour, width=2.4, arrow=True)
        drawing.line([(310, y), (358, y)], colour=colour, width=2.4, arrow=True)
    drawing.text(310, 74, "slow network", anchor="middle", colour="pale", size=14)
    drawing.text(310, 306, "codec's bytes", anchor="middle", colour="pale", size=14)
    drawing.text(20, 350, "2", size=18, bold=True)
    drawing.text(42, 350, "Between hosts: each part crosses through the codec, to its rank there.")
    drawing.text(20, 380, "3", size=18, bold=True)
    drawing.text(42, 380, "Inside a host again: every rank takes all parts, so all hold equal bits.")
    return drawing


# File beside this one -> what draws it.
DRAWN = {"step.svg": step, "gradient.svg": gradient, "wires.svg": wires, "hosts.svg": hosts}


def main() -> None:
    for file, draw in DRAWN.items():
        draw().save(PICTURES / file)


if __name__ == "__main__":
    main()
