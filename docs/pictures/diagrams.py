"""Draws the diagrams of the documentation beside this file.

    python docs/pictures/diagrams.py

Run it after a change here; a test compares the committed pictures with what this draws, and the sizes with the codecs.
"""

from itertools import pairwise
from pathlib import Path

from drawing import Drawing

PICTURES = Path(__file__).resolve().parent

# ---- how a gradient travels

BOX_HEIGHT, BOX_STEP = 50, 72


def gradient() -> Drawing:
    """From the hook on a parameter to the other ranks, and back into param.grad; each box names its room in csrc/."""
    drawing = Drawing(720, 452, "How a gradient travels: from the autograd hook to the other ranks and back")
    top = 68
    for left, width, title in (
        (16, 224, "training thread"),
        (256, 448, "worker thread; on GPUs a side stream"),
    ):
        drawing.box(left, 14, width, 424, stroke="rule", radius=8)
        drawing.text(left + 14, 40, title, colour="pale", size=15)
    ready = column(
        drawing,
        30,
        196,
        top,
        "blue",
        (
            ("hook", "param.grad is written", "engine/hooks"),
            ("bucket", "its last gradient is there", "engine/bucket"),
            ("flight", "buckets go in one order", "engine/flight"),
        ),
    )
    out = column(
        drawing,
        270,
        200,
        top,
        "green",
        (
            ("gather", "into flat memory", "flat/"),
            ("collective", "what is computed", "collectives/"),
            ("codec", "a row for each rank", "codec/"),
            ("route", "how the rows travel", "route/"),
            ("communicator", "an operation of the group", "comm/"),
        ),
    )
    back = column(
        drawing,
        494,
        196,
        top,
        "orange",
        (
            ("param.grad", "a view of flat memory", ""),
            ("decode", "equal bits on every rank", "codec/"),
            ("gather of rows", "the same bytes for all", "route/"),
            ("owner", "adds up its row", "collectives/"),
            ("the other ranks", "send this rank their rows", ""),
        ),
        upwards=True,
    )
    ending = top + 4 * BOX_STEP
    box(drawing, 30, ending, 196, "blue", "ending", "backward returns", "engine/ending")
    middle = BOX_HEIGHT / 2
    drawing.line(
        [
            (226, ready[-1] + middle),
            (248, ready[-1] + middle),
            (248, out[0] + middle),
            (270, out[0] + middle),
        ],
        colour="ink",
        width=1.6,
        arrow=True,
    )
    drawing.line([(470, out[-1] + middle), (494, back[-1] + middle)], colour="ink", width=1.6, arrow=True)
    drawing.line(
        [(128, ready[-1] + BOX_HEIGHT), (128, ending)], colour="pale", width=1.6, dashed=True, arrow=True
    )
    drawing.text(140, ending - 38, "waits for", colour="pale", size=13)
    drawing.text(140, ending - 20, "all buckets", colour="pale", size=13)
    return drawing


def column(
    drawing: Drawing,
    left: float,
    width: float,
    top: float,
    colour: str,
    boxes: tuple[tuple[str, str, str], ...],
    *,
    upwards: bool = False,
) -> list[float]:
    """Boxes below each other with arrows between them; the top of each."""
    tops = [top + BOX_STEP * row for row in range(len(boxes))]
    middle = left + width / 2
    for y, texts in zip(tops, boxes, strict=True):
        box(drawing, left, y, width, colour, *texts)
    for upper, lower in pairwise(tops):
        ends = [(middle, upper + BOX_HEIGHT), (middle, lower)]
        drawing.line(ends[::-1] if upwards else ends, colour="ink", width=1.6, arrow=True)
    return tops


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
    drawing = Drawing(720, 236, "One training step in time: buckets travel while backward goes on")
    for y, name in ((48, "training"), (66, "thread"), (124, "gradients"), (186, "worker"), (204, "thread")):
        drawing.text(16, y, name, colour="pale", size=14)
    for left, right, name, colour in (
        (100, 186, "zero_grad", "grey"),
        (190, 282, "forward", "grey"),
        (286, 580, "loss.backward()", "blue"),
        (652, 704, "step", "grey"),
    ):
        block(drawing, left, right, 32, name, colour)
    drawing.box(580, 32, 68, 44, stroke="blue", dashed=True)
    drawing.text(614, 59, "waits", size=14, anchor="middle")
    buckets = (
        ("bucket 0", "green", 300, 374, 468),
        ("bucket 1", "orange", 392, 472, 562),
        ("last", "purple", 490, 566, 648),
    )
    for name, colour, first, begin, end in buckets:
        gradients = [first + (begin - 12 - first) * index / 3 for index in range(4)]
        for x in gradients:
            drawing.dot(x, 119, 6, fill=colour)
        drawing.line(
            [(gradients[-1], 128), (gradients[-1], 150), (begin + 8, 168)],
            colour="ink",
            width=1.4,
            arrow=True,
        )
        block(drawing, begin, end, 170, name, colour)
    drawing.text(286, 100, "last layers", colour="pale", size=13)
    drawing.text(580, 100, "first layers", colour="pale", size=13, anchor="end")
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
    drawing = Drawing(720, 110 + 50 * len(ROWS), "The bytes of a row of 256 elements in each codec, to scale")
    drawing.text(20, 32, "A row of 256 float32 elements on the wire, to scale", size=18, bold=True)
    x = 20.0
    for colour, name in ((CODE, "elements or codes"), (SCALE, "scales"), (INDEX, "indices"), (ZERO, "zeros")):
        drawing.box(x, 50, 14, 14, fill=colour, radius=2)
        drawing.text(x + 20, 62, name, colour="pale", size=14)
        x += 46 + 8 * len(name)
    left, pixels_a_byte = 170, 0.41
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
    drawing = Drawing(720, 400, "Sums by hosts: exact inside a host, through the codec between hosts")
    drawing.text(20, 34, "1", size=18, bold=True)
    drawing.text(42, 34, "Inside a host, in memory: each rank adds up one part of all gradients, exactly.")
    for host, left in enumerate((20, 460)):
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
        drawing.line([(360, y), (266, y)], colour=colour, width=2.4, arrow=True)
        drawing.line([(360, y), (454, y)], colour=colour, width=2.4, arrow=True)
    drawing.text(360, 74, "slow network", anchor="middle", colour="pale", size=14)
    drawing.text(360, 306, "codec's bytes", anchor="middle", colour="pale", size=14)
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
