"""A hook as one operation of a compiled backward. A graph can hold numbers, so it finds its State by a number."""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

_keys = itertools.count()
_states: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def key_for(state: Any) -> int:
    """Returns a new number by which graphs find this State."""
    key = next(_keys)
    _states[key] = state
    return key


@torch.library.custom_op("gossamer::hook_mean", mutates_args=("grad",))
def mean_in_graph(grad: Tensor, param: Tensor, key: int, hook: str) -> None:
    """Runs a hook in a compiled backward. `grad` holds the mean when this returns."""
    state = _states[key]
    own = state.parameter_at(param.data_ptr())
    if own is not None:
        state.start(hook).reduce_gradient(grad, own).wait()


@mean_in_graph.register_fake
def _shape(grad: Tensor, param: Tensor, key: int, hook: str) -> None:
    return None
