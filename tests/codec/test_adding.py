# docs/adding-a-codec.md, followed in a copy of the repository: one header, one line of codec_list.h, one Python face.
# Four files expand the list. They are compiled and linked with the objects that `make build` has left for the others.

import platform
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.support.recipes import follow, pytest_in

FLAGS = ["-O1", "-fPIC", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden"]
INSTRUCTION_SETS = {
    "cpu_avx2": ["-mavx2", "-mf16c", "-mfma"],
    "cpu_avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c"],
}
TRIED = """
import torch
import gossamer as gs
from gossamer.codec import CODECS

codec = CODECS["ternary"]()
x = torch.zeros(1, 64)
x[0, :4] = torch.tensor([2.0, -1.5, 0.9, -0.1])
assert codec.decode(codec.encode(x), torch.empty_like(x))[0, :5].tolist() == [2.0, -2.0, 0.0, 0.0, 0.0]
x[0, 9] = float("nan")
assert codec.decode(codec.encode(x), torch.empty_like(x)).isnan().all()

gs.init()
layer = torch.nn.Linear(100, 10)
model = gs.DataParallel(layer, algorithm=gs.GradientAllReduce(codec=gs.ErrorFeedback(codec)))
model(torch.ones(2, 100)).sum().backward()
model.close()
gs.shutdown()
"""


def objects() -> list[Path]:
    """What `make build` has compiled, without the files that expand the list of codecs."""
    tag = sysconfig.get_config_var("SOABI")
    folder = ROOT / "build" / f"{tag}-torch{torch.__version__}-cpu"
    found = [path for path in folder.rglob("*.o") if "precompiled" not in path.parts]
    return [path for path in found if path.parent.name != "codec"]


def link(copy: Path) -> None:
    """The extension of the copy: its own codecs, and the rest as it is."""
    own = []
    for source in sorted((copy / "csrc" / "codec").glob("*.cpp")):
        own.append(source.with_suffix(".o"))
        flags = [*FLAGS, *INSTRUCTION_SETS.get(source.stem, [])]
        subprocess.run(["g++", *flags, f"-I{copy / 'csrc'}", "-c", source, "-o", own[-1]], check=True)
    libraries = Path(torch.__file__).parent / "lib"
    (extension,) = (copy / "python" / "gossamer").glob("_C*.so")
    extension.unlink()
    names = ("c10", "torch", "torch_cpu", "torch_python")
    command = [
        "g++",
        "-shared",
        "-o",
        extension,
        *own,
        *objects(),
        f"-L{libraries}",
        f"-Wl,-rpath,{libraries}",
    ]
    subprocess.run([*command, *(f"-l{name}" for name in names)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_codec_added_as_the_page_says_is_one_of_all(tmp_path, start) -> None:
    if platform.machine() not in ("x86_64", "AMD64") or not objects():
        pytest.skip("needs x86-64 and the objects of `make build`")
    named = follow("docs/adding-a-codec.md", tmp_path)
    assert set(named) == {
        "csrc/codec/ternary.h",
        "csrc/codec/codec_list.h",
        "python/gossamer/codec/ternary.py",
        "python/gossamer/codec/__init__.py",
        "docs/codecs.md",
    }
    link(tmp_path)
    printed = pytest_in(
        tmp_path, "tests/codec/test_facts.py", "tests/repository/test_repo.py", "-k", "ternary or codec"
    )
    found = re.search(r"(\d+) passed", printed)
    assert found
    assert int(found[1]) >= 30, printed
    code, _, err = start(["-c", TRIED], env={"PYTHONPATH": str(tmp_path / "python")}).finish()
    assert code == 0, err
