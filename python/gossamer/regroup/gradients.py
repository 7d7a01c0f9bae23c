"""Survival where the ranks exchange gradients in every step, and hold equal weights.

When a member dies, the others form a group and end the step that was under way: those whose sums had failed send
their own gradients again, and a rank that missed only the last message gets the mean from one that has it. So a step
is neither lost nor done twice.
"""

import json
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms.qadam import QAdamOptimizer
from gossamer.comm import gather_numbers
from gossamer.engine import (
    Connections,
    Face,
    broadcast_bytes,
    broadcast_everywhere,
    broadcast_state,
    weak_call,
)
from gossamer.engine.survival import Own
from gossamer.regroup.donor import copied
from gossamer.regroup.newcomer import Copy, OptimizerCopy
from gossamer.regroup.survival import Survivor, Wish


class GradientCopy(OptimizerCopy):
    """The weights and the optimizers' states of a newcomer, which takes each step of the others that it has missed.

    Args:
        params: by name.
        optimizers: as the others have them.
    """

    def __init__(self, params: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(optimizers)
        self._params = params

    def state(self) -> dict[str, Any]:
        """See OptimizerCopy."""
        return super().state() | {"params": copied(dict(self._params))}

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the state, in an order that is the same on all ranks."""
        found = [param.detach() for param in self._params.values()]
        for optimizer in self._optimizers:
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                of_param = optimizer.state.get(param, {})
                found += [of_param[key] for key in sorted(of_param) if isinstance(of_param[key], Tensor)]
        return found

    def take(self, state: dict[str, Any]) -> None:
        """See newcomer.Copy."""
        super().take(state)
        with torch.no_grad():
            for name, values in state["params"].items():
                self._params[name].copy_(values)

    @staticmethod
    def step_of(number: int, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what optimizer `number` is about to make a step of: settings and gradients, without copies.

        By QAdam: momenta instead of gradients, once the ranks average these.
        """
        groups = optimizer.param_groups
        adam = optimizer if isinstance(optimizer, QAdamOptimizer) else None
        return {
            "optimizer": number,
            "settings": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "frozen": adam.frozen if adam else None,
            "inputs": [
                [adam.input_of(param) if adam else param.grad for param in group["params"]]
                for group in groups
            ],
        }

    def change(self, change: dict[str, Any]) -> None:
        """See newcomer.Copy. Makes the step that step_of() describes."""
        optimizer = self._optimizers[change["optimizer"]]
        adam = optimizer if isinstance(optimizer, QAdamOptimizer) else None
        if adam:
            adam.frozen = change["frozen"]
        for group, settings, inputs in zip(
            optimizer.param_groups, change["settings"], change["inputs"], strict=True
        ):
            group.update(settings)
            for param, given in zip(group["params"], inputs, strict=True):
                on_device = None if given is None else given.to(param.device)
                if adam:
                    adam.take_input(param, on_device)
                else:
                    param.grad = on_device
        optimizer.step()
        optimizer.zero_grad()


class GradientSurvivor(Survivor[Own]):
    """See the module. What the ranks do together are synchronised backwards."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._means: dict[str, Tensor] = {}  # of the last step; memory of earlier steps is used again
        # The parameters that have one. None: each rank's gradients are its own.
        self._with_mean: list[str] | None = []
        self._all = GradientCopy(self._face.engine.params, self._optimizers)
        self._hooks: list[Any] = []

    @classmethod
    def copy_for(cls, face: Face, optimizers: Sequence[torch.optim.Optimizer]) -> Copy:
        """See Survivor."""
        return GradientCopy(dict(face.module.named_parameters()), optimizers)

    @property
    def count(self) -> int:
        """See Survivor."""
        return self._face.engine.backward_count

    @property
    def wished(self) -> Wish:
        """See Survivor."""
        return Wish.CHANGE if self._face.engine.wish else Wish.NOTHING

    def wish(self, *, change: bool, grows: bool, stop: bool) -> None:
        """See Survivor."""
        self._face.engine.wish = change or grows

    # --- in a backward ---

    def _lost(self, counted: bool, why: str) -> bool:
        """End a backward whose group has failed. Return False if the group has lost no member."""
        if not self._lost_place():
            return False
        with torch.no_grad():
            if counted:
                self._keep_mean()
            self._own = self._face.engine.own(in_backward=not counted)
            self._leave_engine(crashed=True)
            self._go_on()
        return True

    def _keep_mean(self) -> None:
        engine = self._face.engine
        params = engine.params
        if not engine.algorithm.averages_gradients(engine.optimizer_steps):
            self._with_mean = None
            return
        gradients = {name: param.grad for name, param in params.items() if param.grad is not None}
        for name in gradients:
            if name not in self._means:
                self._means[name] = torch.empty_like(params[name])
        self._with_mean = list(gradients)
        with torch.no_grad():
            for name, gradient in gradients.items():
                self._means[name].copy_(gradient)

    def _arm(self) -> None:
        super()._arm()
        if self._member is None:
            return
        lost, ended = (weak_call(weakref.WeakMethod(each)) for each in (self._lost, self._keep_mean))
        self._face.engine.survive(lost, ended)
        # Behind the hooks of the new engine: the algorithm may change what the step is made of.
        tell = weak_call(weakref.WeakMethod(self._tell_step))
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            optimizer.register_step_pre_hook(partial(tell, number))
            for number, optimizer in enumerate(self._optimizers)
        ]

    # --- in the next group ---

    def _make_own(self) -> Own:
        return self._face.engine.own(in_backward=False)

    def _meet(self) -> None:
        own = self._own
        assert own is not None
        links = self._connect_holders()
        engine = self._face.engage(links, self._optimizers, restored=True)
        counts = gather_numbers(links.control, own.backwards, int(own.in_backward))
        last = max(count for count, _ in counts)
        ahead = next(rank for rank, (count, _) in enumerate(counts) if count == last)
        plan = json.loads(broadcast_bytes(links.control, json.dumps(own.plan).encode(), ahead))
        redo = own.in_backward and own.backwards == last
        engine.adopt(plan, own.fields(redo=redo), (own.backwards, own.optimizer_steps))
        engine.algorithm.take_shared_state(own.shared(redo=redo))
        self._met(links, own)
        if any(count < last for count, _ in counts):
            self._take_mean(links, own, ahead, take=own.backwards < last)
            engine.resume_at(last, own.optimizer_steps)
        self.changes_at = last + any(busy and count == last for count, busy in counts)
        if redo:
            params = engine.params
            for name, gradient in own.gradients.items():
                params[name].grad = gradient.clone()
            self._watch_group()
            engine.redo()  # if this group fails too, _go_on() begins again with the same own gradients
            self._keep_mean()
        self._arm()

    def _met(self, links: Connections, own: Own) -> None:
        """Called when the ranks that hold the state are in one group, with what each has of its own. Collective."""

    def _take_mean(self, links: Connections, own: Own, ahead: int, *, take: bool) -> None:
        """Give the mean of the last step, which rank `ahead` has, to the ranks that have missed the agreement.

        If each rank's gradients are its own, they take these.
        """
        params = self._face.engine.params
        names = json.loads(broadcast_bytes(links.control, json.dumps(self._with_mean).encode(), ahead))
        is_source = links.control.rank == ahead
        tensors = [self._means[name] if is_source else torch.empty_like(params[name]) for name in names or ()]
        with torch.no_grad():
            broadcast_everywhere(links.comm, links.control, tensors, ahead)
        shared = broadcast_state(links.control, lambda: own.shared(redo=False), ahead, take=take)
        if not take:
            return
        self._face.engine.algorithm.take_shared_state(shared)
        gradients = own.gradients
        if names is not None:
            gradients = dict(zip(names, tensors, strict=True))
            for param in params.values():
                param.grad = None
        for name, gradient in gradients.items():
            params[name].grad = gradient
        self._keep_mean()

    # --- newcomers ---

    def _large_state(self) -> Any:
        return self._all.state()

    def _large_tensors(self, _own: Own) -> list[Tensor]:
        return self._all.tensors()

    def _tell_step(self, number: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called before optimizer `number` makes a step: tell the newcomers that copy the state."""
        assert self._donor is not None
        if self._donor.gives:
            self._donor.changed(self._all.step_of(number, optimizer))

    def _state_of(self, own: Own, copied: bool) -> dict[str, Any]:
        counts = [own.backwards, own.optimizer_steps]
        return {"counts": counts, "plan": own.plan, "shared": own.shared(redo=False)}

    def _take(self, own: Own, state: dict[str, Any] | None) -> None:
        engine, shared = self._face.engine, own.shared(redo=False)
        plan, counts = (own.plan, (own.backwards, own.optimizer_steps))
        if state is not None:
            plan, counts, shared = state["plan"], tuple(state["counts"]), state["shared"]
        engine.adopt(plan, own.fields(redo=False), counts)
        engine.algorithm.take_shared_state(shared)
