# The stall watch with processes: a rank that waits too long says for which ranks, those ranks say where they are, and a
# wait that is to end ends on every rank. Ranks as threads, and single parts: test_stall_parts.py.

import json

from tests.engine.test_failures import printed_line, serve_store, start_worker

BEGIN = """
import json, logging, os, signal, sys, threading, time
import torch
import torch.distributed as dist
from torch import nn
import gossamer as gs

lines, told = [], {}
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(f"{record.levelname} {record.getMessage()}")
        if "rank 1 is at " in lines[-1]:
            store.set(f"{len(told)} told on {rank}", "")
        if "is stopped" in lines[-1]:
            store.set(f"stop told on {rank}", "")
logging.getLogger("gossamer").addHandler(Keep())
rank, size, port = (int(text) for text in sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gossamer", store=store, rank=rank, world_size=size)

def has_told(name, text):
    until = time.monotonic() + 10
    while not any(text in line for line in lines) and time.monotonic() < until:
        time.sleep(0.02)
    told[name] = "\\n".join(lines)
    lines.clear()

def oversleep(seconds):
    time.sleep(seconds)

def oversleep_until_told():
    others = [f"{len(told)} told on {peer}" for peer in (0, 2)]
    until = time.monotonic() + 20
    while not (store.check(others) and any("waited for by" in line for line in lines)) and time.monotonic() < until:
        oversleep(0.5)

def wrapped(face, **arguments):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return face(model, optimizer, **arguments) if face is gs.DataParallel else face(model), optimizer

def train(model, optimizer, steps, late=None):
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4)).square().sum()
        if step == late and rank == 1:
            oversleep_until_told()
        loss.backward()
        optimizer.step()
"""

WARNED = (
    BEGIN
    + """
mine = "waited for by" if rank == 1 else "not come: rank 1"
model, optimizer = wrapped(gs.DataParallel)
train(model, optimizer, 3, late=1)
has_told("backward", mine)

ddp, optimizer = wrapped(gs.DistributedDataParallel)
train(ddp, optimizer, 1)
if rank == 1:
    oversleep_until_told()
train(ddp, optimizer, 1)
has_told("forward", mine)

local, optimizer = wrapped(gs.DataParallel, algorithm=gs.LocalSGD(period=2))
train(local, optimizer, 2, late=1)
has_told("wait", mine)

linear = gs.DataParallel(nn.Linear(4, 4, bias=False))
processes = [None] * size
dist.all_gather_object(processes, os.getpid())
def wake():
    until = time.monotonic() + 20
    while not store.check(["stop told on 0", "stop told on 1"]) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(processes[2], signal.SIGCONT)
if rank == 0:
    threading.Thread(target=wake).start()
if rank == 2:
    time.sleep(1.5)  # the watch has looked at the model once
    os.kill(os.getpid(), signal.SIGSTOP)
linear(torch.full((1, 4), rank + 1.0)).sum().backward()
has_told("stopped", "rank 2/3" if rank == 2 else "is stopped")
assert linear.module.weight.grad.eq(2.0).all()
dist.barrier()
print(json.dumps(told))
for each in (model, ddp, local, linear):
    each.close()
"""
)

ENDED = (
    BEGIN
    + """
for backend in ("gossamer", "gloo"):
    group = dist.new_group(backend=backend)
    model = gs.DataParallel(nn.Linear(4, 4), process_group=group)
    begin = time.monotonic()
    try:
        for step in range(3):
            if step == 1 and rank == 1:
                oversleep(3.5)
            model(torch.ones(1, 4)).sum().backward()
    except gs.CommError as error:
        told[backend] = [str(error), time.monotonic() - begin, step]
    model.close()
    store.add(backend, 1)
    while store.add(backend, 0) < size:
        time.sleep(0.02)
print(json.dumps(told))
"""
)


def run(script, folder):
    """Runs the script on three ranks; returns what each has printed, as JSON."""
    file = folder / "worker.py"
    file.write_text(script)
    store = serve_store()
    workers = [start_worker(file, rank, 3, store.port) for rank in range(3)]
    try:
        ends = [worker.finish(120) for worker in workers]
    finally:
        for worker in workers:
            worker.end()
    for code, output, errors in ends:
        assert code == 0, output + errors
    return [json.loads(output.splitlines()[-1]) for _, output, _ in ends]


def test_who_waits_and_who_is_waited_for_tell_of_it_and_go_on(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GOSSAMER_STALL_WARNING_S", "1")
    told = run(WARNED, tmp_path)
    waits = {"backward": "bucket 0 (grad, ", "forward": "the buffers of rank 0", "wait": "step 2 bucket 0 "}
    for name, what in waits.items():
        for rank in (0, 2):
            text = told[rank][name]
            assert f"WARNING gossamer: rank {rank}/3 " in text, text
            assert f"  {what}" in text, text
            assert "come: ranks 0, 2; not come: rank 1" in text, text
            assert "rank 1 is at " in text, text
            assert "worker.py:" in text, text
            assert "in oversleep" in text, text
        text = told[1][name]
        assert "waited for by rank" in text, text
        assert what in text, text
        assert "time.sleep(seconds)" in text, text
    assert "goes on after" in "".join(told[0].values())
    for rank in (0, 1):
        assert "rank 2 is stopped; its process" in told[rank]["stopped"], told[rank]


def test_a_wait_that_is_to_end_is_an_error_on_every_rank(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GOSSAMER_STALL_WARNING_S", "1")
    monkeypatch.setenv("GOSSAMER_STALL_SHUTDOWN_S", "2")
    told = run(ENDED, tmp_path)
    for backend in ("gossamer", "gloo"):
        for rank in (0, 2):
            text, took_s, step = told[rank][backend]
            assert f"rank {rank}/3 step 1: bucket 0 (grad, 192 bytes) has waited " in text, text
            assert "for rank 1: rank 1 is at step 1 and in other code, at " in text, text
            assert step == 1
            assert took_s < 20, "the group's timeout is half an hour"
        assert any("stall_shutdown_s is 2" in told[rank][backend][0] for rank in (0, 2))
        text, _, step = told[1][backend]
        assert "waited for by rank" in text, text
        assert "stall_shutdown_s" in text, text
        assert step == 1, "the next time that it meets the others"


HOST = """
import sys, threading
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
threading.Event().wait(100)
"""

ENDING = """
import functools, os, signal, sys, time
import torch.distributed as dist
from gossamer.observe.stall.notes import Notes
from gossamer.observe.stall.threads import threads

port, host = (int(text) for text in sys.argv[1:])

class Watch:
    tick_s, looks = 0.01, 0
    notes = Notes(dist.TCPStore("127.0.0.1", port, is_master=False), 0, 2, patience_s=1)
    def look(self):
        pass
    def exchange(self):
        Watch.looks += 1
        self.notes.exchange(lambda asks: {"asks": asks}, asking=False)

class Late:
    def __del__(self, wake=functools.partial(os.kill, host, signal.SIGCONT), sleep=time.sleep):
        wake()  # the interpreter ends, and the globals have gone
        sleep(1)

watch, sys.modules["late"] = Watch(), Late()
threads.add(watch)
while watch.looks < 3:
    time.sleep(0.01)
os.kill(host, signal.SIGSTOP)
time.sleep(0.2)
"""


def test_a_process_ends_well_while_the_host_of_the_store_is_stopped(tmp_path) -> None:
    serving, ending = tmp_path / "host.py", tmp_path / "worker.py"
    serving.write_text(HOST)
    ending.write_text(ENDING)
    with (
        start_worker(serving) as host,
        start_worker(ending, int(printed_line(host)), host.process.pid) as worker,
    ):
        code, output, errors = worker.finish(60)
    assert code == 0, output + errors
