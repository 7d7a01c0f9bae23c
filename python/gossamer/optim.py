"""SGD, Adam and AdamW whose step is one native call, which reads and writes parameter, gradient and states once.

They are torch's classes with another step(): constructor, param_groups, state_dict and hooks are torch's. Parameters
that follow each other in memory, as after gs.DataParallel, are updated as one. docs/optim.md compares the bits.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gossamer._ops import accumulate_dtype, optimizer_ops
from gossamer.errors import ConfigError

__all__ = ["SGD", "Adam", "AdamW"]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
REFUSED = {
    "amsgrad": "a maximum of past variances is not kept",
    "capturable": "the number of steps is counted on the CPU",
    "differentiable": "the step is not recorded by autograd",
    "foreach": "there is one way to step, the native one",
    "fused": "the step is fused without it",
}
# These options choose among torch's own ways to the same result, so a state_dict that holds them can be loaded.
CHOICES: dict[str, bool | None] = {"capturable": False, "foreach": None, "fused": None}

Options: TypeAlias = dict[str, Any]


class _Native(torch.optim.Optimizer):
    """What the three optimizers share: refused options, float32 states of 16-bit parameters, and the closure."""

    def add_param_group(self, param_group: Options) -> None:
        """As torch's. Raises ConfigError for an option or a dtype that is not supported."""
        super().add_param_group(param_group)
        name, group = type(self).__name__, self.param_groups[-1]
        try:
            _refuse(name, group)
            for param in group["params"]:
                if param.dtype not in DTYPES or param.layout != torch.strided:
                    raise ConfigError(
                        f"{name}: parameters must be dense float32, float64, float16 or bfloat16, got "
                        f"{param.layout} {param.dtype} {list(param.shape)}"
                    )
        except ConfigError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient. Returns the closure's loss, or None without a closure.

        Raises:
            ConfigError: a gradient is sparse, or a gradient or state has another dtype, shape or device.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params, grads = [], []
            for param in group["params"]:
                grad = param.grad
                if grad is not None:
                    params.append(param)
                    grads.append(grad)
            if params:
                self._update(group, params, grads)
        return loss

    def load_state_dict(self, state_dict: Options) -> None:
        """As torch's. Takes a state of this class or of torch's. States of 16-bit parameters become float32.

        Raises:
            ConfigError: the state was saved with amsgrad=True or differentiable=True.
        """
        loaded: list[Options] = []

        def look(_optimizer: Any, given: Options) -> None:
            for group in given["param_groups"]:
                _refuse(type(self).__name__, {key: group[key] for key in group if key not in CHOICES})
            loaded.append(given)

        hook = self.register_load_state_dict_pre_hook(look)  # registered last, so it sees what is loaded
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        saved = [key for group in loaded[0]["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for group in self.param_groups:
            group.update({key: value for key, value in CHOICES.items() if key in group})
        for key, param in zip(saved, params, strict=True):
            state = self.state.get(param, {})
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].cpu()
            for name, value in state.items():
                if (
                    name != "step"
                    and isinstance(value, Tensor)
                    and value.dtype != accumulate_dtype(param.dtype)
                ):
                    given = loaded[0]["state"][key][name]  # torch has rounded it to the parameter's dtype
                    state[name] = given.to(device=param.device, dtype=accumulate_dtype(param.dtype))

    def _update(self, group: Options, params: list[Tensor], grads: list[Tensor]) -> None:
        raise NotImplementedError


class SGD(_Native, torch.optim.SGD):
    """torch.optim.SGD: momentum, dampening, Nesterov, weight decay.

    The arguments are those of torch.optim.SGD. `foreach`, `differentiable` and `fused` must be off.

    Raises:
        ConfigError: one of those is on; a parameter is sparse, or not float32, float64, float16 or bfloat16.
    """

    def _update(self, group: Options, params: list[Tensor], grads: list[Tensor]) -> None:
        if group["momentum"] == 0:
            self._call(group, params, grads, [], first=False)
            return
        states = [self.state[param] for param in params]
        fresh = [index for index, state in enumerate(states) if state.get("momentum_buffer") is None]
        if fresh:
            began = [params[index] for index in fresh]
            buffers = empty_states(began)
            self._call(group, began, [grads[index] for index in fresh], buffers, first=True)
            for index, buffer in zip(fresh, buffers, strict=True):
                states[index]["momentum_buffer"] = buffer
            if len(fresh) == len(params):
                return
            left = sorted(set(range(len(params))) - set(fresh))
            params, grads = [params[index] for index in left], [grads[index] for index in left]
            states = [states[index] for index in left]
        self._call(group, params, grads, [state["momentum_buffer"] for state in states], first=False)

    def _call(
        self, group: Options, params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], *, first: bool
    ) -> None:
        # Buffers are float32, or float64 for float64 parameters. first: they hold nothing yet, and take the gradients.
        rates = [float(group[name]) for name in ("lr", "momentum", "dampening", "weight_decay")]
        optimizer_ops.sgd_step_.default(
            params, grads, buffers, *rates, group["nesterov"], group["maximize"], first
        )


class Adam(_Native, torch.optim.Adam):
    """torch.optim.Adam. Weight decay is added to the gradient or, if decoupled, subtracted from the parameter.

    The arguments are those of torch.optim.Adam. `amsgrad`, `foreach`, `capturable`, `differentiable` and `fused` must
    be off.

    Raises:
        ConfigError: as SGD; also in a step while a CUDA graph is captured.
    """

    def _update(self, group: Options, params: list[Tensor], grads: list[Tensor]) -> None:
        if params[0].is_cuda and torch.cuda.is_current_stream_capturing():
            name = type(self).__name__
            raise ConfigError(
                f"{name}: a CUDA graph cannot capture a step, because the number of steps is counted on the CPU; "
                f"torch.optim.{name}(capturable=True) can be captured"
            )
        states = [self.state[param] for param in params]
        fresh = [index for index, state in enumerate(states) if not state]
        if fresh:
            began = [params[index] for index in fresh]
            dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
            for index, mean, square in zip(fresh, empty_states(began), empty_states(began), strict=True):
                states[index]["step"] = torch.zeros((), dtype=dtype, device="cpu")
                states[index]["exp_avg"] = mean.zero_()
                states[index]["exp_avg_sq"] = square.zero_()
        tensors = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")]
        rates = [float(rate) for rate in (group["lr"], *group["betas"], group["eps"], group["weight_decay"])]
        optimizer_ops.adam_step_.default(
            params, grads, *tensors, *rates, group["decoupled_weight_decay"], group["maximize"]
        )


class AdamW(Adam, torch.optim.AdamW):
    """torch.optim.AdamW: Adam with decoupled weight decay, 0.01 unless given.

    Args and errors: as Adam.
    """


def empty_states(params: Sequence[Tensor]) -> list[Tensor]:
    """Allocates a state of each parameter's shape and strides. States follow each other where the parameters do."""
    states: dict[Tensor, Tensor] = {}
    for row in _rows(params):
        dtype = accumulate_dtype(row[0].dtype)
        if len(row) == 1:
            states[row[0]] = torch.empty_like(row[0], dtype=dtype, memory_format=torch.preserve_format)
            continue
        sizes = [param.numel() for param in row]
        flat = torch.empty(sum(sizes), dtype=dtype, device=row[0].device)
        states |= {param: part.view(param.shape) for param, part in zip(row, flat.split(sizes), strict=True)}
    return [states[param] for param in params]


def _rows(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups the parameters that follow each other in memory, whatever their order in the optimizer."""
    rows: list[list[Tensor]] = []
    end, kind = -1, None  # where the last parameter ends, and its kind, if another may follow it
    for param in sorted(params, key=lambda param: param.data_ptr()):
        own = (param.dtype, param.device)
        if rows and param.data_ptr() == end and own == kind and param.is_contiguous():
            rows[-1].append(param)
        else:
            rows.append([param])
        end, kind = (param.data_ptr() + param.nbytes, own) if param.is_contiguous() else (-1, None)
    return rows


def _refuse(name: str, options: Options) -> None:
    for option, reason in REFUSED.items():
        if options.get(option):
            raise ConfigError(
                f"{name}: {option} must be left out, got {options[option]!r}; {reason}. torch.optim.{name} has it."
            )


# torch's classes that change each element by its own gradient and state alone.
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
