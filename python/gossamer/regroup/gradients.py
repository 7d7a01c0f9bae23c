"""Survival where the ranks exchange gradients in every step, and hold equal weights.

When a member dies, the others form a group and end the step that was under way: those whose sums had failed send
their own gradients again, and a rank that missed only the last message gets the mean from one that has it. So a step
is neither lost nor done twice.
"""

import json
import weakref
from typing import Any

import torch
from torch import Tensor

from gossamer.comm import gather_numbers
from gossamer.engine import (
    Connections,
    broadcast_bytes,
    broadcast_everywhere,
    broadcast_state,
    weak_call,
)
from gossamer.engine.survival import Own
from gossamer.regroup.survival import Survivor, Wish


class GradientSurvivor(Survivor[Own]):
    """See the module. What the ranks do together are synchronised backwards."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._means: dict[str, Tensor] = {}  # of the last step; memory of earlier steps is used again
        self._with_mean: list[str] = []  # the parameters that have one

    @property
    def count(self) -> int:
        """See Survivor."""
        return self._face.engine.backward_count

    @property
    def wished(self) -> Wish:
        """See Survivor."""
        return Wish.CHANGE if self._face.engine.wish else Wish.NOTHING

    def wish(self, *, change: bool, stop: bool) -> None:
        """See Survivor."""
        self._face.engine.wish = change

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
        params = self._face.engine.params
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
        lost, ended = weakref.WeakMethod(self._lost), weak_call(weakref.WeakMethod(self._keep_mean))
        self._face.engine.survive(lambda *args: (call := lost()) is not None and call(*args), ended)

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

    def _take_mean(self, links: Connections, own: Own, ahead: int, *, take: bool) -> None:
        """Give the mean of the last step, which rank `ahead` has, to the ranks that have missed the agreement."""
        params = self._face.engine.params
        names = json.loads(broadcast_bytes(links.control, json.dumps(self._with_mean).encode(), ahead))
        is_source = links.control.rank == ahead
        tensors = [self._means[name] if is_source else torch.empty_like(params[name]) for name in names]
        with torch.no_grad():
            broadcast_everywhere(links.comm, links.control, tensors, ahead)
        shared = broadcast_state(links.control, lambda: own.shared(redo=False), ahead, take=take)
        if not take:
            return
        self._face.engine.algorithm.take_shared_state(shared)
        for param in params.values():
            param.grad = None
        for name, tensor in zip(names, tensors, strict=True):
            params[name].grad = tensor
        self._keep_mean()

    # --- newcomers ---

    def _state_of(self, own: Own) -> dict[str, Any]:
        counts = [own.backwards, own.optimizer_steps]
        return {"counts": counts, "plan": own.plan, "shared": own.shared(redo=False)}

    def _take(self, own: Own, state: dict[str, Any] | None) -> None:
        engine, shared = self._face.engine, own.shared(redo=False)
        plan, counts = (own.plan, (own.backwards, own.optimizer_steps))
        if state is not None:
            plan, counts, shared = state["plan"], tuple(state["counts"]), state["shared"]
        engine.adopt(plan, own.fields(redo=False), counts)
        engine.algorithm.take_shared_state(shared)
