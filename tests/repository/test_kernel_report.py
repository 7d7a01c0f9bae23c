# What `make cuda-build` reports of kernels, and what makes it fail: on a log of ptxas and machine code of our own.

import os
import shutil
import subprocess
import sys

import pytest

from tests import ROOT

REPORT = ROOT / "cmake" / "kernel_report.py"
CODE = {
    "move_segments<float,128>": "LDG.E.128.CONSTANT R4, [R2] ;\nSTG.E.128 [R6], R4 ;",
    "sum_pieces<float, true>": "LDG.E.128 R4, [R2] ;\nSTG.E.128 [R6], R4 ;",
    "update_segments<float, Rule>": "LDG.E.128 R4, [R2] ;\nSTG.E.128 [R6], R4 ;",
    "encode_groups<32, TensorRows<Int8<float>, float>>": "LDG.E.128 R4, [R2] ;\nSTG.E.U8 [R6], R4 ;",
    "encode_groups<Lanes, SumOfRows<Int8<float>, Apart>>": "LDG.E.128 R4, [R2] ;\nSTG.E.128 [R6], R4 ;",
    "encode_groups<Lanes, SumOfRows<OneBit<float>, Apart>>": "LDG.E.U8 R4, [R2] ;",
    "decode_chunks<Int8<float>>": "STG.E.EF.128 [R6], R4 ;",
    "decode_add_chunks<Int8<float>>": "LDG.E.128 R4, [R2] ;\nSTG.E.128 [R6], R4 ;",
    "write_headers<Int8<float>>": "LDG.E R4, [R2] ;",
}
MACHINE_CODE = "#!/bin/sh\ncat <<'END'\n{}\nEND\n"


def ptxas(name, architecture, *, registers=40, spilled=0):
    return f"""ptxas info    : Compiling entry function '{name}' for '{architecture}'
ptxas info    : Function properties for {name}
    {8 if spilled else 0} bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers, 48 bytes smem
"""


@pytest.fixture
def report(tmp_path):
    """``report(log, code)`` runs the report on a build with this log, and this machine code by kernel."""
    if shutil.which("c++filt") is None:
        pytest.skip("no c++filt")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("csrc/flat/flat_cuda.cu", "csrc/flat/sum_cuda.cu", "build/core/flat/flat_cuda.cu.o"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).touch()

    def run(log, code=CODE):
        (tmp_path / "tree" / "build.log").write_text(log)
        text = "\n".join(f"\t\tFunction : {name.replace(' ', '')}\n{lines}" for name, lines in code.items())
        (tools / "cuobjdump").write_text(MACHINE_CODE.format(text))
        (tools / "cuobjdump").chmod(0o755)
        environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
        command = [sys.executable, str(REPORT), str(tmp_path / "tree")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    return run


FLAT = "[3/9] csrc/flat/flat_cuda.cu\n" + "".join(
    ptxas("move_segments<float,128>", name, registers=registers)
    for name, registers in (("sm_80", 30), ("sm_90", 34))
)
SUM = "[4/9] csrc/flat/sum_cuda.cu\n" + ptxas("sum_pieces<float,true>", "sm_90")


def test_the_report_has_each_template_and_what_earlier_builds_compiled(report, tmp_path) -> None:
    code, out, err = report(FLAT + SUM + "[5/9] csrc/flat/flat.cpp\n")
    assert (code, err) == (0, "")
    code, out, err = report(SUM)  # only this file has been compiled again
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines() if " sm_" in line and ":" not in line] == [
        ["move_segments", "sm_80", "1", "30-30", "0", "0", "48"],
        ["move_segments", "sm_90", "1", "34-34", "0", "0", "48"],
        ["sum_pieces", "sm_90", "1", "40-40", "0", "0", "48"],
    ]
    assert "7 kernels must have them, 0 findings" in out
    kernels = (tmp_path / "tree" / "kernels.txt").read_text()
    assert "sm_80 30 registers, 0 B stack, 0 B spilled, 48 B shared: move_segments<float,128>\n" in kernels


def test_a_spill_fails(report) -> None:
    code, _, err = report(FLAT + SUM + ptxas("sum_pieces<double,true>", "sm_90", spilled=8))
    assert code == 1
    assert "kernel_report: sum_pieces<double,true> for sm_90 spills" in err


@pytest.mark.parametrize(
    ("kernel", "lines", "words"),
    [
        ("decode_chunks<Int8<float>>", "STG.E.64 [R6], R4 ;", "decode_chunks<Int8<float>>: no 128-bit STG"),
        ("move_segments<float,128>", "STG.E.128 [R6], R4 ;", "move_segments<float,128>: no 128-bit LDG"),
        (
            "update_segments<float, Rule>",
            None,
            "WIDE names 'update_segments<float, ?', and no kernel is called so",
        ),
    ],
)
def test_a_kernel_that_lost_its_128_bit_accesses_fails(report, kernel, lines, words) -> None:
    code = {name: text for name, text in CODE.items() if name != kernel}
    status, _, err = report(FLAT, code if lines is None else code | {kernel: lines})
    assert status == 1
    assert words in err


def test_a_log_without_kernels_fails(report) -> None:
    code, _, err = report("[1/1] csrc/flat/flat.cpp\n")
    assert code == 1
    assert "the log names no kernel" in err
