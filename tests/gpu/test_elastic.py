"""gs.elastic with workers that share one GPU: over NCCL, over Gloo, and through memory of the host.

Run by `make gpu-check`.
"""

import pytest

from tests import ROOT
from tests.launch.test_plain_elastic import DILOCO, EXACT, averages, begin, ends, loop
from tests.support.gpu import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
]


@pytest.mark.parametrize(
    "way", [{}, {"backend": "gloo"}, {"group": "HostMemory"}], ids=["nccl", "gloo", "memory"]
)
@pytest.mark.parametrize("plan", [{}, {"local": DILOCO}], ids=["gradients", "diloco"])
def test_workers_whose_models_are_on_a_gpu_go_on_without_the_dead(start, tmp_path, plan, way) -> None:
    kill = {"1": [7, "backward"], "0": [12, "after"], "3": [17, "forward"]}
    script = ROOT / "tests" / "gpu" / "elastic.py"
    flags = ["--min-np", "1", "-np", "4"]
    run = begin(start, tmp_path, flags, script=script, device="cuda", kill=kill, **plan, **way)
    code, _, err = run.finish()
    assert code == 0, err
    assert err.count("was killed by signal 9 (SIGKILL)") == 3
    check = averages.check(tmp_path, period=4, outer=True) if plan else loop.check(tmp_path)
    assert check["worst"] < EXACT
    assert list(ends(tmp_path)) == [2]
