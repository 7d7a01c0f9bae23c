"""Lists the messages of Gossamer, read from its source. It is not part of the package.

    python docs/messages.py              every message, by file, as a page in Markdown
    python docs/messages.py timed out    the messages that contain these words

The tests compare docs/errors.md with this list. So a page of all messages costs no edit when a message changes.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NATIVE = (".h", ".cpp", ".cu", ".cuh", ".inl")
HOLE = "..."  # stands for a value in a message
CPP_LITERAL = r'"((?:[^"\\\n]|\\.)*)"'


class Message(NamedTuple):
    file: str  # from the top of the repository
    line: int
    text: str


def text_of(node: ast.AST) -> str | None:
    """The text of a literal, of an f-string, or of a sum that contains one; None for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [text_of(node.left), text_of(node.right)]
        return None if sides == [None, None] else "".join(HOLE if side is None else side for side in sides)
    return None


def python_messages(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every literal that is not a docstring, as large as the expression makes it."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        text = text_of(node)
        if text is not None:
            yield getattr(node, "lineno", 0), text
        children = list(ast.iter_child_nodes(node))
        waiting += children if text is None else [child for child in children if text_of(child) is None]


def cpp_messages(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every statement with literals: those of one statement are joined as they are printed."""
    source = re.sub(r"^[ \t]*//.*$|\\$", "", source, flags=re.MULTILINE)
    for statement in re.finditer(rf'(?:{CPP_LITERAL}|[^;{{}}"])+', source):
        parts = re.split(CPP_LITERAL, statement[0])
        if len(parts) == 1:
            continue
        text = parts[1]
        for between, literal in zip(parts[2::2], [*parts[3::2], ""], strict=True):
            text += ("" if re.fullmatch(r"[\s<(),]*", between) else HOLE) + literal
        yield source.count("\n", 0, statement.start() + len(parts[0])) + 1, text.replace('\\"', '"')


def messages() -> list[Message]:
    """Every text of the source that has a space within it."""
    python = [ROOT / "setup.py", *sorted((ROOT / "python").rglob("*.py"))]
    native = [path for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in NATIVE]
    return [
        Message(str(path.relative_to(ROOT)), line, text)
        for path in python + native
        for line, text in sorted(
            (python_messages if path.suffix == ".py" else cpp_messages)(path.read_text())
        )
        if " " in text.strip()
    ]


def page(words: str = "") -> str:
    """The messages of four words or more that contain `words`, as a page in Markdown with a list for each file."""
    lines = ["# All messages", "", "This list is made from the source. `...` stands for a value."]
    file = ""
    for message in messages():
        text = " ".join(message.text.split()).replace("`", "'")
        if len(re.findall("[A-Za-z]{2,}", text)) < 4 or words.lower() not in text.lower():
            continue
        if message.file != file:
            file = message.file
            lines += ["", f"## {file}", ""]
        lines.append(f"- line {message.line}: `{text}`")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(" ".join(sys.argv[1:])))
