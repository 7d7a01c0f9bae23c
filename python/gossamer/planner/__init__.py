"""`gossamer plan`: step times on a network, predicted before anything is trained. See docs/planner.md."""

from gossamer.codec import CodecSpeed
from gossamer.facts import KINDS, Method, Settings
from gossamer.planner.measuring import Measured, compute_of, measure
from gossamer.planner.methods import METHODS, Sharded, Stock
from gossamer.planner.network import Network
from gossamer.planner.predict import Prediction, predict, predict_all
from gossamer.planner.problem import Problem, of_module, transformer
from gossamer.planner.speeds import Speeds

__all__ = [
    "KINDS",
    "METHODS",
    "CodecSpeed",
    "Measured",
    "Method",
    "Network",
    "Prediction",
    "Problem",
    "Settings",
    "Sharded",
    "Speeds",
    "Stock",
    "compute_of",
    "measure",
    "of_module",
    "predict",
    "predict_all",
    "transformer",
]
