# The benchmarks run, and print the JSON lines that their readers expect. No figure that depends on time or memory is
# judged.

import json

import pytest

from tests import ROOT

FOLDER = ROOT / "benchmarks"
NAMES = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))
FIELDS = {
    "benchmark", "what", "value", "unit", "baseline", "baseline_value", "ratio", "at_least", "at_most", "target_of",
    "met", "command", "torch", "commit", "machine", "instruction_set", "load",
}  # fmt: skip
TIMELESS = {"error", "bytes", "determinism", "exactness"}  # figures that no load changes
PLOTS = {"allreduce": "build/benchmarks/allreduce.png"}

FRESH = {"powersgd"}  # started by a fresh interpreter, with fresh ranks, as a user starts them all


@pytest.mark.parametrize("name", NAMES)
def test_quick_run_prints_valid_results(name, tmp_path, start, fork) -> None:
    command = [str(FOLDER / f"bench_{name}.py"), "--quick"]
    code, out, err = (start if name in FRESH else fork)(command).finish()
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines, "no result"
    for line in lines:
        assert line.keys() >= FIELDS, FIELDS - line.keys()
        assert line["benchmark"] == name
        assert line["command"] == f"python benchmarks/bench_{name}.py --quick"
        assert (line["met"] is None) == (line["at_least"] is None and line["at_most"] is None)
        if name in TIMELESS:
            assert line["met"] is not False, f"{line['what']}: {line['value']}"
    assert any(line["met"] is not None for line in lines), "no target"
    assert name not in PLOTS or (tmp_path / PLOTS[name]).stat().st_size > 0


def test_run_all_names_every_benchmark() -> None:
    listed = (FOLDER / "run_all.py").read_text()
    assert [name for name in NAMES if f'"{name}"' not in listed] == []


def test_run_all_marks_missed_targets_and_fails_only_for_a_crash(tmp_path, start) -> None:
    runner = tmp_path / "run_all.py"
    runner.write_text((FOLDER / "run_all.py").read_text())
    line = {"what": "w", "value": 2.0, "unit": "s", "baseline": None, "baseline_value": None, "ratio": None}
    line |= {"at_least": None, "at_most": 1.0, "target_of": "value", "met": False, "load": 0.5}
    prints = f"print({json.dumps(line)!r})\n"
    (tmp_path / "bench_codec.py").write_text(prints)
    (tmp_path / "bench_error.py").write_text(prints + "raise SystemExit(3)\n")

    code, out, _ = start([str(runner), "codec"]).finish()
    assert code == 0
    assert json.loads(out.splitlines()[0]) == line
    assert "missed" in out

    code, out, err = start([str(runner), "codec", "error"]).finish()
    assert code == 1
    assert "2 results" in out
    assert "crashed: error" in err
