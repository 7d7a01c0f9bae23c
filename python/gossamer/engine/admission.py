"""Which models and parameters the engine can train, and how a model is described to the other ranks. No collective.

A refusal is returned, not raised: engine.py lets all ranks compare their refusals first, so that all of them raise.
"""

import dataclasses
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.comm import Communicator
from gossamer.errors import ConfigError
from gossamer.torch_private import tree_leaves

_TRAINABLE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Members:
    """The parameters and buffers of a model that its ranks share. Keeps no model alive.

    Args:
        ignore: names that are left out. A tied parameter goes by its first name.

    Raises:
        ConfigError: `ignore` holds a name that no parameter or buffer has.
    """

    def __init__(self, module: nn.Module, ignore: Collection[str] = ()) -> None:
        self._module = weakref.ref(module)
        self.ignore: frozenset[str] = frozenset(ignore)
        known = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
        if strangers := sorted(self.ignore - known):
            raise ConfigError(f"engine: ignore must name parameters or buffers of the model, got {strangers}")

    def parameters(self, module: nn.Module | None = None) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter), each parameter once, of the model or of a `module` of the same structure."""
        named = (module or self._alive()).named_parameters()
        return [(name, param) for name, param in named if name not in self.ignore]

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self._alive().training

    def ignored_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are left out, each once."""
        return [param for name, param in self._alive().named_parameters() if name in self.ignore]

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return (name, buffer), each buffer once."""
        return [(name, buffer) for name, buffer in self._alive().named_buffers() if name not in self.ignore]

    def movable_buffers(self) -> list[Tensor]:
        """Return what movable() makes of the buffers."""
        return movable(self.buffers())

    def require_same(self, known: Sequence[Tensor], module: nn.Module) -> None:
        """Raise ConfigError if the module holds a parameter that is not `known`. It would have no hooks."""
        objects = set(map(id, known))
        for name, param in self.parameters(module):
            if id(param) not in objects:
                raise ConfigError(
                    f"engine: parameter '{name}' is another object than the one that was wrapped, and would train "
                    f"without the other ranks; load with assign=False, or close() and wrap the model again"
                )

    def modules(self) -> list[tuple[str, nn.Module]]:
        """Return (name, module), with those whose parameters are ignored."""
        return list(self._alive().named_modules())

    def _alive(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ConfigError("engine: the model is gone; keep it as long as its wrapper")
        return module


def movable(buffers: Iterable[tuple[str, Tensor]]) -> list[Tensor]:
    """Return the buffers that have values, in the form in which these are copied and averaged in place.

    Those on the meta device are left out. Of an expanded one the elements that are in memory stand for all.

    Raises:
        ConfigError: the values of a buffer cannot travel. Ranks with equal describe() lines raise it all.
    """
    found = []
    for name, buffer in buffers:
        if kind := _kind(buffer):
            raise ConfigError(
                f"engine: buffer '{name}' is {kind}, and only dense buffers can be copied between ranks; register "
                f"dense ones in its place, or copy none (broadcast=False of DataParallel, broadcast_buffers=False of "
                f"DistributedDataParallel)"
            )
        if not buffer.is_meta:
            for dim in reversed(_expanded(buffer)):
                buffer = buffer.select(dim, 0)
            found.append(buffer)
    return found


def describe(members: Members) -> list[str]:
    """Return one line for each parameter and buffer. Ranks that train together have equal lines."""
    ignored = [f"ignored {name}" for name in sorted(members.ignore)]
    parameters = [
        f"parameter {name} {_shape(param)} {param.dtype} {'trainable' if param.requires_grad else 'frozen'}"
        for name, param in members.parameters()
    ]
    buffers = [f"buffer {name} {_shape(buffer)} {buffer.dtype}" for name, buffer in members.buffers()]
    return ignored + parameters + buffers


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """A model that this process has wrapped before, and not closed.

    Args:
        planned: the parameters of its buckets by name.
        replaced: it trains a parameter that is to be trained now.
    """

    comm: Communicator
    algorithm: Any
    planned: Mapping[str, Tensor]
    replaced: bool


def refusal_of(
    members: Members, comm: Communicator, algorithm: Any, earlier: Sequence[Wrapped]
) -> ConfigError | None:
    """Return why this rank cannot train this model over `comm`; None if it can. `earlier`: all wrapped models."""
    reason = next(iter(_reasons(members, comm, algorithm, earlier)), None)
    return ConfigError(f"engine: {reason}") if reason else None


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a forward's output, with those in dataclasses."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def _reasons(
    members: Members, comm: Communicator, algorithm: Any, earlier: Sequence[Wrapped]
) -> Iterator[str]:
    named = members.parameters()
    if not any(param.requires_grad for _, param in named):
        yield "the model has no parameter with requires_grad=True, nothing to train"
    for other in earlier:
        if other.replaced:
            yield from _reasons_not_to_replace(other, named)
            continue
        if other.comm is comm:
            yield (
                "this communicator serves another model already, and their traffic would mix; "
                "pass a process group, or a communicator of its own"
            )
        if other.algorithm is algorithm:
            yield f"{type(algorithm).__name__}: this object serves another wrapped model; make one for each model"
    for name, param in named:
        yield from _of_a_parameter(name, param, comm.device)
    if "weight" in algorithm.fields and (pair := overlapping([*named, *members.buffers()])):
        yield overlap_text(algorithm, *pair)
    for name, child in members.modules():
        if f"{name}.weight" in members.ignore:
            continue
        if getattr(child, "sparse", False) is True and getattr(child, "weight", None) is not None:
            yield (
                f"module '{name}' ({type(child).__name__}) makes sparse gradients, which are not "
                f"supported yet; build it with sparse=False"
            )


def _reasons_not_to_replace(other: Wrapped, named: Sequence[tuple[str, Tensor]]) -> Iterator[str]:
    """It would end the other model's training of parameters that nobody trains then."""
    known, own = {id(param) for param in other.planned.values()}, {id(param) for _, param in named}
    common = next(name for name, param in named if id(param) in known)
    for name, param in other.planned.items():
        if id(param) not in own:
            yield (
                f"parameter '{common}' belongs to a model that is wrapped already, together with '{name}', which this "
                f"model does not have; close() that wrapper first"
            )


def _of_a_parameter(name: str, param: Tensor, device: torch.device) -> Iterator[str]:
    what = f"parameter '{name}'"
    if hasattr(param, "device_mesh"):
        yield f"{what} is a DTensor (FSDP or tensor parallel), which has its own reduction"
    if nn.parameter.is_lazy(param):
        yield f"{what} is not initialised yet; run one forward before wrapping the model"
    elif kind := _kind(param):
        yield f"{what} is {kind}, and parameters must be dense; make it dense by to_dense(), or the like"
    elif param.is_meta:
        yield f"{what} is on meta, where tensors have no values; move it to a device first, by to_empty(device=...)"
    elif _expanded(param):
        yield f"{what} is expanded, so that several of its elements are one in memory; make it anew by clone()"
    if not param.requires_grad:
        return
    if param.dtype not in _TRAINABLE_DTYPES:
        yield f"{what} must be float32, float64, float16 or bfloat16 to be trained, got {param.dtype}"
    if param.device.type != device.type or (device.index is not None and param.device != device):
        yield f"{what} is on {param.device}, but this model's gradients travel from {device}"


def overlapping(named: Iterable[tuple[str, Tensor]]) -> tuple[str, str] | None:
    """Return the names of two tensors that have memory in common, one of which is trained; None if there are none."""
    spans = []
    for name, tensor in named:
        if type(tensor) in (Tensor, nn.Parameter) and not _kind(tensor) and tensor.numel():
            begin = tensor.data_ptr()  # 0 on the meta device
            spans.append(
                (str(tensor.device), begin, begin + _extent(tensor) * tensor.element_size(), name, tensor)
            )
    open_spans: list[Any] = []
    for span in sorted(spans, key=lambda each: each[:3]):
        device, begin, _, name, tensor = span
        open_spans = [each for each in open_spans if each[0] == device and begin < each[2]]
        for *_, other_name, other in open_spans if begin else ():
            if (tensor.requires_grad or other.requires_grad) and _have_common_element(tensor, other):
                return other_name, name
        open_spans.append(span)
    return None


def overlap_text(algorithm: Any, one: str, other: str) -> str:
    """Return the reason against two tensors that have memory in common."""
    return (
        f"'{one}' and '{other}' share memory, which {type(algorithm).__name__} would give each its own; tie them by "
        f"using one parameter object, or train with an algorithm that averages gradients"
    )


def _have_common_element(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one whose spans of memory overlap. Columns of one matrix have none."""
    if all(_extent(x) == x.numel() for x in (a, b)):
        return True

    def places(x: Tensor) -> Tensor:
        inside = torch.arange(_extent(x)).as_strided(x.shape, x.stride()).reshape(-1)
        return inside * x.element_size() + x.data_ptr()

    return bool(torch.isin(places(a), places(b)).any())


def _extent(x: Tensor) -> int:
    """The number of elements from the first one in memory to the last one."""
    return sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) + 1


def _kind(tensor: Tensor) -> str:
    """What a tensor is whose values are not those of one piece of memory; an empty text for any other."""
    if nn.parameter.is_lazy(tensor):
        return "uninitialised"
    if tensor.is_nested:
        return "nested"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "quantized" if tensor.is_quantized else ""


def _expanded(tensor: Tensor) -> list[int]:
    """The dimensions along which all elements are one in memory."""
    steps = tensor.stride()
    return (
        [dim for dim, step in enumerate(steps) if step == 0 and tensor.shape[dim] > 1] if 0 in steps else []
    )


def _shape(tensor: Tensor) -> str:
    kind = _kind(tensor)
    if kind in ("uninitialised", "nested"):  # neither has a shape
        return kind
    if not kind:
        kind = "on meta" if tensor.is_meta else "expanded" if _expanded(tensor) else ""
    return f"{list(tensor.shape)} {kind}".rstrip()
