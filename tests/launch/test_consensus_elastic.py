# gs.elastic where the ranks exchange weights or momenta in every step: the Adam family, and averaging with peers.

import signal
from functools import partial

import pytest
import torch

import gossamer as gs
from tests.launch.test_plain_elastic import (
    ALL_COME_AGAIN,
    EXACT,
    begin,
    ends,
    lines_of,
    loop,
    wait_for,
    wait_until,
)
from tests.launch.test_uneven_elastic import times_drawn

# With exact codecs all ranks together train as one does by the same optimizer on the mean of the gradients.
ADAMS = {"qadam": {"adam": "qadam", "codec": "exact"}, "0/1": {"adam": "zero_one_adam", "codec": "exact"}}
PEERS = {
    "all": {"peers": {}},
    "one peer": {"peers": {"topology": "one_peer_exponential", "interval": 2}},
    "differences": {"peers": {"low": True}},
}


def checked(folder, plan) -> dict[str, float]:
    """What the replay of a run says."""
    exact = plan.get("codec") == "exact"
    return loop.check(folder, exact=exact, adam=plan.get("adam"), apart="peers" in plan)


@pytest.mark.parametrize(
    "plan",
    [
        *({**plan, "backend": "gloo"} for plan in ADAMS.values()),
        *ADAMS.values(),
        {"adam": "onebit_adam"},
        *PEERS.values(),
    ],
    ids=["qadam gloo", "0/1 gloo", *ADAMS, "1 bit", *PEERS],
)
def test_steps_end_without_the_dead_and_without_an_error(fork, tmp_path, plan) -> None:
    kill = {"1": [7, "backward"], "0": [12, "after"], "3": [17, "forward"]}
    code, _, err = begin(fork, tmp_path, ["--min-np", "1", "-np", "4"], kill=kill, **plan).finish()
    assert code == 0, err
    assert err.count("was killed by signal 9 (SIGKILL)") == 3
    result = checked(tmp_path, plan)
    assert result["worst"] < EXACT
    assert result["steps"] > 18
    assert list(ends(tmp_path)) == [2]
    assert len(times_drawn(tmp_path)) >= loop.SAMPLES - 3 * loop.BATCH, (
        "it does what the dead have left of the epoch"
    )


@pytest.mark.parametrize("plan", [*ADAMS.values(), PEERS["differences"]], ids=[*ADAMS, "differences"])
def test_a_newcomer_takes_everything_from_the_others(fork, tmp_path, plan) -> None:
    flags = ["--min-np", "1", "--max-np", "3", *ALL_COME_AGAIN]
    kill = {"1": [8, "after"], "0": [14, "backward"]}
    run = begin(fork, tmp_path, flags, epochs=10**6, kill=kill, sleep_s=0.02, **plan)
    wait_for(tmp_path, lambda line: line.get("size") == 2)
    for number in (3, 4):
        wait_until(partial(lines_of, tmp_path, number, "step"))
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.finish()
    assert code == 0, err
    result = checked(tmp_path, plan)
    assert result["worst"] < EXACT
    assert {end["saved"] for end in ends(tmp_path).values()} == {result["steps"]}
    lines = [line for own in loop.journals(tmp_path).values() for line in own]
    copied = {number: line["copied"] for line in lines if "new" in line for number in line["new"]}
    assert copied[4] == (plan is not ADAMS["0/1"]), "while the others trained"
    for number in (3, 4):
        begun = next(line for line in loop.journals(tmp_path)[number] if "begin" in line)
        assert begun["begin"] == begun["total"] > 7, "the counter that the script gave comes along"


@pytest.mark.parametrize("plan", ADAMS.values(), ids=ADAMS)
def test_a_rank_that_lacks_the_momenta_of_a_step_takes_them_from_one_that_has_them(
    fork, tmp_path, plan
) -> None:
    losses = {"kill": {"1": [9, "stepped"]}, "misses": {"0": 9}}
    code, _, err = begin(fork, tmp_path, ["--min-np", "1", "-np", "3"], **losses, **plan).finish()
    assert code == 0, err
    assert checked(tmp_path, plan)["worst"] < EXACT
    of_step = {
        number: next(line for line in own if line.get("step") == 9)
        for number, own in loop.journals(tmp_path).items()
        if number != 1
    }
    assert of_step[0]["alone"]
    assert not of_step[2]["alone"]
    assert of_step[0]["bits"] != of_step[2]["bits"]


@pytest.mark.usefixtures("group_of_one")
def test_a_step_whose_momenta_are_lost_on_the_way_is_made_of_the_ranks_own(monkeypatch) -> None:
    def lose(self, bucket, field, **_) -> None:
        if bucket.index == 1:  # the first one has been averaged then, and later ones are not sent
            bucket.flat(field).fill_(7.0)
            bucket.flat("error").fill_(7.0)
            raise gs.CommError("a rank is gone")

    nets = [loop.build(3, "qadam") for _ in range(2)]
    inputs = torch.randn(loop.WARMUP_STEPS + 1, 8, loop.FEATURES, dtype=torch.float64)
    (net, optimizer), (plain, alone) = nets
    algorithm = gs.QAdam()
    model = gs.DataParallel(net, optimizer, algorithm=algorithm, bucket_bytes=600, first_bucket_bytes=200)
    assert len(model.engine.buckets) > 2
    algorithm.survive_losses()
    model.engine.forgive_in_steps(lambda error: "a rank is gone" in str(error))
    monkeypatch.setattr(gs.QAdam, "reduce_field", lose)
    for x in inputs:
        for module, each in ((model, optimizer), (plain, alone)):
            each.zero_grad()
            module(x).square().mean().backward()
            each.step()
    assert all(torch.equal(*pair) for pair in zip(net.parameters(), plain.parameters(), strict=True))
    assert not any(bucket.flat("error").any() for bucket in model.engine.buckets)
    model.close()
