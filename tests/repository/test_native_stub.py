"""python/gossamer/_C.pyi describes the native extension: every class, member and argument, and nothing else."""

import ast
import re
from pathlib import Path

import gossamer
from gossamer import _C

STUB = Path(gossamer.__file__).with_name("_C.pyi")


def arguments(signature: str, *, method: bool) -> str:
    """The names of the arguments of `def signature`, and whether they have defaults; `_` for one without a name."""
    function = ast.parse(f"def {signature}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    by_place = ["_"] * len(given.posonlyargs) + [re.sub(r"^arg\d+$", "_", each.arg) for each in given.args]
    optional = [False] * (len(by_place) - len(given.defaults)) + [True] * len(given.defaults)
    named = [each.arg for each in given.kwonlyargs]
    pairs = [
        *zip(by_place, optional, strict=True),
        *([("*", False)] if named else []),
        *zip(named, [default is not None for default in given.kw_defaults], strict=True),
    ]
    return ", ".join(name + "=..." * has_default for name, has_default in pairs[1 if method else 0 :])


def of_extension() -> dict[str, str]:
    """Every public name of the extension, and what it is. pybind11 writes signatures into docstrings."""

    def signature(function: object, *, method: bool = False) -> str:
        line = str(function.__doc__).splitlines()[0]
        return arguments(re.sub(r"<[\w.]+: \d+>", "...", line), method=method)

    found: dict[str, str] = {}
    for name, value in vars(_C).items():
        if name.startswith("__"):
            continue
        if not isinstance(value, type):
            found[name] = signature(value) if callable(value) else "value"
            continue
        found[name] = " ".join(
            [
                "class",
                *(base.__qualname__ for base in value.__bases__ if base.__module__ != "pybind11_builtins"),
            ]
        )
        for member, bound in vars(value).items():
            place = f"{name}.{member}"
            if isinstance(bound, property):
                found[place] = "writable property" if bound.fset else "property"
            elif isinstance(bound, staticmethod):
                found[place] = f"static {signature(bound.__func__)}"
            elif isinstance(bound, value):
                found[place] = "value"
            elif (not member.startswith("_") or member == "__init__") and "(self: " in str(bound.__doc__):
                found[place] = signature(bound, method=True)
    return {place: what for place, what in found.items() if ".__" not in place or place.endswith(".__init__")}


def of_stub() -> dict[str, str]:
    """Every name that the stub defines, in the same form."""
    found: dict[str, str] = {}

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.AnnAssign):
                found[prefix + ast.unparse(node.target)] = "value"
            elif isinstance(node, ast.ClassDef):
                found[node.name] = " ".join(["class", *map(ast.unparse, node.bases)])
                add(node.body, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                if "property" in marks:
                    found[prefix + node.name] = "property"
                elif f"{node.name}.setter" in marks:
                    found[prefix + node.name] = "writable property"
                else:
                    static = "staticmethod" in marks
                    given = arguments(f"f({ast.unparse(node.args)})", method=bool(prefix) and not static)
                    found[prefix + node.name] = f"static {given}" if static else given

    add(ast.parse(STUB.read_text()).body, "")
    return found


def test_the_stub_has_every_name_and_argument_of_the_extension_and_no_other() -> None:
    bound, described = of_extension(), of_stub()
    assert len(bound) > 200  # else nothing was looked at
    assert {place: what for place, what in bound.items() if described.get(place) != what} == {}, (
        "not so in the stub"
    )
    assert sorted(set(described) - set(bound)) == [], "not in the extension"
