"""The engine: it decides when a bucket is sent and in what memory it lies. The native part is csrc/engine."""

from gossamer.autotune import Autotune, Tuned, autotune_of
from gossamer.engine.admission import Members, refusal_of, tensors_in
from gossamer.engine.agree import (
    broadcast_bytes,
    broadcast_everywhere,
    broadcast_state,
    broadcast_tensors,
    mean_tensors,
    require_equal,
    require_same_model,
)
from gossamer.engine.background import Background
from gossamer.engine.connections import Connections, connect, device_of
from gossamer.engine.engine import Engine
from gossamer.engine.face import Face, refuse_assigned_parameters
from gossamer.engine.join import ShadowHook, UnevenInputs
from gossamer.engine.living import (
    claimants,
    count,
    report_all,
    require_untrained,
    take_over,
    weights_in_buckets,
)
from gossamer.engine.merging import Merge, merge_dicts
from gossamer.engine.periods import BySteps, ByTime
from gossamer.engine.plan import plan_buckets
from gossamer.engine.rounds import Rounds
from gossamer.engine.steps import optimizers_of
from gossamer.engine.unsent import Unsent
from gossamer.engine.worker import Worker, agree_on_finite, weak_call

__all__ = ["Engine", "Face", "Members", "plan_buckets", "refusal_of", "refuse_assigned_parameters"]
__all__ += ["Autotune", "Merge", "Tuned", "autotune_of", "merge_dicts", "report_all", "weights_in_buckets"]
__all__ += ["BySteps", "ByTime", "claimants", "count", "require_untrained", "take_over"]
__all__ += ["Background", "Unsent", "Worker", "agree_on_finite", "optimizers_of", "tensors_in", "weak_call"]
__all__ += ["Connections", "Rounds", "ShadowHook", "UnevenInputs", "connect", "device_of"]
__all__ += [
    "broadcast_bytes",
    "broadcast_everywhere",
    "broadcast_state",
    "broadcast_tensors",
    "mean_tensors",
    "require_equal",
    "require_same_model",
]
