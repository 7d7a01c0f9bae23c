# The documentation: its marked Python runs, its links lead somewhere, and the error messages that it explains
# exist in the source.
#
# A Python block is run if the line before it is <!-- runnable -->. The marked blocks of one page are one script:
# they run in order, in one process, alone.

import difflib
import re
import runpy
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT

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
    """The anchors of its headings, as GitHub spells them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if script_of(page)], ids=name)
def test_marked_python_of_a_page_runs(page, fork) -> None:
    code, _, err = fork(["-c", script_of(page)]).finish()
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
def messages() -> list[str]:
    """Texts of the source, with "..." in place of values, as docs/messages.py reads them."""
    source = runpy.run_path(str(ROOT / "docs" / "messages.py"))
    return [message.text for message in source["messages"]()]


def explained() -> list[str]:
    """What docs/errors.md quotes of messages: the code in the first cells of its tables, if it is more than a word."""
    cells = re.findall(r"^\| (`.*?`) \| ", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    return [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell) if " " in quote]


@pytest.mark.parametrize("quote", explained())
def test_error_message_in_the_documentation_exists_in_the_source(quote) -> None:
    if not any(quote in message for message in messages()):
        nearest = difflib.get_close_matches(quote, messages(), n=1, cutoff=0)
        pytest.fail(f"docs/errors.md quotes {quote!r}, which no message says; the nearest is {nearest}")


def test_errors_page_is_read_at_all() -> None:
    assert len(explained()) > 50


def test_messages_are_read_as_a_user_meets_them() -> None:
    found = runpy.run_path(str(ROOT / "docs" / "messages.py"))
    python = 'def f(x):\n  """No message."""\n  raise E("a: must be 1, got " + str(x) + "; give" f" {x} or {2} once")'
    assert list(found["python_messages"](python)) == [(3, "a: must be 1, got ...; give ... or ... once")]
    cpp = 'f();\n// "a comment"\ncheck(x, where, ": must be \\"1\\", "\n "got ", x, "; give it");'
    assert list(found["cpp_messages"](cpp)) == [(3, ': must be "1", got ...; give it')]
