"""``TorchState``: models, optimizers and samplers, each kept by a handler; anything else as plain objects."""

import copy
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer.horovod.common.elastic import ObjectState
from gossamer.horovod.torch.elastic.sampler import ElasticSampler
from gossamer.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from gossamer.horovod.torch.mpi_ops import rank


class StateHandler:
    """Saves and restores one kind of object by copies of its state_dict(). A subclass defines sync()."""

    def __init__(self, value: Any) -> None:
        self.value: Any = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # Optimizers keep the tensors that they are given.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        raise NotImplementedError(f"{type(self).__name__}.sync: a handler must say how it is synchronised")

    def set_value(self, value: Any) -> None:
        """Replaces the object, and saves the state of the new one."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Keeps an nn.Module."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """Keeps an Optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    """Keeps an ElasticSampler."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0))
        self.save()


_handler_registry: list[tuple[type, type[StateHandler]]] = [
    (nn.Module, ModelStateHandler),
    (Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Returns pairs of a class and the handler of its objects. The first pair that fits an object counts."""
    return _handler_registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replaces the registry, for states that are made afterwards."""
    global _handler_registry
    _handler_registry = registry


class TorchState(ObjectState):
    """A state whose attributes are a model, an optimizer and other objects.

    Args:
        model: kept by its state_dict().
        optimizer: kept by its state_dict().
        kwargs: further attributes. Modules, optimizers and samplers are kept by their state_dict() too, others as
            plain objects.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **kwargs: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        self._handlers: dict[str, StateHandler] = {
            name: handler for name, value in kwargs.items() if (handler := _handler_of(value))
        }
        for name, handler in self._handlers.items():
            object.__setattr__(self, name, handler.value)
        plain = {name: value for name, value in kwargs.items() if name not in self._handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **plain)

    def save(self) -> None:
        self._each("save")
        super().save()

    def restore(self) -> None:
        self._each("restore")
        super().restore()

    def sync(self) -> None:
        self._each("sync")
        super().sync()

    def _each(self, what: str) -> None:
        for handler in self._handlers.values():
            getattr(handler, what)()

    def reset(self) -> None:
        """Lets samplers divide what is left among the current workers."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _handler_registry if isinstance(value, kind)), None)
