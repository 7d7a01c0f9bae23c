"""Carries one model's training from a group of workers into the next one.

When a member dies, the others form a group and end the step that was under way: those whose sums had failed send
their own gradients again, and a rank that missed only the last message gets the mean from one that has it. So a step
is neither lost nor done twice. A newcomer gets everything at the boundary of two steps. loop.py owns one Survivor.
"""

import io
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from gossamer import membership, runtime
from gossamer.comm import Communicator, gather_numbers
from gossamer.engine import Connections, Face, broadcast_bytes, broadcast_everywhere, weak_call
from gossamer.engine.survival import Own
from gossamer.errors import CommError
from gossamer.membership import Member


class Survivor:
    """The training of one model on this worker.

    Args:
        face: the wrapped model.
        optimizers: its optimizers.
        save: returns what a newcomer needs besides the model, as torch.save() takes it.
        load: takes that on a newcomer.

    Attributes:
        changes_at: the number of synchronised backwards after which the group of the next step is another one; None:
            the group stays.
    """

    def __init__(
        self,
        face: Face,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        save: Callable[[], Any],
        load: Callable[[Any], None],
    ) -> None:
        self._face, self._optimizers, self._save, self._load = face, optimizers, save, load
        self._member: Member | None = membership.member()
        self._means: dict[str, Tensor] = {}  # of the last step; memory of earlier steps is used again
        self._with_mean: list[str] = []  # the parameters that have one
        self._own: Own | None = None  # while there is no engine that works
        self.changes_at: int | None = None

    @property
    def control(self) -> Communicator:
        """The present group, for CPU tensors."""
        return self._face.links.control

    def begin(self) -> None:
        """Bring all workers to one state: that of those who train, or rank 0's if none does. Collective.

        Raises:
            CommError: this worker has come while others trained, and all that held the state are dead.
        """
        while True:
            try:
                self._share()
                self._compare()
                return self._arm()
            except RuntimeError:  # torch's own too
                if not runtime.lost_place():
                    raise
            self._leave_engine(crashed=True)
            runtime.renew()
            self._engage_all()

    def change(self) -> None:
        """At a boundary: leave the group, together with all others, for the next one."""
        assert self._member is not None
        self._keep_own(in_backward=False)
        self._member.leave("update", skip_sync=True)
        self._leave_engine(crashed=False)
        self._go_on()

    def complete_change(self, divide: Callable[[], None]) -> None:
        """At the boundary `changes_at`: let newcomers in, and compare the weights of all ranks. Collective.

        Args:
            divide: divides what is left of the data among the members of the present group.
        """
        self.changes_at = None
        divide()
        self.at_boundary(self._welcome)

    def at_boundary(self, act: Callable[[], None]) -> bool:
        """Call a collective function between two steps. If the group loses a member, join the next one.

        Return whether the function has been completed.
        """
        try:
            act()
            return True
        except RuntimeError:  # torch's own too
            if not runtime.lost_place():
                raise
            if self._own is None:
                self._keep_own(in_backward=False)
        self._leave_engine(crashed=True)
        self._go_on()
        return False

    # --- in a backward ---

    def _lost(self, counted: bool, why: str) -> bool:
        """End a backward whose group has failed. Return False if the group has lost no member."""
        if not runtime.lost_place():
            return False
        with torch.no_grad():
            if counted:
                self._keep_mean()
            self._keep_own(in_backward=not counted)
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

    def _keep_own(self, *, in_backward: bool) -> None:
        with torch.no_grad():
            self._own = self._face.engine.own(in_backward=in_backward)

    def _arm(self) -> None:
        self._own = None
        if self._member is None:
            return
        self._member.holds = True
        engine = self._face.engine
        self._watch_group()
        lost, ended = weakref.WeakMethod(self._lost), weak_call(weakref.WeakMethod(self._keep_mean))
        engine.survive(lambda *args: (call := lost()) is not None and call(*args), ended)

    # --- in the next group ---

    def _leave_engine(self, *, crashed: bool) -> None:
        self._face.engine.close(crashed=crashed)

    def _go_on(self) -> None:
        """Enter the next group with the other holders of the state, and end the step that was under way."""
        while True:
            runtime.renew()
            try:
                return self._meet()
            except RuntimeError:  # torch's own too
                if not runtime.lost_place():
                    raise
            self._leave_engine(crashed=True)

    def _meet(self) -> None:
        own, member = self._own, self._member
        assert own is not None
        assert member is not None
        holders = member.holders()
        everyone = len(holders) == runtime.size()
        links = self._face.connect() if everyone else self._face.connect(holders)
        engine = self._face.engage(links, self._optimizers, broadcast=False)
        counts = gather_numbers(links.control, own.backwards, int(own.in_backward))
        last = max(count for count, _ in counts)
        ahead = next(rank for rank, (count, _) in enumerate(counts) if count == last)
        plan = json.loads(broadcast_bytes(links.control, json.dumps(own.plan).encode(), ahead))
        redo = own.in_backward and own.backwards == last
        engine.adopt(own, plan, redo=redo)
        if any(count < last for count, _ in counts):
            self._take_mean(links, ahead, take=own.backwards < last)
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

    def _watch_group(self) -> None:
        """Let the driver's word that the group is broken end all waits in it."""
        assert self._member is not None
        self._member.on_lost_group(weak_call(weakref.WeakMethod(self._face.engine.lose_group)))

    def _take_mean(self, links: Connections, ahead: int, *, take: bool) -> None:
        """Give the mean of the last step, which rank `ahead` has, to the ranks that have missed the agreement."""
        params = self._face.engine.params
        names = json.loads(broadcast_bytes(links.control, json.dumps(self._with_mean).encode(), ahead))
        is_source = links.control.rank == ahead
        tensors = [self._means[name] if is_source else torch.empty_like(params[name]) for name in names]
        with torch.no_grad():
            broadcast_everywhere(links.comm, links.control, tensors, ahead)
        if not take:
            return
        for param in params.values():
            param.grad = None
        for name, tensor in zip(names, tensors, strict=True):
            params[name].grad = tensor
        self._keep_mean()

    # --- newcomers ---

    def _welcome(self) -> None:
        member = self._member
        assert member is not None
        if len(member.holders()) < runtime.size():
            self._keep_own(in_backward=False)
            self._leave_engine(crashed=False)
            self._engage_all()
            self._share()
        self._compare()
        self._arm()

    def _engage_all(self) -> None:
        self._face.engage(self._face.connect(), self._optimizers)

    def _share(self) -> None:
        """Copy the state of the first rank that holds one to all ranks that hold none. Collective."""
        member, engine = self._member, self._face.engine
        holders = member.holders() if member is not None else []
        if member is not None and member.awaits_state and not holders:
            self._no_holder(member)
        source = holders[0] if holders else 0
        links = self._face.links
        control, own = links.control, self._own or engine.own(in_backward=False)
        if control.size > 1:
            state = {"counts": [own.backwards, own.optimizer_steps], "plan": own.plan, "more": self._save()}
            file = io.BytesIO()
            if control.rank == source:
                torch.save(state, file)
            data = broadcast_bytes(control, file.getvalue(), source)
            with torch.no_grad():
                # A holder keeps its own buffers, such as BatchNorm's statistics.
                keeps = control.rank in holders and control.rank != source
                buffers = [buffer.clone() if keeps else buffer for buffer in engine.buffers]
                broadcast_everywhere(links.comm, control, [*engine.params.values(), *buffers], source)
            state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            engine.adopt(own, state["plan"], redo=False)
            engine.resume_at(*state["counts"])
            if control.rank not in holders and control.rank != source:
                self._load(state["more"])
        elif self._own is not None:
            engine.adopt(own, own.plan, redo=False)

    def _compare(self) -> None:
        """Raise CommError on all ranks if their weights differ. Collective."""
        sums = [each for [each] in gather_numbers(self._face.links.control, self._face.engine.checksum())]
        if len(set(sums)) > 1:
            raise CommError(
                f"elastic: the weights of the ranks differ in the new group; their checksums are {sums}"
            )

    def _no_holder(self, member: Member) -> NoReturn:
        raise CommError(
            f"elastic: worker {member.worker} has come while others trained, and no worker that holds the state of the "
            f"training lives; begin again from a checkpoint"
        )
