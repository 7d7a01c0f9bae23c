"""What griffe, which reads the docstrings, must be told of this package. Used by mkdocs.yml and hook.py."""

import re
from typing import Any

from griffe import Alias, Extension, Module, Object

# A name that Python code binds at run time -> the class or function that stands behind it.
BOUND_AT_RUN_TIME = {
    "gossamer.horovod.run": "gossamer.launch.function.run",
    "gossamer.lightning.BaguaStrategy": "gossamer.lightning.bagua.BaguaStrategy",
    "gossamer.lightning.DDPStrategy": "gossamer.lightning.stock.DDPStrategy",
    "gossamer.lightning.GossamerStrategy": "gossamer.lightning.native.GossamerStrategy",
    "gossamer.lightning.HorovodStrategy": "gossamer.lightning.horovod.HorovodStrategy",
    "gossamer.lightning.ReportCallback": "gossamer.lightning.reports.ReportCallback",
}
# Arguments that are described together: their names, and the description with its indented lines.
GROUP = re.compile(r"^( +)(\w+(?:,\s+\w+)+)(: .*\n?(?:^\1 +.*\n?)*)", re.MULTILINE)
KEYS = re.compile(r"^( *)Keys:$", re.MULTILINE)  # of a mapping: a section that griffe does not know
# Code, or a name such as __init__, which Markdown would print in bold.
UNDERSCORED = re.compile(r"(`+).*?\1|\b__\w+__\b")


class Docstrings(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = KEYS.sub(r"\1Attributes: Keys", fenced(obj.docstring.value))
            obj.docstring.value = linked(GROUP.sub(one_by_one, text))

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        for name, target in BOUND_AT_RUN_TIME.items():
            pkg.set_member(name.removeprefix("gossamer."), Alias(name.rpartition(".")[2], target))


def fenced(docstring: str) -> str:
    """The docstring with its `>>>` examples as blocks of code; without a fence Markdown takes them for quotations."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        if line.startswith(">>> ") and not inside:
            lines += ["```python"]
            inside = True
        elif inside and not line.startswith((">>>", "...")):
            lines += ["```"]
            inside = False
        if inside:
            lines.append(line.removeprefix(">>> ").removeprefix("... "))
        else:
            lines.append(UNDERSCORED.sub(lambda found: found[0] if found[1] else f"`{found[0]}`", line))
    return "\n".join([*lines, "```"] if inside else lines)


def one_by_one(group: re.Match[str]) -> str:
    """The description once for each of the names: griffe knows one argument a line."""
    indent, names, text = group.groups()
    return "".join(f"{indent}{name}{text.rstrip()}\n" for name in re.split(r",\s+", names))


def linked(docstring: str) -> str:
    """The docstring with "docs/codecs.md" as a link to that page. Pages of the API are one folder below it."""
    return re.sub(r"(?<![`\w/])docs/([\w-]+)\.md", r"[docs/\1.md](../\1.md)", docstring)
