# The documentation: its marked Python runs, its links lead somewhere, and the error messages that it explains
# exist in the source.
#
# A Python block is run if the line before it is <!-- runnable -->. The marked blocks of one page are one script:
# they run in order, in one process, alone.

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "csrc" / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
RUNNABLE = re.compile(r"^<!-- runnable -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MUST_RUN = ["README.md", "docs/training-step.md", "docs/adding-an-algorithm.md", "docs/adding-a-codec.md"]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def script_of(page: Path) -> str:
    return "\n".join(RUNNABLE.findall(page.read_text()))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub spells them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if script_of(page)], ids=name)
def test_marked_python_of_a_page_runs(page, start) -> None:
    code, _, err = start(["-c", script_of(page)]).finish()
    assert code == 0, err


def test_pages_that_must_have_runnable_python_have_it() -> None:
    assert [page for page in MUST_RUN if not script_of(ROOT / page)] == []


def test_every_mark_stands_before_a_python_block() -> None:
    for page in PAGES:
        text = page.read_text()
        assert text.count("<!-- runnable -->") == len(RUNNABLE.findall(text)), name(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_somewhere(page) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", without_code(page.read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT), f"{name(page)}: {target} leaves the repository"
        assert file.exists(), f"{name(page)}: {target}"
        assert not anchor or anchor in anchors(file), f"{name(page)}: {target} names no heading"


def test_every_page_of_docs_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in index] == [
        "index.md"
    ]


@cache
def literals() -> str:
    """Text of the string literals of the source, one per line, neighbours joined as the compiler joins them."""
    texts: list[str] = []
    for path in [*(ROOT / "python").rglob("*.py"), ROOT / "setup.py"]:
        nodes = ast.walk(ast.parse(path.read_text()))
        texts += [
            node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh", ".inl"):
            joined = re.sub(r'"\s*(<<\s*)?"', "", re.sub(r"^\s*//.*$|\\$", "", path.read_text(), flags=re.M))
            texts += re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined)
    return "\n".join(texts)


def messages() -> list[str]:
    """First cells of the tables of errors.md, as far as they are code."""
    cells = re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    return [cell for cell in cells if " " in cell]


@pytest.mark.parametrize("message", messages())
def test_error_message_in_the_documentation_exists_in_the_source(message) -> None:
    # Values stand as "..."; what is before and after a colon may come from two places.
    fragments = [fragment.strip(" ':;") for fragment in re.split(r"\.\.\.|[:;] |, got", message)]
    missing = [fragment for fragment in fragments if fragment not in literals()]
    assert missing == [], f"docs/errors.md explains {message!r}"


def test_errors_page_is_read_at_all() -> None:
    assert len(messages()) > 50
