"""The engine: it decides when a bucket is sent and in what memory it lies. The native part is csrc/engine."""

from gossamer.autotune import Autotune, Tuned, autotune_of
from gossamer.engine.admission import Members, refusal_of, tensors_in
from gossamer.engine.agree import (
    broadcast_everywhere,
    broadcast_tensors,
    mean_tensors,
    require_equal,
    require_same_model,
)
from gossamer.engine.background import Background
from gossamer.engine.connections import Connections, connect, device_of
from gossamer.engine.engine import Engine, report_all, weights_in_buckets
from gossamer.engine.face import Face, refuse_assigned_parameters
from gossamer.engine.join import ShadowHook, UnevenInputs
from gossamer.engine.plan import plan_buckets
from gossamer.engine.rounds import Rounds
from gossamer.engine.steps import optimizers_of
from gossamer.engine.unsent import Unsent
from gossamer.engine.worker import Worker, agree_on_finite, weak_call

__all__ = [
    "Autotune",
    "Background",
    "Connections",
    "Engine",
    "Face",
    "Members",
    "Rounds",
    "ShadowHook",
    "Tuned",
    "UnevenInputs",
    "Unsent",
    "Worker",
    "agree_on_finite",
    "autotune_of",
    "broadcast_everywhere",
    "broadcast_tensors",
    "connect",
    "device_of",
    "mean_tensors",
    "optimizers_of",
    "plan_buckets",
    "refusal_of",
    "refuse_assigned_parameters",
    "report_all",
    "require_equal",
    "require_same_model",
    "tensors_in",
    "weak_call",
    "weights_in_buckets",
]
