"""What MkDocs does for this site beside its own work: files outside docs/ become pages, tables of names are filled, and
a public name without a docstring, or on no page of the API, is a warning, which ends a strict build.
"""

import re
import runpy
from pathlib import Path
from posixpath import relpath
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUTSIDE = "repository"  # folder of the site for what is not in docs/
LANGUAGES = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".inl": "cpp", ".sh": "bash", ".toml": "toml"}
PICTURES = (".png", ".svg")
ALWAYS = ("README.md", "CHANGELOG.md")  # on the site, whether a page of docs/ links to them or not
# A link's target, or code, in which nothing is a link.
LINK = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`|(?<=\]\()([^)\s]+)(?=\))", re.MULTILINE | re.DOTALL)
NAMES = re.compile(r"^<!-- names: ([\w.]+) -->$", re.MULTILINE)
SHOWN = re.compile(r"^::: ([\w.]+)$|^<!-- names: ([\w.]+) -->$", re.MULTILINE)
# This has an __all__ for the package's own modules; users have no business with it.
PRIVATE = ("gossamer.torch_private",)

log = get_plugin_logger("gossamer")


# ---- files outside docs/


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of all messages, and a page for each file outside docs/ that another page links to."""
    pages = [DOCS / file.src_uri for file in files.documentation_pages()]
    waiting = [ROOT / name for name in ALWAYS] + [found for page in pages for found in targets(page)]
    while waiting:
        file = waiting.pop()
        uri = uri_of(file)
        if files.get_file_from_path(uri) is None and file.is_relative_to(ROOT) and file.exists():
            files.append(outside(file, uri, config))
            waiting += targets(file) if file.suffix == ".md" else []
    messages = runpy.run_path(str(DOCS / "messages.py"))["page"]()
    files.append(File.generated(config, "messages.md", content=messages))
    return files


def targets(page: Path) -> list[Path]:
    """The files of the repository that a page links to."""
    links = [found[1] for found in LINK.finditer(page.read_text()) if found[1] and "://" not in found[1]]
    return [file_of(page, link.partition("#")[0]) for link in links if not link.startswith("#")]


def file_of(page: Path, path: str) -> Path:
    """The file that a path on a page means. A folder means its README, if it has one."""
    file = (page.parent / path).resolve()
    readme = file / "README.md"
    return readme if readme.exists() else file


def uri_of(file: Path) -> str:
    """The place in the site of a file of the repository."""
    if not file.is_relative_to(ROOT):
        return file.as_posix()
    if file.is_relative_to(DOCS) and not file.is_dir():
        return file.relative_to(DOCS).as_posix()
    path = f"{OUTSIDE}/{file.relative_to(ROOT).as_posix()}"
    return path if file.suffix in (".md", *PICTURES) else f"{path}.md"


def outside(file: Path, uri: str, config: MkDocsConfig) -> File:
    if file.suffix in PICTURES:
        return File.generated(config, uri, content=file.read_bytes())
    inclusion = InclusionLevel.UNDEFINED if file.suffix == ".md" else InclusionLevel.NOT_IN_NAV
    return File.generated(config, uri, content=text_of(file), inclusion=inclusion)


def text_of(file: Path) -> str:
    name = file.relative_to(ROOT).as_posix()
    if file.is_dir():
        return f"# {name}/\n\n" + "".join(f"- `{entry.name}`\n" for entry in sorted(file.iterdir()))
    if file.suffix == ".md":
        return file.read_text()
    return f"# {name}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}````\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site, and fill tables of names."""
    here = page.file.src_uri
    source = ROOT / here.removeprefix(f"{OUTSIDE}/") if here.startswith(f"{OUTSIDE}/") else DOCS / here

    def rewritten(found: re.Match[str]) -> str:
        link = found[1]
        if not link or "://" in link or link.startswith("#"):
            return found[0]
        path, mark, anchor = link.partition("#")
        target = file_of(source, path)
        if not target.is_relative_to(ROOT) or not target.exists():
            return link  # MkDocs warns of a link that leads nowhere
        return relpath(uri_of(target), Path(here).parent.as_posix()) + mark + anchor

    return NAMES.sub(lambda found: table_of(found[1]), LINK.sub(rewritten, markdown))


# ---- public names


def loaded() -> griffe.Module:
    """The package as griffe reads it, without importing it."""
    extensions = griffe.load_extensions(str(DOCS / "site" / "docstrings.py"))
    loader = griffe.GriffeLoader(
        extensions=extensions, search_paths=[ROOT / "python"], allow_inspection=False
    )
    package = loader.load("gossamer")
    loader.resolve_aliases(implicit=False)
    return package


PACKAGE = loaded()


def on_pre_build(config: MkDocsConfig) -> None:
    for problem in problems(shown_modules()):
        log.warning(problem)


def shown_modules() -> set[str]:
    """The modules whose names the pages of the API show."""
    pages = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    return {found[1] or found[2] for found in SHOWN.finditer(pages)}


def problems(shown: set[str]) -> list[str]:
    """What the public names lack: a page of the API for their module, or a docstring.

    The modules and packages directly in gossamer that have an __all__ are public. Deeper, the pages say what is.
    """
    found = [
        f"{module.path}: has an __all__ and is on no page; name it in docs/api/"
        for module in modules(PACKAGE)
        if module.exports is not None and module.parent is PACKAGE and module.path not in {*shown, *PRIVATE}
    ]
    for module in modules(PACKAGE):
        if module.path in shown:
            names = [name for name in public(module) if not documented(module, name)]
            names += [f"{name}.{method}" for name in public(module) for method in bare_methods(module, name)]
            found += [f"{module.path}.{name}: public, and has no docstring" for name in names]
    return found


def modules(package: griffe.Module) -> list[griffe.Module]:
    below = [member for member in package.members.values() if not member.is_alias and member.is_module]
    return [package, *[module for member in below for module in modules(member)]]


def public(module: Any) -> list[str]:
    if module.exports is not None:
        return [str(name) for name in module.exports]
    return [name for name, member in module.members.items() if member.is_public]


def documented(module: Any, name: str) -> bool:
    try:
        return module[name].docstring is not None
    except (KeyError, griffe.AliasResolutionError):
        return False


def bare_methods(module: Any, name: str) -> list[str]:
    """The public methods of a class that have no docstring, neither here nor in a base class.

    A class with a base outside the package, such as torch's, may override methods that are described there.
    """
    if not documented(module, name) or not module[name].is_class:
        return []
    classes = [module[name].final_target if module[name].is_alias else module[name], *module[name].mro()]
    if any(not known(cls) for cls in classes):
        return []
    described = {method for cls in classes for method, member in cls.members.items() if member.docstring}
    return [
        method
        for method, member in classes[0].members.items()
        if not member.is_alias and member.is_function and method not in described and method[0] != "_"
    ]


def known(cls: griffe.Class) -> bool:
    """Whether the package has every base of a class. ABC has no methods that a user calls."""
    asked = [base for base in cls.bases if str(base) != "ABC"]
    return len(asked) == len([base for base in cls.resolved_bases if base.is_class])


def inside(path: str) -> str:
    """A dotted path in the package, without the package's name."""
    return path.partition(".")[2]


def table_of(path: str) -> str:
    """The public names of a module as a table, with links to their entries and first sentences of their docstrings."""
    module: Any = PACKAGE[inside(path)] if inside(path) else PACKAGE
    rows = []
    for name in public(module):
        member = module[name]
        if not documented(module, name):
            continue  # warned of by problems()
        text = " ".join(member.docstring.value.split("\n\n")[0].split())
        sentence = re.split(r"(?<=[^.]\.) ", text)[0].replace("|", "\\|")
        rows.append(f"| [`{name}`][{member.canonical_path}] | {sentence} |")
    return "\n".join(["| name | what it is |", "|---|---|", *rows])
