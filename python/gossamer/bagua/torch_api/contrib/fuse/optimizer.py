"""fuse_optimizer: an elementwise optimizer that steps over a few long tensors instead of many short ones.

The optimizer's own step() does the arithmetic, on its own groups, with the parameters of a run exchanged for
one flat parameter while it runs; so schedulers, step hooks and every option go on working, and the bits are
those of the unfused step. runs.py keeps parameters and states in flat memory. Nothing is patched on a class.
"""

import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, optim

from gossamer.algorithms import ALGORITHMS
from gossamer.bagua.torch_api.contrib.fuse.runs import Run, find_runs, flatten
from gossamer.bagua.torch_api.tensor import bagua_getter_closure, is_bagua_tensor
from gossamer.engine import weights_in_buckets
from gossamer.errors import ConfigError
from gossamer.optim import ELEMENTWISE


def fuse_optimizer(
    optimizer: optim.Optimizer,
    do_flatten: bool = True,
    check_flatten: bool = True,
    *,
    elementwise: bool = False,
) -> optim.Optimizer:
    """Gives the optimizer a `fuse_step(closure=None)`, and returns it. step() stays as it was.

    fuse_step() changes parameters and states to the same bits as step() would. Parameters become views of flat memory
    at once, states when they appear; gradients stay where they are. A parameter of no dimension, not contiguous,
    complex, or of 16 bits on the CPU (whose kernels round the last elements of a tensor otherwise) is stepped by
    itself, as by step(). So is a parameter whose neighbours have no gradient or another step count.

    A wrapped model whose algorithm works on weights keeps them in its buckets' memory. They stay there, and those that
    lie in a row there are fused. The model may be wrapped before or after.

    Args:
        do_flatten: False moves nothing, and fuses what lies in a row already.
        check_flatten: the next fuse_step() moves parameters that were moved (model.to, param.data = ...) back to flat
            memory. False makes them an error instead.
        elementwise: your word that a class unknown here changes each element by its own gradient and state alone.

    Raises:
        ConfigError: fused already; no torch optimizer; one that is not known to be elementwise (LBFGS, Muon, Adafactor,
            SparseAdam, LAMB, a class of your own); one whose state an algorithm averages (QAdam's, 0/1 Adam's);
            differentiable=True; fused=True on the CPU.
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise ConfigError(f"fuse_optimizer: needs a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if is_fused_optimizer(optimizer):
        raise ConfigError(f"fuse_optimizer: this {type(optimizer).__name__} is fused already.")
    for algorithm in ALGORITHMS.values():
        if isinstance(optimizer, algorithm.optimizer_class or ()):
            raise ConfigError(
                f"fuse_optimizer: the algorithm {algorithm.name!r} averages the state of this "
                f"{type(optimizer).__name__} in its own memory during the step; call step() instead of fuse_step()."
            )
    if not elementwise and type(optimizer) not in ELEMENTWISE:
        raise ConfigError(
            f"fuse_optimizer: must be elementwise, one of {', '.join(kind.__name__ for kind in ELEMENTWISE)}, "
            f"got {type(optimizer).__name__}; if a class of your own is, pass elementwise=True."
        )
    groups = optimizer.param_groups
    if any(group.get("differentiable") for group in groups):
        raise ConfigError(
            "fuse_optimizer: differentiable=True records each parameter's step; leave it unfused."
        )
    if any(group.get("fused") and not all(param.is_cuda for param in group["params"]) for group in groups):
        raise ConfigError(
            "fuse_optimizer: torch's fused=True kernels on the CPU round the last elements of a tensor otherwise, "
            "so the bits would depend on what is fused; pass fused=False."
        )
    setattr(optimizer, _FUSION, _Fusion(optimizer, do_flatten=do_flatten, check_flatten=check_flatten))
    optimizer.fuse_step = types.MethodType(fuse_step, optimizer)  # type: ignore[attr-defined]
    return optimizer


def fuse_step(optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """One step of a fused optimizer; the closure's loss, None without one.

    Raises:
        ConfigError: the optimizer is not fused; with check_flatten=False, a parameter was moved.
    """
    if not is_fused_optimizer(optimizer):
        raise ConfigError(f"fuse_step: call fuse_optimizer() on this {type(optimizer).__name__} first.")
    loss = None
    if closure is not None:  # before the gradients are looked at, which it makes
        with torch.enable_grad():
            loss = closure()
    getattr(optimizer, _FUSION).step()
    return loss


def is_fused_optimizer(optimizer: optim.Optimizer) -> bool:
    """True after fuse_optimizer(). A copy of a fused optimizer is not fused."""
    return hasattr(optimizer, _FUSION)


_FUSION = "_gossamer_fusion"


class _Fusion:
    """The runs of one optimizer that were found last."""

    def __init__(self, optimizer: optim.Optimizer, *, do_flatten: bool, check_flatten: bool) -> None:
        self.optimizer, self.do_flatten, self.check_flatten = optimizer, do_flatten, check_flatten
        self.key: list[list[int]] = []
        self.runs: list[list[Run]] = []
        self.pointers: dict[int, int] = {}
        self._look_for_moved()

    def step(self) -> None:
        # What takes part may change from step to step, and so may the states (load_state_dict).
        taking_part: list[list[Any]] = [
            [param for param in group["params"] if param.grad is not None]
            for group in self.optimizer.param_groups
        ]
        self._look_for_moved()
        # Tells parameters apart, and a dense gradient from a sparse one.
        key = [
            [id(param) if param.grad.layout == torch.strided else -id(param) for param in params]
            for params in taking_part
        ]
        state: Any = self.optimizer.state
        if key != self.key or not all(run.is_current(state) for run in chain(*self.runs)):
            self.runs = [find_runs(params, state) for params in taking_part]
            self.key = key
        for run in chain(*self.runs):
            run.take_gradients()
        try:
            with self._exchanged(taking_part) as states:
                self.optimizer.step()
        except BaseException:
            self.key = []  # a state may be half new: look again
            raise
        for run in chain(*self.runs):
            run.give_state(states[run.flat], state)

    @contextmanager
    def _exchanged(self, taking_part: list[list[Tensor]]) -> Iterator[Any]:
        """The optimizer with runs for parameters; yields the states by parameter."""
        optimizer: Any = self.optimizer
        own_state, own_params = optimizer.state, [group["params"] for group in optimizer.param_groups]
        states: Any = defaultdict(dict)
        fused = {id(param) for run in chain(*self.runs) for param in run.params}
        for group, runs, params in zip(optimizer.param_groups, self.runs, taking_part, strict=True):
            alone = [param for param in params if id(param) not in fused]
            group["params"] = [*(run.flat for run in runs), *alone]
            states |= {run.flat: run.state for run in runs}
            states |= {param: own_state[param] for param in alone if param in own_state}
        optimizer.state = states
        try:
            yield states
        finally:
            flats = {run.flat for run in chain(*self.runs)}
            own_state |= {param: value for param, value in states.items() if param not in flats}
            optimizer.state = own_state
            for group, params in zip(optimizer.param_groups, own_params, strict=True):
                group["params"] = params

    def _look_for_moved(self) -> None:
        """Moves parameters to flat memory where they are to be there and are not; runs are of where they are."""
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        if self.pointers == (pointers := {id(param): param.data_ptr() for param in params}):
            return
        if self.do_flatten:
            held = _held_elsewhere(params)
            moved = {key for key, value in pointers.items() if self.pointers.get(key) != value} - held
            if self.pointers and moved and not self.check_flatten:
                raise ConfigError(
                    "fuse_step: parameters were moved or added since fuse_optimizer(); with check_flatten=True they "
                    "are moved to flat memory again."
                )
            for group in self.optimizer.param_groups:
                flatten([param for param in group["params"] if id(param) not in held])
            pointers = {id(param): param.data_ptr() for param in params}
        self.pointers = pointers
        self.key = []


def _held_elsewhere(params: Sequence[Tensor]) -> set[int]:
    """Ids of parameters whose memory is a bucket's, because an algorithm works on weights where they lie."""
    travelling = [(param, bagua_getter_closure(param)) for param in params if is_bagua_tensor(param)]
    here = {id(param) for param, own in travelling if own is not None and own.data_ptr() == param.data_ptr()}
    return weights_in_buckets() | here
