# The output of `gossamer run`: lines that several workers write in pieces come out whole, whatever stands before them.
# test_run.py does the same for all ways to start workers.

import sys
import threading

import pytest

from gossamer.launch.output import whole_lines

RUN = ["-m", "gossamer.launch.cli", "run"]
PIECES = """
import os, sys, time
rank = os.environ["RANK"]
for line in range(3):
    for stream in (sys.stdout, sys.stderr):
        for piece in ("line", " ", str(line), " of ", rank, "\\n"):
            print(piece, end="", file=stream, flush=True)
            time.sleep(0.06)
print("10 %", end="\\r")
print("20 %", end="\\r")
print("no end", end="", flush=True)
time.sleep(0.3)
"""
LINES = ["line 0 of {}", "line 1 of {}", "line 2 of {}"]
BARS = ["10 %", "20 %", "no end"]
TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


@pytest.mark.parametrize(
    ("flags", "env", "header"),
    [
        (["-np", "2", "--role", "w-1"], {TEMPLATE: "${role_name}.${rank}/${local_rank}: "}, "w-1.{0}/{0}: "),
        (["-np", "2", "--tee", "3"], {}, "[default{}]:"),
        (["-np", "2", "--output-filename", "out"], {}, "[{}] "),
    ],
)
def test_lines_that_are_written_in_pieces_stay_whole_with_files_and_headers_of_others(
    fork, tmp_path, flags, env, header
) -> None:
    (tmp_path / "train.py").write_text(PIECES)
    code, out, err = fork([*RUN, *flags, "train.py"], env=env).finish()
    assert code == 0, err
    for rank in "01":
        begin = header.format(rank)
        for text, lines in ((out, LINES + BARS), (err, LINES)):
            shown = [line for line in text.splitlines() if line.startswith(begin)]
            assert shown == [begin + line.format(rank) for line in lines], text
    assert len(out.splitlines()) == 2 * len(LINES + BARS)
    for file in (tmp_path / "out").glob("rank.*/stdout"):
        rank = file.parent.name[-1]
        assert file.read_text() == "".join(f"{line.format(rank)}\n" for line in LINES + BARS)


def test_a_whole_line_is_shown_while_its_worker_still_runs(fork, tmp_path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\nprint('begun')\nwhile not os.path.exists('seen'): time.sleep(0.05)\n"
    )
    run = fork([*RUN, "-np", "1", "train.py"])
    assert run.process.stdout.readline() == "[0] begun\n"
    (tmp_path / "seen").touch()
    code, out, err = run.finish()
    assert (code, out) == (0, ""), err


def test_the_rest_of_a_worker_that_has_ended_comes_before_the_next_line(capsys) -> None:
    with whole_lines():
        worker = threading.Thread(target=sys.stdout.write, args=("[1] cut",))
        worker.start()
        worker.join()
        print("[0] next")
        print("[0] begun", end="")
    assert capsys.readouterr().out == "[1] cut\n[0] next\n[0] begun\n"
