"""A hook as one operation of a compiled backward. Graphs hold numbers and tensors: States are found by a number."""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

_keys = itertools.count()
_states: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def key_for(state: Any) -> int:
    """The number by which graphs find this State."""
    key = next(_keys)
    _states[key] = state
    return key


@torch.library.custom_op("gossamer::hook_mean", mutates_args=("grad",))
def mean_in_graph(grad: Tensor, param: Tensor, key: int, hook: str) -> None:
    """A hook in a compiled backward, where the gradient must be there when the operation ends."""
    state = _states[key]
    own = state.parameter_at(param.data_ptr())
    if own is not None:
        state.start(hook).reduce_gradient(grad, own).wait()


@mean_in_graph.register_fake
def _shape(grad: Tensor, param: Tensor, key: int, hook: str) -> None:
    return None
