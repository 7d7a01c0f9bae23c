# The repository's own rules, checked on the source text: layers, circles of imports, who reads the environment,
# names, header comments.

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests import ROOT

PACKAGE = ROOT / "python" / "gossamer"

# Lowest first: a component imports only from layers above its own in this list. Within a layer, nothing.
LAYERS = (
    {"errors", "signals", "_C", "torch_private", "stand_in"},
    {"_native", "config", "stores", "units"},
    {"membership", "late_entry", "mpi", "waiting"},
    {"_ops", "work", "observe", "runtime"},
    {"comm", "codec", "optim", "batchnorm"},
    {"collectives", "process_group", "topology", "autotune", "sampler"},
    {"facts"},
    {"engine"},
    {"algorithms"},
    {"data_parallel", "ddp", "fsdp", "hooks", "horovod", "bagua", "regroup"},
    {"lightning"},
    {"__init__"},
    {"workloads"},
    {"planner"},
    {"launch"},
    {"bench", "doctor"},
    {"netlab"},
    {"demo"},
    {"__main__"},
)
# Commands of a face: `python -m` runs them, and nothing imports them. The last one is imported at the first use of the
# name horovod.run.
COMMANDS = ("bagua.distributed.run", "bagua.distributed.launch", "horovod.runner")
LAYER_OF = {component: level for level, layer in enumerate(LAYERS) for component in layer}
# Files and folders of these packages are alternatives of one kind: they share base.py and know nothing of each other.
ALTERNATIVES = {"comm", "codec", "algorithms"}
VARIANTS = {
    ("algorithms.bytegrad", "algorithms.gradient_allreduce"),  # that algorithm with another default
    ("algorithms.zero_one_adam", "algorithms.qadam"),  # that algorithm with another schedule
    ("comm.hierarchical", "comm.c10d"),  # made of two such communicators
    ("comm.symmetric", "comm.c10d"),  # made around one such communicator
    ("comm.host_memory", "comm.c10d"),  # made around one such communicator and another one on the host
    ("comm.host_memory", "comm.symmetric"),  # asks what that asks of the GPUs, and goes another way
    ("comm.hierarchical", "comm.host_memory"),  # decides between both
    ("comm.hierarchical", "comm.symmetric"),  # and that
    ("comm.named", "comm.c10d"),  # opens several such communicators
    ("comm.named", "comm.hierarchical"),  # and one of these over several hosts
    ("comm.backend", "comm.c10d"),  # a group's codec has such a communicator
    ("comm.backend", "comm.hierarchical"),  # or one of these over several hosts
}

TORCH_FREE = ("adasum", "base", "codec", "flat", "kernels", "negotiate", "observe", "optim", "shm", "sparse")
NATIVE = (".cpp", ".cu", ".cuh", ".h", ".inl")
SOURCES = [
    path
    for folder in ("python", "csrc", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", *NATIVE)
]
SOURCES.append(ROOT / "setup.py")
MODULES = sorted(PACKAGE.rglob("*.py"))
CSRC = [path for path in SOURCES if ROOT / "csrc" in path.parents]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    """``codec.int8`` for python/gossamer/codec/int8.py, ``codec`` for its __init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


class _WithoutTypeChecking(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.If:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
        return node


def imports(path: Path, *, of_type_checkers: bool = True) -> Iterator[str]:
    """Modules of the package that a file imports, also inside functions, without the leading "gossamer."."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree if of_type_checkers else _WithoutTypeChecking().visit(tree)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "gossamer" or alias.name.startswith("gossamer."):
                    yield alias.name.removeprefix("gossamer").removeprefix(".") or "__init__"
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: imports are absolute"
            source = node.module or ""
            if source == "gossamer":
                yield from (alias.name if alias.name in LAYER_OF else "__init__" for alias in node.names)
            elif source.startswith("gossamer."):
                inner = source.removeprefix("gossamer.")
                for alias in node.names:
                    file = PACKAGE / inner.replace(".", "/") / alias.name
                    is_module = file.is_dir() or file.with_suffix(".py").exists()
                    yield f"{inner}.{alias.name}" if is_module else inner


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_module_imports_only_from_layers_below(path) -> None:
    own = module_name(path)
    component = "launch" if own in COMMANDS else own.split(".")[0]
    assert component in LAYER_OF, f"{name(path)}: give {component} a layer in tests/repository/test_repo.py"
    for imported in imports(path):
        target = imported.split(".")[0]
        if target == component:
            continue
        assert target in LAYER_OF, f"{name(path)} imports gossamer.{imported}, which has no layer"
        assert LAYER_OF[target] < LAYER_OF[component], (
            f"{name(path)} (layer of {component}) must not import gossamer.{imported}: not a layer below"
        )


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Paths that end where they begin. If the graph has circles, at least one is found."""
    done: set[str] = set()
    found = []

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for imported in sorted(graph.get(module, ())):
                visit(imported, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}}) == [["a", "b", "c", "a"]]


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count too, because they would hide a circle; imports for type checkers do not."""
    graph = {module_name(path): set(imports(path, of_type_checkers=False)) for path in MODULES}
    assert sum(map(len, graph.values())) > 500
    assert circles(graph) == []


def test_tests_lie_in_rooms() -> None:
    assert [
        name(path) for path in (ROOT / "tests").glob("*.py") if path.stem not in ("__init__", "conftest")
    ] == []
    rooms = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [name(room) for room in sorted(rooms) if not (room / "__init__.py").exists()] == [], (
        "its names may be taken"
    )


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_alternatives_of_one_kind_do_not_import_each_other(path) -> None:
    own = module_name(path)
    package, _, file = own.partition(".")
    if package not in ALTERNATIVES or not file:
        return  # __init__.py may import them
    for imported in imports(path):
        if not imported.startswith(package) or imported.split(".")[1:2] == own.split(".")[1:2]:
            continue
        assert imported == f"{package}.base" or (own, imported) in VARIANTS, (
            f"{name(path)} imports gossamer.{imported}; move what they share to {package}/base.py"
        )


WRITES_VARIABLES = PACKAGE / "horovod" / "common" / "util" / "__init__.py"  # only if a script asks for it


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_only_config_and_launch_read_the_environment(path) -> None:
    if path in (PACKAGE / "config.py", WRITES_VARIABLES) or PACKAGE / "launch" in path.parents:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
        brings = isinstance(node, ast.ImportFrom) and node.module == "os"
        hidden = brings and {alias.name for alias in node.names} & {"environ", "getenv", "environb"}
        assert not reads, f"{name(path)}:{node.lineno} reads the environment; config.py does that"
        assert not hidden, f"{name(path)}:{node.lineno} imports the environment; config.py reads it"


PRIVATE_TORCH = {PACKAGE / "torch_private.py", PACKAGE / "comm" / "c10d.py"}


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_only_two_files_use_private_names_of_torch(path) -> None:
    if path in PRIVATE_TORCH:
        return
    tree = ast.parse(path.read_text())
    torch_names = {"torch"}  # names of torch, or of its modules, in this file
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            torch_names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            torch_names |= {alias.asname for alias in node.names if alias.asname and alias.name in names}
        else:
            continue
        hidden = [each for each in names if re.search(r"\._(?!_)", each)]
        assert not hidden, f"{name(path)}:{node.lineno} imports {hidden}; torch_private.py is for that"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        chain = ast.unparse(node)
        if re.fullmatch(r"[\w.]+", chain) and chain.split(".")[0] in torch_names:
            hidden = [part for part in chain.split(".")[1:] if part.startswith("_") and part[:2] != "__"]
            assert not hidden, f"{name(path)}:{node.lineno} uses {chain}; torch_private.py is for that"


def test_native_code_reads_no_environment() -> None:
    readers = [name(path) for path in CSRC if re.search(r"\bgetenv\b", path.read_text())]
    assert readers == [], "native code takes options as arguments"


def test_the_ten_largest_files_are_printed(capsys) -> None:
    """No file is too large by its lines: one that has a second job is. The list says where to look first."""
    lines = {name(path): len(path.read_text().splitlines()) for path in SOURCES}
    with capsys.disabled():
        print("\nThe ten largest files:")
        for file in sorted(lines, key=lines.__getitem__, reverse=True)[:10]:
            print(f"{lines[file]:6} {file}")
    assert len(lines) > 500


@pytest.mark.parametrize(
    "path", [path for path in MODULES if PACKAGE / "lightning" in path.parents], ids=name
)
def test_file_of_the_lightning_face_only_translates(path) -> None:
    calls = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    moves = calls & {"all_to_all", "all_to_all_single", "reduce_scatter", "isend", "irecv", "send", "recv"}
    sums = (
        calls & {"all_reduce", "all_gather"}
        if path.name not in ("reductions.py", "fabric_strategy.py")
        else set()
    )
    assert not moves | sums, f"{name(path)}: faces translate arguments; what communicates is below"


def test_every_path_of_the_architecture_page_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = re.findall(r"`([\w./-]+(?:/|\.(?:py|h|cpp|inl)))`", text)
    tops = ("csrc/", "python/", "tests/")
    missing = [
        path
        for path in paths
        if not (ROOT / ("" if path.startswith(tops) else "python/gossamer") / path).exists()
    ]
    assert len(paths) > 60
    assert missing == []


def test_no_file_is_named_for_being_shared() -> None:
    assert [
        name(path) for path in SOURCES if path.stem in ("utils", "util", "common", "misc", "helpers")
    ] == []


@pytest.mark.parametrize("path", CSRC, ids=name)
def test_native_file_begins_with_a_comment_that_says_what_it_is(path) -> None:
    first = path.read_text().lstrip().splitlines()[0]
    assert first.startswith(("//", "/*")), f"{name(path)} begins with {first!r}"
    assert len(first) > 10, f"{name(path)}: {first!r} says nothing"


@pytest.mark.parametrize("path", CSRC, ids=name)
def test_torch_free_folders_include_no_torch_header(path) -> None:
    if path.relative_to(ROOT / "csrc").parts[0] not in TORCH_FREE:
        return
    included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(), re.MULTILINE)
    foreign = [header for header in included if header.startswith(("torch/", "ATen/", "c10/", "pybind11/"))]
    assert foreign == [], f"{name(path)} is Torch-free but includes {foreign}"


@pytest.mark.parametrize("path", CSRC, ids=name)
def test_only_the_bindings_include_headers_that_know_python(path) -> None:
    if path.relative_to(ROOT / "csrc").parts[0] == "python":
        return
    included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(), re.MULTILINE)
    known = (
        "Python.h",
        "pybind11/",
        "torch/extension.h",
        "torch/csrc/Exceptions.h",
        "torch/csrc/utils/",
        "python/",
    )
    foreign = [header for header in included if header.startswith(known) or "python" in header]
    assert foreign == [], f"{name(path)} is compiled without Python but includes {foreign}"
