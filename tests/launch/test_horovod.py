"""Unchanged Horovod scripts under `gossamer run --as-horovod`, the variables of the workers, and horovod.run()."""

import os
import re
import sys

import pytest

from gossamer import horovod
from gossamer.errors import CommError, ConfigError

RUN = ["-m", "gossamer.launch.cli", "run"]
SCRIPT = """
import multiprocessing, os, sys

try:
    import horovod.tensorflow as hvd
except ImportError as error:
    print("refused:", error)
import horovod
import horovod.torch as hvd
import torch

def child():
    import horovod.torch
    assert horovod.torch.__name__ == "gossamer.horovod.torch"

if __name__ == "__main__":
    hvd.init()
    if hvd.rank() == 0:
        process = multiprocessing.get_context("spawn").Process(target=child)
        process.start()
        process.join()
        print("child", process.exitcode)
    import gossamer.horovod.torch.mpi_ops
    import horovod.torch.mpi_ops
    assert sys.modules["horovod.torch.mpi_ops"] is gossamer.horovod.torch.mpi_ops
    assert horovod.torch.mpi_ops.__spec__.name == "gossamer.horovod.torch.mpi_ops"
    assert not any(name.startswith("gossamer.launch") for name in sys.modules)  # until it is asked for
    assert horovod.run.__module__ == "gossamer.launch.function"
    places = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert places == [int(os.environ["HOROVOD_" + name]) for name in names]
    print("sum", hvd.allreduce(torch.ones(3), op=hvd.Sum, name="x").tolist(), sys.argv[1:])
    hvd.shutdown()
"""


def test_an_unchanged_horovod_script_runs_and_its_children_find_horovod_too(start, tmp_path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "horovod.py").write_text("raise RuntimeError('the wrong horovod')")
    flags = [
        "-np",
        "2",
        "--gloo",
        "--as-horovod",
        "--output-filename",
        "out",
        "--prefix-output-with-timestamp",
    ]
    code, out, err = start([*RUN, *flags, "python", "-u", "train.py", "--lr", "1"]).finish()
    assert code == 0, err
    for rank in (0, 1):
        told = "sum [2.0, 2.0, 2.0] ['--lr', '1']\n"
        assert re.search(rf"^\d{{4}}-\d\d-\d\dT[\d:.+-]+ \[{rank}\] {re.escape(told)}", out, re.MULTILINE), (
            out
        )
        assert told in (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text()
    assert "[0] refused: horovod.tensorflow does not exist under `gossamer run --as-horovod`" in out
    assert "horovod.torch, horovod.torch.elastic, horovod.common and horovod.run" in out
    assert "[0] child 0" in out


def test_without_the_flag_nothing_is_called_horovod_and_programs_get_the_variables(fork, tmp_path) -> None:
    (tmp_path / "train.py").write_text("import os\nimport horovod")
    scripts = fork([*RUN, "train.py"])
    programs = fork(
        [*RUN, "-np", "1", "-H", "localhost:2", "--no-python", "printenv", "HOROVOD_SIZE", "HOROVOD_HOSTNAME"]
    )
    code, _, err = scripts.finish()
    assert code == 1
    assert err.splitlines()[-1] == "ModuleNotFoundError: No module named 'horovod'"
    code, out, err = programs.finish()
    assert code == 0, err
    assert out == "[0] 1\n[0] localhost\n"


@pytest.mark.usefixtures("forks_as_python")
def test_a_function_returns_its_results_by_rank_or_raises_and_leaves_the_environment(tmp_path) -> None:
    before = dict(os.environ)
    base = 100

    def work(number, *, twice):
        if number < 0:
            raise LookupError("a worker's own")
        if number == 0:
            os._exit(0)
        return base + number * int(os.environ["RANK"]), twice * 2, os.environ["OF_THE_WORKER"]

    found = horovod.run(work, (7,), {"twice": [1]}, num_proc=2, use_gloo=True, env={"OF_THE_WORKER": "a b"})
    assert found == [(100, [1, 1], "a b"), (107, [1, 1], "a b")]
    with pytest.raises(LookupError, match="a worker's own") as caught:
        horovod.run(work, (-1,), {"twice": 0}, np=1)
    assert "in work" in str(caught.value.__cause__)
    with pytest.raises(CommError, match="horovod.run: rank 0 ended before the function returned"):
        horovod.run(work, (0,), {"twice": 0}, np=1)
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_mpi": True}, "MPI does not start the workers, got use_mpi=True"),
        ({"min_np": 2}, "a function is not run elastically, got {'min_num_proc': 2}"),
        ({"num_proc": 0}, "num_proc must be at least 1, got 0"),
        ({"args": (sys._getframe(),)}, "must be such that cloudpickle takes them"),
    ],
)
def test_what_horovod_run_cannot_do_is_refused(arguments, message) -> None:
    if "cloudpickle" in message:
        pytest.importorskip("cloudpickle")
    with pytest.raises(ConfigError, match=re.escape(message)):
        horovod.run(print, **arguments)
