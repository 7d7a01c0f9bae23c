# The timeline: one valid trace of all ranks on one clock, even if ranks are missing; and the spans that a profiler
# sees. Jobs are processes, because a timeline belongs to a process.

import json
from collections import defaultdict

import pytest
import torch

import gossamer as gs
from gossamer import _C
from gossamer.observe import clocks, timeline
from tests.support.forks import fork_job
from tests.support.ranks import run_threads

JOB = """
import json, os, sys, time
import torch
from torch import nn
import gossamer as gs

path = sys.argv[1]
gs.init("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model = gs.DataParallel(model, optimizer, algorithm=gs.ByteGrad(), bucket_bytes=40_000, first_bucket_bytes=10_000)
batch = torch.randn(8, 64)

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

train(2)
gs.start_timeline(path + "first.json")
try:
    gs.start_timeline(path + "other.json")
except gs.ConfigError as error:
    assert "recorded already" in str(error), error
else:
    raise AssertionError("a second timeline began")
train(3)
written = gs.stop_timeline()
assert (str(written) == path + "first.json") == (gs.rank() == 0), written
assert gs.stop_timeline() is None
gs.start_timeline(path + "second.json", capacity=20)
train(3)
gs.stop_timeline()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    train(2)
names = {event.key for event in profile.key_averages()}
seen = {"gossamer::" + name for name in ("encode", "all_to_all", "reduce", "all_gather", "decode", "wait", "bucket")}
assert seen <= names, sorted(name for name in names if "gossamer" in name)
threads = {event.thread for event in profile.events() if event.name == "gossamer::encode"}
assert threads.isdisjoint(event.thread for event in profile.events() if event.name == "gossamer::wait")

gs.start_timeline(path + "dead.json")
train(2)
if gs.rank() == 1:
    os._exit(0)
begin = time.monotonic()
gs.stop_timeline(timeout_s=2)
assert time.monotonic() - begin < 8, time.monotonic() - begin  # on rank 2, rank 0 answers at once
os._exit(0)
"""


def events_of(path, ph="X"):
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == ph]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timeline")
    fork_job(JOB, 3, folder, f"{folder}/")
    return folder


def test_spans_of_a_thread_nest_and_tell_each_phase(traces) -> None:
    lanes = defaultdict(list)
    for event in events_of(traces / "first.json"):
        lanes[event["pid"], event["tid"]].append(event)
    assert {rank for rank, _ in lanes} == {0, 1, 2}
    assert len(lanes) == 6  # a main thread and a worker each
    for lane in lanes.values():
        lane.sort(key=lambda event: (event["ts"], -event["dur"]))
        ends: list[float] = []
        for event in lane:
            end = event["ts"] + event["dur"]
            while ends and ends[-1] <= event["ts"] + 1e-3:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3, event
            ends.append(end)
    for rank in range(3):
        main, worker = (
            {event["name"] for thread, events in lanes.items() if thread == (rank, tid) for event in events}
            for tid in sorted(tid for pid, tid in lanes if pid == rank)
        )
        assert {"wait", "optimizer SGD"} <= main
        phases = {"bucket", "gather", "encode", "all_to_all", "reduce", "all_gather", "decode", "agreement"}
        assert phases <= worker


def test_moments_say_which_gradient_and_which_bucket(traces) -> None:
    moments = events_of(traces / "first.json", "i")
    assert {"gradient 0.weight", "gradient 2.bias", "bucket queued"} <= {event["name"] for event in moments}
    queued = [event["args"] for event in moments if event["name"] == "bucket queued" and event["pid"] == 0]
    buckets = {args["bucket"] for args in queued}
    assert len(buckets) > 1
    assert len(queued) == 3 * len(buckets)  # of three steps
    assert all(args["bytes"] > 0 for args in queued)


def test_clocks_of_ranks_agree_where_they_meet(traces) -> None:
    spans = defaultdict(list)
    for event in events_of(traces / "first.json"):
        if event["name"] == "all_to_all":
            args = event["args"]
            spans[args["step"], args["bucket"]].append((event["ts"], event["ts"] + event["dur"]))
    assert spans
    for pair in spans.values():
        # Each waits for the others' data: on one clock all overlap.
        assert len(pair) == 3
        assert max(begin for begin, _ in pair) <= min(end for _, end in pair), pair
    about = json.loads((traces / "first.json").read_text())["otherData"]["ranks"]["1"]
    # Two processes of one host have one clock, so the true offset is 0: the measured interval must contain 0.
    assert abs(about["measured_offset_us"]) <= about["measured_uncertainty_us"]
    assert about["clock_uncertainty_us"] == 0


def test_a_full_ring_keeps_the_last_events_and_says_what_is_missing(traces) -> None:
    head = json.loads((traces / "second.json").read_text())["otherData"]
    assert [about["events"] for about in head["ranks"].values()] == [20, 20, 20]
    assert all(about["replaced_events"] > 20 for about in head["ranks"].values())
    assert not (traces / "other.json").exists()


def test_a_rank_that_died_is_named_and_the_others_are_written(traces) -> None:
    head = json.loads((traces / "dead.json").read_text())["otherData"]
    assert head["missing_ranks"] == [1]
    assert {event["pid"] for event in events_of(traces / "dead.json")} == {0, 2}


def test_the_variable_records_from_the_first_model_to_the_end_of_the_process(tmp_path, fork) -> None:
    script = "import gossamer as gs\nfrom torch import nn, ones\nmodel = gs.DataParallel(nn.Linear(2, 2))\n"
    script += "model(ones(1, 2)).sum().backward()\n"
    variable = {"GOSSAMER_TIMELINE": str(tmp_path / "trace.json"), "RANK": "0", "WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    script = "import gossamer as gs; gs.init()\n" + script
    code, _, err = fork(["-c", script], env=variable | address).finish()
    assert code == 0, err
    assert "bucket" in {event["name"] for event in events_of(tmp_path / "trace.json")}


@pytest.mark.parametrize(("true_offset", "same"), [(-5_000_000, False), (40, True)])
def test_the_shortest_round_trip_tells_the_offset(true_offset, same) -> None:
    # rank 0's clock is ahead by true_offset; one trip is short, and the others are held up on one way
    trips = [
        (sent, sent + true_offset + 100 + delay, sent + 200 + delay) for sent, delay in [(0, 900), (5000, 0)]
    ]
    clock = clocks.smallest(trips, same_clock=same)
    assert clock == (clocks.Clock(0, 0) if same else clocks.Clock(true_offset, 100))


def test_a_clock_that_is_seconds_off_is_measured_and_a_silent_rank_0_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(clocks, "CHUNK_BYTES", 100)  # several values of the store for a part
    events = [number**3 for number in range(500)]
    ahead_ns = 5_000_000_000  # of rank 1's clock
    store = torch.distributed.HashStore()

    def body(rank):
        group = clocks.TraceGroup(store, rank, 2)
        if rank == 0:
            return clocks.collect(group, "key", _C.now_ns, 20)
        return clocks.hand_over(group, "key", {"events": events}, lambda: _C.now_ns() + ahead_ns, 20)

    parts, handed_over = run_threads(2, body)
    assert handed_over
    clock = clocks.Clock(**parts[1]["clock"])
    assert abs(clock.offset_ns + ahead_ns) <= clock.uncertainty_ns < 1_000_000_000
    assert parts[1]["events"] == events
    assert not clocks.hand_over(clocks.TraceGroup(store, 1, 2), "other", {}, _C.now_ns, 0.2)


def test_without_rank_0_a_rank_writes_its_own_part(tmp_path) -> None:
    gs.start_timeline(tmp_path / "trace.json")
    assert timeline._running is not None
    timeline._running.group = clocks.TraceGroup(torch.distributed.HashStore(), 1, 2)
    assert gs.stop_timeline(timeout_s=0.1) == tmp_path / "trace.rank1.json"
    assert json.loads((tmp_path / "trace.rank1.json").read_text())["otherData"]["missing_ranks"] == [0]
    assert not _C.tracing()


def test_a_timeline_that_cannot_be_is_refused_before_anything_is_recorded(tmp_path) -> None:
    with pytest.raises(gs.ConfigError, match="must be a file that can be written, got .*nowhere"):
        gs.start_timeline(tmp_path / "nowhere" / "trace.json")
    with pytest.raises(gs.ConfigError, match="capacity must be at least 1 event, got 0"):
        gs.start_timeline(tmp_path / "trace.json", capacity=0)
    assert not _C.tracing()
    assert gs.stop_timeline() is None
