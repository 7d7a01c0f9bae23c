# States, samplers and the loop of elastic training in one process: what is saved, restored and called, and when.

import copy
import pickle

import pytest
import torch

import gossamer.horovod.torch as hvd
from gossamer.errors import CommError
from gossamer.horovod.common.elastic import HostUpdateResult, ObjectState, State, run_fn
from gossamer.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from gossamer.horovod.torch.elastic import sampler as sampler_module
from gossamer.horovod.torch.elastic import state as state_module
from gossamer.horovod.torch.elastic.sampler import ElasticSampler
from gossamer.horovod.torch.elastic.state import StateHandler, TorchState


@pytest.fixture(scope="module")
def alone():
    hvd.init()
    yield
    hvd.shutdown()


def object_state(**kwargs) -> ObjectState:
    return ObjectState(lambda x: pickle.loads(pickle.dumps(x)), lambda: 0, **kwargs)


def place(monkeypatch, rank: int, size: int) -> None:
    monkeypatch.setattr(sampler_module, "rank", lambda: rank)
    monkeypatch.setattr(sampler_module, "size", lambda: size)


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(state) -> None:
    state.optimizer.zero_grad()
    state.model(torch.ones(4, 3)).square().sum().backward()
    state.optimizer.step()


def test_objects_go_back_to_what_they_were_at_the_last_save() -> None:
    state = object_state(epoch=1, history=[1])
    state.epoch = 2
    state.history.append(2)
    state.restore()
    assert (state.epoch, state.history) == (1, [1])
    state.history.append(3)
    state.save()
    state.history.append(4)
    state.restore()
    state.history.append(5)
    state.restore()
    assert state.history == [1, 3], "changes inside an object are undone too, as often as it is restored"


def test_objects_are_taken_from_rank_0_and_saved() -> None:
    state = ObjectState(
        lambda found: {"epoch": 7, "history": [found["epoch"]]}, lambda: 1, epoch=1, history=[]
    )
    state.sync()
    assert (state.epoch, state.history) == (7, [1])
    state.epoch = 9
    state.restore()
    assert state.epoch == 7


def test_commit_saves_and_then_lets_in_who_waits() -> None:
    state = object_state(epoch=0)
    state.epoch = 1
    state.commit()
    state.on_hosts_updated(1.0, HostUpdateResult.added)
    state.epoch = 2
    with pytest.raises(HostsUpdatedInterrupt) as added:
        state.commit()
    assert not added.value.skip_sync
    state.epoch = 3
    state.restore()
    assert state.epoch == 2
    state.on_hosts_updated(1.0, HostUpdateResult.added)  # seen already
    state.commit()
    state.on_hosts_updated(2.0, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as removed:
        state.check_host_updates()
    assert removed.value.skip_sync
    state.on_hosts_updated(3.0, HostUpdateResult.removed)
    state.on_hosts_updated(4.0, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt) as both:
        state.check_host_updates()
    assert not both.value.skip_sync


def test_a_reset_forgets_updates_and_calls_back_in_order() -> None:
    state = object_state()
    called: list[str] = []
    state.register_reset_callbacks([lambda: called.append("a"), lambda: called.append("b")])
    state.on_hosts_updated(1.0, HostUpdateResult.added)
    state.on_reset()
    state.check_host_updates()
    assert called == ["a", "b"]


def test_a_state_must_say_how_it_is_kept() -> None:
    state = State(lambda x: x, lambda: 0)
    for what in (state.save, state.restore, state.sync):
        with pytest.raises(NotImplementedError, match="a state must say"):
            what()


@pytest.mark.parametrize("error", [HorovodInternalError("lost"), CommError("lost")])
def test_the_loop_restores_after_an_error_and_begins_with_a_sync(error) -> None:
    calls: list[str] = []
    state = object_state(step=0)
    state.sync = lambda: calls.append("sync")
    state.register_reset_callbacks([lambda: calls.append("callback")])

    def train(state, extra, *, word):
        calls.append(f"train {state.step} {extra} {word}")
        state.step += 5
        if len(calls) < 6:
            raise error
        return "done"

    assert run_fn(train, lambda: calls.append("reset"))(state, 1, word="x") == "done"
    again = ["reset", "callback", "sync", "train 0 1 x"]
    assert calls == ["sync", "train 0 1 x", *again]


def test_the_loop_keeps_the_state_when_hosts_change_and_syncs_without_an_agreement() -> None:
    calls: list[str] = []
    state = object_state(step=0)
    state.sync = lambda: calls.append("sync")

    def train(state):
        state.step += 5
        if state.step < 10:
            raise HostsUpdatedInterrupt(skip_sync=True)
        return state.step

    assert run_fn(train, lambda: calls.append("reset"))(state) == 10
    assert calls == ["sync", "reset", "sync"], "one process cannot know what the others do"


def test_other_exceptions_pass_through_the_loop() -> None:
    def train(state):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_fn(train, lambda: pytest.fail("no reset"))(object_state())


def test_model_and_optimizer_go_back_to_the_last_commit(alone) -> None:
    model, optimizer = model_and_optimizer()
    state = TorchState(model=model, optimizer=optimizer, batch=0)
    assert state.model is model
    assert state.optimizer is optimizer
    step(state)
    state.batch = 1
    state.commit()
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for _ in range(2):
        for _ in range(2):
            step(state)
        state.batch = 3
        state.restore()
        torch.testing.assert_close(dict(model.state_dict()), dict(kept[0]), rtol=0, atol=0)
        assert optimizer.state_dict()["state"][0]["step"] == kept[1]["state"][0]["step"]
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], kept[1]["state"][0]["exp_avg"])
        assert state.batch == 1
    state.sync()
    assert state.batch == 1


def test_another_model_may_take_the_place_of_the_first(alone) -> None:
    model, optimizer = model_and_optimizer()
    state = TorchState(model=model, optimizer=optimizer)
    other = torch.nn.Linear(1, 1)
    state.model = other
    weight = other.weight.detach().clone()
    with torch.no_grad():
        other.weight.add_(1)
    state.restore()
    assert state.model is other
    assert torch.equal(other.weight, weight)


def test_more_models_and_samplers_have_handlers_by_their_class(alone) -> None:
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    sampler = ElasticSampler(range(10), shuffle=False)
    state = TorchState(generator=first, critic=second, sampler=sampler, epoch=0)
    sampler.record_batch(0, 4)
    state.commit()
    sampler.record_batch(1, 4)
    with torch.no_grad():
        second.weight.fill_(5)
    state.restore()
    assert sampler.processed_num == 4
    assert list(sampler) == [4, 5, 6, 7, 8, 9]
    assert second.weight.item() != 5
    sampler.record_batch(0, 4)
    state.sync()
    assert list(sampler) == [8, 9]
    state.restore()
    assert sampler.processed_num == 8


def test_the_registry_of_handlers_can_be_extended(alone) -> None:
    class Counter:
        value = 0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, found):
            self.value = found["value"]

    class CounterHandler(StateHandler):
        def sync(self) -> None:
            self.save()

    before = state_module.get_handler_registry()
    state_module.set_handler_registry([(Counter, CounterHandler), *before])
    try:
        counter = Counter()
        state = TorchState(counter=counter)
        counter.value = 3
        state.restore()
        assert counter.value == 0
        assert state.counter is counter
    finally:
        state_module.set_handler_registry(before)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("length", "before", "after"), [(23, 4, 3), (24, 2, 3), (10, 3, 1), (5, 1, 4)])
def test_what_is_left_of_an_epoch_is_divided_anew(monkeypatch, shuffle, length, before, after) -> None:
    done: list[int] = []
    for rank in range(before):
        place(monkeypatch, rank, before)
        sampler = ElasticSampler(range(length), shuffle=shuffle, seed=3)
        sampler.set_epoch(2)
        assert len(list(sampler)) == len(sampler) == -(-length // before)
        done += sampler.get_indices(0, 1)
        sampler.record_batch(0, 1)
    assert len(set(done)) == before
    state = sampler.state_dict()
    assert state == {"epoch": 2, "processed_num": before}
    left: list[int] = []
    for rank in range(after):
        place(monkeypatch, rank, after)
        sampler = ElasticSampler(range(length), shuffle=shuffle, seed=3)
        sampler.load_state_dict(state)
        left += list(sampler)
    assert set(left) == set(range(length)) - set(done)
    assert len(left) - len(set(left)) < after, "only as many twice as fill the last round"
    sampler.set_epoch(3)
    assert len(sampler) == -(-length // after)


def test_an_epoch_may_end_with_nothing_left(monkeypatch) -> None:
    place(monkeypatch, 0, 2)
    sampler = ElasticSampler(range(4), shuffle=False)
    sampler.record_indices(list(sampler))
    sampler.reset()
    assert (list(sampler), len(sampler)) == ([], 0)


def test_order_is_the_seeds_and_the_epochs(monkeypatch) -> None:
    place(monkeypatch, 0, 1)
    one, other = ElasticSampler(range(50), seed=1), ElasticSampler(range(50), seed=2)
    first = list(one)
    assert first != list(range(50))
    assert first != list(other)
    one.set_epoch(1)
    assert list(one) != first
    one.set_epoch(0)
    assert list(one) == first


def test_a_new_division_of_an_epoch_shuffles_nothing_again(monkeypatch) -> None:
    place(monkeypatch, 0, 1)
    sampler = ElasticSampler(range(50), seed=1)
    before = sampler.order(0)
    monkeypatch.setattr("random.Random", None)  # it takes long where there are millions
    sampler.record_batch(0, 8)
    place(monkeypatch, 1, 3)
    sampler.reset()
    assert list(sampler) == before[9::3]
    before.clear()
    assert len(sampler.order(0)) == 50
