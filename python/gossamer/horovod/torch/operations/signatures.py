"""``takes_arguments_of``: forms of one operation that differ in their names alone share one argument list."""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def takes_arguments_of(
    form: Callable[_Arguments, Any],
) -> Callable[[Callable[..., _Result]], Callable[_Arguments, _Result]]:
    """Decorator. The function has the parameters of `form`: for help(), inspect, editors and type checkers."""

    def decorate(function: Callable[..., _Result]) -> Callable[_Arguments, _Result]:
        result = inspect.signature(function).return_annotation
        shown: Any = function
        shown.__signature__ = inspect.signature(form).replace(return_annotation=result)
        return function

    return decorate
