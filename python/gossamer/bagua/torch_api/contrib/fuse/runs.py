"""A run stands for parameters that follow each other in memory, as one long parameter with one state.

It knows no optimizer: an entry of a state is a tensor of the parameter's shape, or a value that the whole run shares.
Only optimizer.py uses it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.bagua.torch_api.tensor import in_a_row
from gossamer.errors import ConfigError


class Run:
    """Two or more parameters as one, `flat`, in the same memory, with a `state` for the optimizer to change.

    Args:
        params: parameters that follow each other in memory.
        weight: that memory, [sum of their elements].
        state: the optimizer's state by parameter, with equal keys and equal shared values. Its tensors are replaced by
            parts of long ones.
    """

    def __init__(self, params: Sequence[Tensor], weight: Tensor, state: Any) -> None:
        self.params: list[torch.Tensor] = list(params)
        self.flat: nn.Parameter = nn.Parameter(weight)
        self.state: dict[str, Any] = {}
        self._sizes = [param.numel() for param in params]
        self._before: dict[str, Any] = {}
        self._shared: dict[str, Tensor] = {}  # one element for each parameter
        self._versions: dict[str, int] = {}
        self._parts: dict[str, list[Any]] = {}  # what the optimizer's state holds for each parameter
        for key in list(state.get(params[0], ())):
            values = [state[param][key] for param in params]
            elementwise = _is_elementwise(values[0], params[0])
            self._adopt(key, _row_of(values) if elementwise else values[0], state)
        self._versions = {key: shared._version for key, shared in self._shared.items()}

    def is_current(self, state: Any) -> bool:
        """Returns whether the optimizer's state holds exactly the parts that this run made, unchanged since then."""
        if any(shared._version != self._versions[key] for key, shared in self._shared.items()):
            return False  # such as step() in between, which may have counted on for some parameters only
        return all(
            len(own := state.get(param, ())) == len(self._parts)
            and all(own.get(key, self) is parts[index] for key, parts in self._parts.items())
            for index, param in enumerate(self.params)
        )

    @torch.no_grad()
    def take_gradients(self) -> None:
        """flat.grad = the parameters' gradients in a row: as they lie in memory if they do, else a copy."""
        gradients: list[Any] = [param.grad for param in self.params]
        self.flat.grad = _row_of(gradients)
        self._before = dict(self.state)

    def give_state(self, new: dict[str, Any], state: Any) -> None:
        """Hands what a step has left in the flat parameter's state to the parameters. new: that state."""
        self.flat.grad = None
        self.state = new
        torch.autograd.graph.increment_version(self.params)  # so that backward of an earlier forward notices
        for key in [key for key in self._parts if key not in new]:
            del self._parts[key]
            for param in self.params:
                del state[param][key]
        for key, value in list(new.items()):
            if key not in self._parts or not isinstance(value, Tensor) or value is not self._before[key]:
                self._adopt(key, value, state)
            elif key in self._shared:
                self._shared[key].fill_(value)
        self._versions = {key: shared._version for key, shared in self._shared.items()}

    def _adopt(self, key: str, value: Any, state: Any) -> None:
        """Makes an entry of the flat state one of the parameters', in the same memory."""
        parts: list[Any] = [value] * len(self.params)
        self._shared.pop(key, None)
        if isinstance(value, Tensor) and value.shape == self.flat.shape:
            split = zip(value.split(self._sizes), self.params, strict=True)
            parts = [part.view(param.shape) for part, param in split]
        elif isinstance(value, Tensor):
            if value.dim():
                raise ConfigError(
                    f"fuse_step: the optimizer's state {key!r} of {list(value.shape)} for a parameter of "
                    f"{list(self.flat.shape)} is not elementwise; leave this optimizer unfused."
                )
            # So that step() can count on; the flat parameter has the first.
            self._shared[key] = value.detach().expand(len(self.params)).clone()
            parts = list(self._shared[key].unbind())
            value = parts[0]
        self.state[key] = value
        self._parts[key] = parts
        for param, part in zip(self.params, parts, strict=True):
            state[param][key] = part


def find_runs(params: Sequence[Tensor], state: Any) -> list[Run]:
    """The longest runs in `params`, which have gradients, by their addresses. Those in none are stepped alone."""
    rows: list[list[Tensor]] = []
    for kind in _by_kind(params):
        signature: list[Any] | None = None
        for param in sorted(kind, key=Tensor.data_ptr):
            gradient: Any = param.grad
            last, signature = signature, _signature(param, state.get(param, {}))
            if (gradient.layout, gradient.dtype) != (torch.strided, param.dtype):
                signature = None
            elif rows and signature == last and in_a_row([rows[-1][-1], param]) is not None:
                rows[-1].append(param)
            else:
                rows.append([param])
    whole = [(row, in_a_row(row)) for row in rows if len(row) > 1]
    return [Run(row, weight, state) for row, weight in whole if weight is not None]


def flatten(params: Sequence[Tensor]) -> None:
    """Moves the parameters to memory where those of one dtype and device lie in a row, if they do not yet."""
    for members in _by_kind(params):
        if len(members) < 2 or in_a_row(members) is not None:
            continue
        parts = _row_of([param.detach() for param in members]).split([param.numel() for param in members])
        for param, part in zip(members, parts, strict=True):
            param.data = part.view(param.shape)


def _row_of(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors as one [sum of elements]: their memory if they lie in a row, else a copy."""
    row = in_a_row(tensors)
    if row is not None:
        return row
    # Making a view costs more than copying a small tensor does.
    return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors])


def _by_kind(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """The parameters that can be part of a run, by dtype and device."""
    kinds: dict[Any, list[Tensor]] = {}
    for param in params:
        plain = type(param) in (Tensor, nn.Parameter) and param.layout == torch.strided
        # The CPU's kernels round the last elements of a 16-bit tensor otherwise than those before.
        precise = param.is_floating_point() and (param.is_cuda or param.element_size() >= 4)
        if plain and precise and param.dim() and param.numel() and param.is_contiguous():
            kinds.setdefault((param.dtype, param.device), []).append(param)
    return list(kinds.values())


def _signature(param: Tensor, state: dict[str, Any]) -> list[Any]:
    """Equal for parameters that one run can hold."""
    found = []
    for key, value in state.items():
        if isinstance(value, Tensor):
            value = value.dtype if _is_elementwise(value, param) else value.item()
        found.append((key, value))
    return found


def _is_elementwise(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape
