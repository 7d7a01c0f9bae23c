"""Forms of one operation that differ in their names alone, or in that they take a group, share one argument list.

The decorators show it to help(), inspect, editors and type checkers.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def takes_arguments_of(
    form: Callable[_Arguments, Any],
) -> Callable[[Callable[..., _Result]], Callable[_Arguments, _Result]]:
    """Decorator. The function has the parameters of `form`."""
    return lambda function: _shown(function, inspect.signature(form))


def takes_group_and_arguments_of(
    form: Callable[Concatenate[Tensor, _Arguments], Any],
) -> Callable[[Callable[..., _Result]], Callable[Concatenate[Sequence[Tensor], _Arguments], _Result]]:
    """Decorator. The function has its own first parameter, and the further ones of `form`."""

    def decorate(function: Callable[..., _Result]) -> Any:
        first = next(iter(inspect.signature(function).parameters.values()))
        _, *others = inspect.signature(form).parameters.values()
        return _shown(function, inspect.Signature([first, *others]))

    return decorate


def _shown(function: Any, signature: inspect.Signature) -> Any:
    result = inspect.signature(function).return_annotation
    function.__signature__ = signature.replace(return_annotation=result)
    return function
