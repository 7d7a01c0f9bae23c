"""The steps of `make gpu-check` and the commands of each; gpu_check.py runs them.

A step makes its commands when its turn comes, because they name what earlier steps have built.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from gpu_running import Command

SKIPPED = "needs a GPU and a build of gossamer with CUDA|no CUDA device"  # what tests say that find neither
CUDA_TESTS = Path("tests/cpp/cuda")
PROGRAM = "gpu_tests"
TOO_LONG = ("ForEveryShape", "ForEveryTail")  # with a sanitizer
BENCHMARKS = {"codec": 180, "flat": 60, "optim": 60, "step": 240}  # limits in seconds
SYMMETRIC = ("test_symmetric", "test_host_memory")
NCCL = ("test_nccl", "test_nccl_process_group")
RULES = ("test_nccl_rules",)
Step = Callable[[Path], Iterator[Command]]


def build(root: Path) -> Iterator[Command]:
    """The extension for this GPU, and the tests of its kernels. No limit: nothing works without them."""
    for module in (root / "python/gossamer").glob("_C*.so"):  # a failed build must not leave an old one
        module.unlink()
    yield Command(
        "build extension",
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        environment={"GOSSAMER_BUILD_CUDA": "1", "TORCH_CUDA_ARCH_LIST": architectures()},
    )
    program, objects = root / PROGRAM, core_objects(root)
    programs = sorted((root / CUDA_TESTS).glob("test_*.cpp"))
    headers = [path for folder in ("csrc", "tests/cpp") for path in (root / folder).rglob("*.h")]
    inputs = [*objects, *programs, *headers]
    if program.exists() and program.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return
    program.unlink(missing_ok=True)
    folders = [f"-I{root / name}" for name in ("csrc", "tests/cpp", CUDA_TESTS / "without_googletest")]
    yield Command(
        "build kernel tests",
        ["nvcc", "-std=c++17", "-O1", *folders, *map(str, [*programs, *objects]), "-o", PROGRAM],
    )


def rules(root: Path) -> Iterator[Command]:
    """What NCCL, streams and graphs want. First, because it has not run on a GPU yet."""
    yield from tests_named(root, RULES, 240)


def kernels(root: Path) -> Iterator[Command]:
    """The kernels against the scalar CPU code: each C++ test in a process of its own."""
    for name in kernel_tests(root):
        yield Command(f"kernels {name}", [f"./{PROGRAM}", name], 120, must_say="1 tests, 0 failed, 0 skipped")


def bench(root: Path) -> Iterator[Command]:
    """The kernels against a plain form and a copy, then a whole training step against DDP and its fp16 hook."""
    for name, limit_s in BENCHMARKS.items():
        yield benchmark(name, limit_s)


def ranks(root: Path) -> Iterator[Command]:
    """The tests marked gpu: equal bytes on CPU and CUDA, and several ranks on one GPU over Gloo."""
    parallel = ["-n", "4"] if importlib.util.find_spec("xdist") else []
    for file in gpu_tests(root):
        if file.stem not in (*SYMMETRIC, *NCCL, *RULES):
            yield python_tests(file, 240, *parallel)


def symmetric(root: Path) -> Iterator[Command]:
    """Ranks that read each other's buckets on the device, or through host memory, and what that takes."""
    yield from tests_named(root, SYMMETRIC, 300)
    yield benchmark("symmetric", 120)


def nccl(root: Path) -> Iterator[Command]:
    """NCCL with two ranks on one GPU: only that it works."""
    yield from tests_named(root, NCCL, 300)


def sanitizer(root: Path) -> Iterator[Command]:
    """The C++ tests once more under compute-sanitizer, where it is there and knows the GPU."""
    clean = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": r"\(0 errors, 0 warnings\)"}
    clean["synccheck"] = "ERROR SUMMARY: 0 errors"
    for tool, words in clean.items():
        for name in kernel_tests(root):
            if not name.endswith(TOO_LONG):
                yield Command(
                    f"sanitizer {tool} {name}",
                    ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", f"./{PROGRAM}", name],
                    150,
                    must_say=words,
                    must_not_say=r"\bFAILED\b|\bSKIPPED\b",
                    excused_by="Device not supported|is not on this machine",
                )


STEPS: dict[str, Step] = {
    step.__name__: step for step in (build, rules, kernels, bench, ranks, symmetric, nccl, sanitizer)
}


def benchmark(name: str, limit_s: float) -> Command:
    return Command(
        f"bench {name}",
        [sys.executable, f"benchmarks/bench_{name}.py", "--gpu"],
        limit_s,
        must_say='^{"benchmark"|\n{"benchmark"',
        alone=True,
    )


def tests_named(root: Path, names: tuple[str, ...], limit_s: float) -> Iterator[Command]:
    for file in gpu_tests(root):
        if file.stem in names:
            yield python_tests(file, limit_s)


def python_tests(file: Path, limit_s: float, *options: str) -> Command:
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-v",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=150",
    ]
    return Command(
        f"pytest {file}",
        [*pytest, *options, str(file)],
        limit_s,
        must_say=r"\d+ passed",
        must_not_say=SKIPPED,
    )


def gpu_tests(root: Path) -> list[Path]:
    """Returns the Python files that have tests for GPUs, relative to `root`."""
    files = sorted((root / "tests").rglob("test_*.py"))
    mark = re.compile(r"^\s*@?pytest\.mark\.gpu\b", re.MULTILINE)
    return [file.relative_to(root) for file in files if mark.search(file.read_text())]


def kernel_tests(root: Path) -> list[str]:
    """Returns the names of the C++ tests."""
    listing = [f"./{PROGRAM}", "--list"]
    return subprocess.run(
        listing, cwd=root, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()


def core_objects(root: Path) -> list[Path]:
    """Returns the objects of the Torch-free code, which the latest ninja file with CUDA names."""
    file = max((root / "build").glob("*-cuda-*.ninja"), key=lambda path: path.stat().st_mtime)
    return [
        root / path for path in re.findall(r"^build (build/core/\S+\.o):", file.read_text(), re.MULTILINE)
    ]


def architectures() -> str:
    """Returns the compute capabilities of the GPUs, in the form of TORCH_CUDA_ARCH_LIST."""
    return ";".join(sorted(set(query("compute_cap"))))


def query(*names: str) -> list[str]:
    """Asks nvidia-smi for properties of the GPUs; a line for each GPU."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()


def machine(commit: str) -> str:
    """Returns the first line of a run: what is checked, and on what."""
    properties = [
        "name",
        "driver_version",
        "clocks.sm",
        "clocks.max.sm",
        "clocks.mem",
        "power.limit",
        "memory.total",
    ]
    gpus = "; ".join(query(*properties))
    release = re.search(
        r"release ([\d.]+)",
        subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout,
    )
    return (
        f"gpu-check: commit {commit}; GPU (name, driver, SM clock now and at most, memory clock, power limit, memory): "
        f"{gpus}; nvcc {release[1] if release else 'of unknown release'}; {torch_facts()}"
    )


def torch_facts() -> str:
    """Returns torch's version and what it sees, from a process of its own: this one stays off the GPU."""
    code = (
        "import os, platform, torch; gpu = torch.cuda.is_available(); "
        "nccl = '.'.join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else 'none'; "
        "print(f'torch {torch.__version__} with NCCL {nccl}', 'sees the GPU' if gpu else 'sees no GPU',"
        " f'Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores', sep='; ')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or f"torch does not import: {done.stderr.strip().splitlines()[-1]}"


def missing_tools() -> list[str]:
    """Returns the tools that a run needs and that are not on PATH."""
    return [tool for tool in ("nvcc", "nvidia-smi") if shutil.which(tool) is None]
