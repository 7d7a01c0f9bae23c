# The stall watch without processes: several models and ranks as threads, a store that does not answer or is gone, ranks
# that have died, how it reads an engine's state, its cost while nobody waits. With processes: test_stall.py.

import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gossamer as gs
from gossamer import _C
from gossamer.observe.stall import Limits, Watch
from gossamer.observe.stall import text as stall_text
from gossamer.observe.stall.notes import Notes
from gossamer.observe.stall.waits import BEFORE_BUCKETS, Wait, waits_of
from tests.support.ranks import run_ranks


def note(rank: int, **fields):
    other = {
        "asks": 1,
        "step": 5,
        "unit": "step",
        "waits": [],
        "late": False,
        "ended": "",
        "at": "train.py:3 in main",
    }
    return {**other, "host": stall_text.this_host(), "pid": os.getpid(), **fields}


def test_ranks_as_threads_with_two_models_each_name_the_one_that_is_late(
    monkeypatch, caplog, backend
) -> None:
    monkeypatch.setenv("GOSSAMER_STALL_WARNING_S", "0.4")

    def body(*comms):
        models = [gs.DataParallel(nn.Linear(3, 3), process_group=comm) for comm in comms]
        for model in models:
            if model is models[1] and comms[0].rank == 1:
                time.sleep(1.3)
            model(torch.ones(2, 3)).sum().backward()
        for model in models:
            model.close()

    with caplog.at_level(logging.WARNING, "gossamer"):
        run_ranks(3, body, groups=2)
    texts = [record.getMessage() for record in caplog.records]
    for rank in (0, 2):
        waits = [text for text in texts if f"rank {rank}/3 step 0: waits for other ranks" in text]
        assert any("not come: rank 1\n" in text and "in body" in text for text in waits), texts
    assert any("rank 1/3 step 0: waited for by" in text and "time.sleep(1.3)" in text for text in texts), (
        texts
    )
    assert not any("1/3 step 0: waits" in text or "has failed" in text for text in texts), texts


class Store:
    """Stands for an AsideStore, counts requests; `silent`: it answers nothing; `gone`: it fails."""

    def __init__(self, silent: bool = False, gone: bool = False) -> None:
        self.requests: list[str] = []
        self._store, self._silent, self._gone = _C.AsideStore(dist.HashStore()), silent, gone

    def __getattr__(self, name):
        def request(*arguments):
            self.requests.append(name)
            if self._silent:
                threading.Event().wait()
            if self._gone:
                raise dist.DistNetworkError("connection closed\nat line 5")
            return getattr(self._store, name)(*arguments)

        return request


def test_while_nobody_waits_a_look_is_one_short_request_and_no_note(monkeypatch) -> None:
    store = Store()
    monkeypatch.setattr(_C, "AsideStore", lambda store: store)
    notes = Notes(store, 0, 3, patience_s=1)
    notes.exchange(lambda asks: note(0, asks=asks), asking=False)
    assert store.requests == ["add", "set"], "who this rank is"
    store.requests.clear()
    for _ in range(3):
        notes.exchange(lambda asks: note(0, asks=asks), asking=False)
    assert store.requests == ["add"] * 3


def test_ranks_that_come_are_told_from_those_that_have_not_whatever_else_they_do() -> None:
    store = dist.HashStore()
    ranks = [Notes(store, rank, 6, patience_s=100) for rank in range(6)]
    for each in ranks:
        each.exchange(lambda asks: note(0, asks=asks), asking=False)
    wait = Wait("bucket 2 (grad, 6.3 MB)", 2, 0.0)
    says = [
        note(0, waits=[wait]),
        note(1, waits=[wait]),  # has come
        note(2, waits=[wait._replace(what="bucket 3", bucket=3)]),  # has come, and is further
        note(3, waits=[Wait("bucket 0", 0, 9.0)]),
        note(4, step=3),
        note(5),
    ]
    for _ in range(2):  # the second call reads what all have written
        for each, text in zip(ranks, says, strict=True):
            each.exchange(lambda asks, text=text: {**text, "asks": asks}, asking=each is ranks[0])
    assert ranks[0].missing(wait, 5) == [3, 4, 5]
    assert ranks[0].missing(Wait("the buffers of rank 0", BEFORE_BUCKETS, 0.0), 5) == [4, 5]
    fates = [ranks[0].fate(rank, 5) for rank in (3, 4, 5)]
    assert fates == [
        "rank 3 is at step 5 and waits itself, for 9 s: bucket 0",
        "rank 4 is at step 3, 2 behind, and in other code, at train.py:3 in main",
        "rank 5 is at step 5 and in other code, at train.py:3 in main",
    ]


def test_a_rank_that_has_died_is_told_from_one_that_is_silent() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    died = stall_text.silence(3, note(3, pid=process.pid), seconds=1, overdue=False)
    assert died == f"rank 3 has died; its process {process.pid} is gone"
    far = stall_text.silence(3, note(3, host="another"), seconds=20, overdue=True)
    assert "has not answered for 20 s; it has died or been stopped, or cannot reach the store" in far
    alive = stall_text.silence(3, note(3), seconds=20, overdue=True)
    assert "runs, but has closed this model, or something holds its interpreter" in alive
    assert stall_text.silence(3, None, seconds=1, overdue=False) == "rank 3 has not answered yet"


class Stuck:
    """Stands for an engine that has waited for bucket 1 since time 0."""

    step = 7

    def __init__(self) -> None:
        self.told: list[tuple[str, bool]] = []

    def activity(self):
        return [("wait", -1, 0.0), ("bucket", 1, 0.0), ("all_to_all", 1, 0.0)]

    def tell_stall(self, facts, stop):
        self.told.append((facts, stop))


class Clock:
    """A clock for a Watch, which then starts no threads."""

    now = 0.0

    def __init__(self) -> None:
        self.watches: list[Watch] = []

    def time(self):
        return self.now

    def add(self, watch):
        self.watches.append(watch)

    def hurry(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("gossamer.observe.stall.watch.time", clock)
    monkeypatch.setattr("gossamer.observe.stall.watch.threads", clock)
    return clock


@pytest.mark.parametrize(
    "store", [None, Store(silent=True), Store(gone=True)], ids=["none", "silent", "gone"]
)
def test_a_wait_is_told_and_ends_whether_or_not_a_store_answers(store, clock, monkeypatch, caplog) -> None:
    monkeypatch.setattr(_C, "AsideStore", lambda store: store)
    native, limits = Stuck(), Limits(warning_s=20, shutdown_s=32)
    watch = Watch(native, 0, 4, describe="bucket {} (grad, 6.3 MB)".format, store=store, limits=limits)
    clock.now = 30
    threading.Thread(target=watch.exchange, daemon=True).start()
    time.sleep(0.1)
    watch.look()
    (text,) = [record.getMessage() for record in caplog.records]
    assert "rank 0/4 step 7: waits for other ranks" in text
    assert "  bucket 1 (grad, 6.3 MB), in all_to_all: waits for 30 s; come: rank 0\n" in text
    hosted = "the group's store, which rank 0 or the launcher hosts, has "
    assert (
        f"which ranks have not come is not known: {'the group has no store' if store is None else hosted}"
        in text
    )
    clock.now = 35
    watch.look()
    assert [stop for _, stop in native.told] == [False, True]
    assert "stall_shutdown_s is 32" in native.told[-1][0]


def test_one_rank_alone_and_limits_of_0_are_not_watched(clock) -> None:
    for size, limits in ((1, Limits(60, 90)), (2, Limits(0, 0)), (2, Limits(0, 90))):
        Watch(Stuck(), 0, size, describe=str, store=None, limits=limits)
    assert [watch.tick_s for watch in clock.watches] == [5.0]


def test_a_stall_is_told_again_after_as_long_and_its_end_once(clock, caplog) -> None:
    native = Stuck()
    watch = Watch(native, 0, 2, describe=str, store=None, limits=Limits(warning_s=10, shutdown_s=0))
    for clock.now in (5, 11, 15, 19, 21, 25):
        watch.look()
    native.activity = list
    watch.look()
    watch.look()
    said = [record.getMessage().splitlines()[0] for record in caplog.records]
    waits = "gossamer: rank 0/2 step 7: waits for other ranks"
    assert said == [waits, waits, "gossamer: rank 0/2 goes on after 25 s"]
    assert native.told[-1] == ("", False)


def test_a_wait_in_a_forward_ends_with_what_is_known_of_it(clock) -> None:
    native = Stuck()
    watch = Watch(native, 0, 2, describe=str, store=None, limits=Limits(warning_s=1, shutdown_s=0))
    clock.now = 5

    def forward(error):
        with watch.waiting("the buffers of rank 0"):
            watch.look()
            raise error

    with pytest.raises(gs.CommError, match=r"rank 0/2 step 7: 1 has waited 5 s; .*: broken"):
        forward(gs.CommError("broken"))
    with pytest.raises(KeyError):
        forward(KeyError())


def test_what_an_engine_does_is_one_wait_for_each_bucket_and_task() -> None:
    activity = [
        ("wait", -1, 1.0),
        ("bucket", 0, 2.0),
        ("queued: bucket", 1, 3.0),
        ("queued: agreement", -1, 4.0),
        ("all_reduce", 0, 5.0),
        ("all_reduce", -1, 6.0),
    ]
    assert waits_of(activity, "bucket {}".format) == [
        Wait("bucket 0", 0, 2.0, "in all_reduce"),
        Wait("bucket 1", 1, 3.0, "queued"),
        Wait("agreement", -1, 4.0, "in all_reduce"),
    ]


def test_a_watch_that_fails_ends_with_a_word_and_the_others_go_on(caplog) -> None:
    class Broken(Stuck):
        def activity(self):
            raise TypeError("of this test")

    broken, whole = Broken(), Stuck()
    limits = Limits(warning_s=0.2, shutdown_s=0)
    watches = [Watch(native, 0, 2, describe=str, store=None, limits=limits) for native in (broken, whole)]
    until = time.monotonic() + 10
    while not whole.told and time.monotonic() < until:
        time.sleep(0.02)
    assert whole.told
    for watch in watches:
        watch.close()
    assert (
        sum("the stall watch of a model has failed" in record.getMessage() for record in caplog.records) >= 1
    )
