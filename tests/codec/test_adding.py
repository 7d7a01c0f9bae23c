# docs/adding-a-codec.md, followed in a copy of the repository: one header, one line of codec_list.h, one Python face.
# The copy takes over what `make build` has compiled, so that its build compiles only what the new codec changes.

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.recipes import follow, pytest_in

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


def build(copy: Path) -> None:
    """Builds the extension of the copy, with the objects that `make build` has left for unchanged files.

    Codecs are not optimized there: they take a tenth of the time to compile.
    """
    shutil.copytree(
        ROOT / "build", copy / "build", ignore=shutil.ignore_patterns("site", "benchmarks", "cpp*")
    )
    before, flags = (ROOT / "setup.py").read_text(), "*instruction_set(name)"
    setup = before.replace(flags, f"{flags}, *(['-O0'] if name.startswith('codec/') else [])")
    assert setup != before
    (copy / "setup.py").write_text(setup)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=copy, check=True)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_codec_added_as_the_page_says_is_one_of_all(tmp_path, start) -> None:
    if platform.machine() not in ("x86_64", "AMD64") or not (ROOT / "build" / "core").exists():
        pytest.skip("needs x86-64 and the objects of `make build`")
    named = follow("docs/adding-a-codec.md", tmp_path)
    assert set(named) == {
        "csrc/codec/ternary.h",
        "csrc/codec/codec_list.h",
        "python/gossamer/codec/ternary.py",
        "python/gossamer/codec/__init__.py",
        "docs/codecs.md",
    }
    build(tmp_path)
    printed = pytest_in(
        tmp_path, "tests/codec/test_facts.py", "tests/repository/test_repo.py", "-k", "ternary or codec"
    )
    found = re.search(r"(\d+) passed", printed)
    assert found
    assert int(found[1]) >= 30, printed
    code, _, err = start(["-c", TRIED], env={"PYTHONPATH": str(tmp_path / "python")}).finish()
    assert code == 0, err
