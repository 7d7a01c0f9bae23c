# The native module for type checkers: its classes and functions are described in csrc/, by pybind11.
from typing import Any

with_cuda: bool

def __getattr__(name: str) -> Any: ...
