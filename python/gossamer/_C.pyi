"""The native core, as Python calls it. The files in csrc/python define it.

test_native_stub.py compares this file with the extension: a binding without an entry here fails, and so does the
reverse.
Every call that can block releases the GIL. Errors are those of gossamer.errors.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import ClassVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, GradBucket, Reducer, Store
from torch.futures import Future

with_cuda: bool
"""Whether the extension was built with CUDA kernels."""

# --- communicators: csrc/comm ---

class ReduceOp:
    """How a collective combines the values of the ranks."""

    SUM: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Pending:
    """One operation in flight."""

    def wait(self) -> None:
        """Return when the result may be used: block the host on the CPU, the current stream on a GPU.

        Raises:
            CommError: The operation failed. The text names the operation, its size and the ranks that are silent.
        """

class Communicator:
    """Moves contiguous tensors on `device` between the ranks of one group.

    Every call is collective: all ranks make it in the same order, with equal shapes and dtypes.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def bytes_sent(self) -> int:
        """Payload bytes that this rank has handed to other ranks."""

    @property
    def bytes_received(self) -> int:
        """Payload bytes that other ranks have handed to this one."""

    @property
    def chunks(self) -> int:
        """Parts of a sum, each computed by one rank: `size`, or fewer where sums go by hosts."""

    @property
    def shares_memory(self) -> bool:
        """Whether rows travel through memory that all ranks read in place."""

    def all_reduce(self, x: Tensor, op: ReduceOp = ...) -> Pending:
        """Replace x by its sum over the ranks, or by the MAX, MIN or PRODUCT, in place."""

    def reduce_scatter(self, out: Tensor, x: Tensor, op: ReduceOp = ...) -> Pending:
        """Write this rank's part of the sum of x into out. x holds `size` parts, each as large as out."""

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """Write the x of rank 0, 1, ... into out, one after the other."""

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        """Send part j of x to rank j, and receive part i of out from rank i. All parts are equal in size."""

    def all_to_all_unequal(
        self, out: Tensor, x: Tensor, out_bytes: Sequence[int], x_bytes: Sequence[int]
    ) -> Pending:
        """Send x_bytes[i] bytes of x to rank i, and receive out_bytes[i] bytes of out from it.

        Both tensors are uint8 [n] and hold the parts in rank order.
        """

    def broadcast(self, x: Tensor, source: int = 0) -> Pending:
        """Replace x by the x of rank `source`, in place."""

    def exchange(self, out: Tensor, x: Tensor, to: int, source: int) -> Pending:
        """Send x to rank `to`, and receive out from rank `source`."""

    def exchange_all(self, swaps: Sequence[tuple[Tensor, Tensor, int, int]]) -> Pending:
        """Start several exchanges (out, x, to, source) at once. None waits for another one on the same link."""

    def allocate(self, bytes: int) -> Tensor:
        """Return zeros, uint8 [bytes], 64-byte aligned, in memory that the group's wire can reach."""

    @property
    def queues_on_device(self) -> bool:
        """Whether operations are only queued on the device: the host does not wait for other ranks."""

    def wait_on_host(self, timeout: timedelta) -> None:
        """Let each later operation on an accelerator end on the device before its wait() returns.

        wait() raises CommError if the group fails meanwhile, or the operation takes longer than `timeout`. What is in
        flight is aborted then, and its tensors hold anything. Not collective.
        """

    def announce_failure(self, what: str = ...) -> None:
        """Tell the ranks that wait for this rank, as far as the group can, that they wait in vain. Not collective.

        Args:
            what: What this rank has done. The errors of the other ranks say "rank 1 has <what>".
        """

class ByHosts(Communicator):
    """A communicator whose sums go in two levels: inside each host, then from host to host."""

    def __init__(
        self,
        world: Communicator,
        inside: Communicator,
        across: Communicator | None,
        hosts: Sequence[Sequence[int]],
        back: Communicator | None = None,
    ) -> None: ...
    @property
    def world(self) -> Communicator:
        """All ranks, without levels."""

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host."""

    @property
    def bytes_across(self) -> int:
        """Bytes that sums of this rank have sent to other hosts."""

def c10d_communicator(
    backend: Backend, device: torch.device, store: Store | None, name: str, ranks: Sequence[int] = ...
) -> Communicator: ...
def symmetric_communicator(
    other: Communicator, control: Communicator, store: Store, timeout_ms: int
) -> Communicator: ...
def host_memory_communicator(
    other: Communicator, host: Communicator, store: Store, timeout_ms: int
) -> Communicator: ...
def unreached_peers(comm: Communicator) -> list[int]: ...

class AsideStore:
    """A clone of a store. Its requests run on a native thread, so that a waiting caller can be told to leave."""

    def __init__(self, store: Store) -> None: ...
    def add(self, key: str, value: int) -> int: ...
    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: Sequence[str]) -> bool: ...
    def get(self, keys: Sequence[str]) -> list[str]: ...
    @staticmethod
    def leave() -> None:
        """End every wait in every AsideStore of this process, now and later."""

class GossamerBackend(Backend):
    """The c10d backend "gossamer": shared memory inside a host, Gloo between hosts."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, settings: str = ""
    ) -> None: ...
    @property
    def options(self) -> Backend.Options: ...
    @property
    def hosts(self) -> list[list[int]]: ...
    @property
    def memory_bytes(self) -> int: ...
    def allocate(self, bytes: int) -> Tensor: ...
    def connect_elsewhere(
        self, device_type: str, connect: Callable[[Store, int, int, timedelta, torch.device], Backend]
    ) -> None:
        """Tensors of this device type go to the backend that `connect` makes when the first of them comes."""
    def backend_of(self, device: torch.device) -> Backend:
        """Returns that backend."""

class CodecOptions(Backend.Options):
    """The codecs of a group's sums and gathers. gossamer.Options is its face."""

    def __init__(
        self,
        codec: CodecChoice | None,
        gather_codec: CodecChoice | None,
        min_bytes: int,
        hosts: Sequence[Sequence[int]] | None,
        text: str,
    ) -> None: ...
    @property
    def text(self) -> str: ...

class CodecBackend(GossamerBackend):
    """The backend "gossamer" whose sums and gathers of floats go through codecs."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        options: CodecOptions,
        connect: Callable[
            [Store, int, int, timedelta, Sequence[Sequence[int]] | None, torch.device], Communicator
        ],
    ) -> None: ...
    @property
    def comm(self) -> Communicator: ...
    @property
    def device_comm(self) -> Communicator | None:
        """The same between an accelerator's tensors; None until an operation of theirs is encoded."""

# --- collectives: csrc/collectives, csrc/route ---

class CodecChoice:
    """A native codec with its settings. The tensor brings the dtype."""

    def __init__(self, kind: int, block: int, stochastic: bool = False, seed: int = 0) -> None: ...
    @property
    def is_divisible(self) -> bool:
        """Whether pieces of a row are encoded as they are within it: no statistics of whole rows, no random numbers."""
    @property
    def key(self) -> int:
        """The random key of an encoding outside of collectives, as torch.ops.gossamer takes it."""

def all_reduce(
    comm: Communicator,
    codec: CodecChoice,
    x: Tensor,
    scale: float,
    nonce: int = 0,
    error: Tensor | None = None,
) -> None:
    """Replace x by scale * its sum over the ranks, in place. `error` is the memory of error feedback."""

def reduce_scatter(
    comm: Communicator, codec: CodecChoice, out: Tensor, x: Tensor, scale: float, nonce: int = 0
) -> None: ...
def all_gather(comm: Communicator, codec: CodecChoice, out: Tensor, x: Tensor, nonce: int = 0) -> None: ...
def sum(comm: Communicator, x: Tensor) -> bool:
    """Replace x by its exact sum. False, and nothing has happened, where x is not contiguous."""

def sum_in_place(comm: Communicator, x: Tensor, scale: float) -> bool: ...
def sum_by_hosts(
    comm: ByHosts,
    x: Tensor,
    scale: float,
    block: int,
    error: Tensor | None,
    across: Callable[[Communicator, Tensor, float, Tensor | None], object],
) -> None:
    """Sum x in two levels. across(communicator, part, scale, error) sums one part over the hosts, in place."""

def swap_rows(comm: Communicator, out: Tensor, x: Tensor) -> None: ...
def gather_rows(comm: Communicator, out: Tensor, x: Tensor) -> None: ...
def piece_bytes(comm: Communicator, /) -> int: ...
def instruction_set() -> str: ...
def select_instruction_set(name: str, /) -> bool: ...

# --- the engine: csrc/engine ---

class Placement:
    """Where the elements of a bucket's parameters lie in its flat memory.

    Args:
        pieces: For each parameter a list of (begin in the parameter, number of elements, offset in the flat memory).
        numel: Elements of the flat memory.
    """

    def __init__(self, pieces: Sequence[Sequence[Sequence[int]]], numel: int) -> None: ...
    @staticmethod
    def in_turn(params: Sequence[Tensor], block: int, alignment: int) -> Placement:
        """Place the parameters one behind the other, each at a multiple of 64 bytes and of `block` elements."""

    @property
    def numel(self) -> int: ...

class Bucket:
    """Parameters that travel together: one dtype, one device, and flat memory for each of their fields."""

    def __init__(
        self,
        index: int,
        indices: Sequence[int],
        params: Sequence[Tensor],
        names: Sequence[str],
        placement: Placement,
        dtype: torch.dtype | None = None,
    ) -> None: ...
    @property
    def index(self) -> int: ...
    @property
    def numel(self) -> int:
        """Elements of each flat field, with padding."""

    @property
    def bytes(self) -> int:
        """Bytes of the gradients, with padding."""

    @property
    def params(self) -> list[Tensor]: ...
    @property
    def names(self) -> list[str]: ...
    @property
    def param_indices(self) -> list[int]:
        """Indices of the parameters in the engine's list."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the gradients."""

    @property
    def step(self) -> int:
        """Synchronised backward passes before the current one."""

    @property
    def fields(self) -> list[str]: ...
    def add_field(
        self, field: str, comm: Communicator | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return the flat memory [numel] of a field; make it, filled with zeros, if the bucket has none.

        Args:
            field: "grad", "weight", or a name of the algorithm's choice.
            comm: The memory is such as the communicator's wire can reach. Collective where it is given.
            dtype: The dtype of the gradients by default.
        """

    def flat(self, field: str = "grad") -> Tensor:
        """Return the flat memory [numel] of a field."""

    def views(self, field: str = "grad") -> list[Tensor]:
        """Return one view of the flat memory for each parameter, in its shape."""

    def value(self, field: str, position: int) -> Tensor:
        """Return a copy of what the field holds of one parameter, in its shape."""

    def set_value(self, field: str, position: int, value: Tensor) -> None: ...
    def adopt_weights(self) -> None:
        """Move the parameters into the memory of the field "weight". Who holds the memory of one keeps its values."""

    @property
    def strayed(self) -> bool:
        """Whether a parameter has been given other memory than that of the field "weight"."""

    def weights_held(self) -> bool:
        """Return whether a parameter has been given other memory, and something holds its memory of the field."""

    def clear_padding(self, field: str) -> None:
        """Zero what lies between the parameters."""

    def set_aside(self, field: str) -> list[tuple[Tensor, Tensor]]:
        """Zero the field where this rank has no gradient; return pairs (view, its former content)."""

def grad_bucket(bucket: Bucket, buffer: Tensor, count: int) -> GradBucket: ...

class BucketWork:
    """What the engine does with a bucket whose gradients are complete."""

class NativeAllReduce(BucketWork):
    """The group's own all-reduce."""

    def __init__(self, average: bool) -> None: ...

class ScaledAllReduce(BucketWork):
    """The group's own sum between two factors."""

    def __init__(self, prescale: float, postscale: float) -> None: ...

class CodecAllReduce(BucketWork):
    """The two-shot all-reduce through a codec; with error feedback where the bucket has a field "error"."""

    def __init__(self, codec: CodecChoice, average: bool) -> None: ...

class TimedWork(BucketWork):
    """Another work, and the time that each of its runs takes."""

    def __init__(self, work: BucketWork) -> None: ...
    def take_seconds(self) -> list[float]:
        """Return the seconds of each run since the last call."""

class NoWork(BucketWork):
    def __init__(self) -> None: ...

class AgreeOnFinite(BucketWork):
    """Turns a NaN or Inf in one rank's gradients into a NaN on all ranks."""

    def __init__(self) -> None: ...
    def run(self, comm: Communicator, bucket: Bucket) -> None: ...

class PythonWork(BucketWork):
    """Calls callable(bucket) on the engine's worker thread."""

    def __init__(self, callable: Callable[[Bucket], object]) -> None: ...

class Executor:
    """One native thread that runs tasks in the order in which they were submitted."""

    def __init__(self, device: torch.device, until_done: Communicator | None = None) -> None:
        """With `until_done`, a communicator of the tasks, a task has ended once the device has done what it queued."""

    def submit(self, task: Callable[[], object]) -> int:
        """Return the task's number, from 1."""

    def busy(self) -> bool:
        """Whether a task has not ended."""

    def running(self) -> bool:
        """Whether a task has not run."""

    def wait_until_run(self, last: int) -> None:
        """Return when the tasks up to the number `last` have run. Their errors stay for wait()."""

    @property
    def recorder(self) -> Recorder: ...
    def wait(self, last: int | None = None) -> None:
        """Return when all tasks have ended, or those up to the number `last`; raise the first error."""

    def finish(self) -> None:
        """Let all tasks run, and then end the thread. Returns at once."""

    def stop(self) -> None: ...

class Worker:
    """The worker of one engine: an executor whose errors say rank and step."""

    def submit(self, task: Callable[[], object], what: str) -> None: ...
    def wait(self) -> None: ...
    def fails_with(self, comm: Communicator) -> None:
        """Name another communicator of this model, which is told of failures too."""

    def check_alive(self) -> None:
        """Raise the error that ended the engine, if one did."""

    def give_up(self, why: str, announce: bool) -> None: ...

class Hooks:
    """Hooks on autograd's gradient accumulators."""

    def set_static_graph(self) -> None: ...
    def begin_forward(self) -> None: ...
    def survey(self) -> list[int]:
        """Return the indices of the trainable parameters outside of the plan."""

    @property
    def left_out(self) -> list[int]:
        """Indices of the planned parameters that no backward has reached since begin_forward()."""

    @property
    def left_out_somewhere(self) -> bool:
        """Whether any rank has left out a parameter."""

class Flight:
    """Sends complete buckets in the order of the plan."""

    def keep_gradients(self, keep: bool) -> None: ...
    def kept_gradients(self) -> dict[int, Tensor]:
        """Return the gradients [numel] of each bucket index as they were before they were sent."""

    def keep_for_redo(self, keep: bool) -> None:
        """Keep in each backward what is needed to send that backward again."""

    def before(self) -> dict[int, tuple[dict[str, Tensor], bool]]:
        """Return the fields of the buckets whose work has begun in this backward, from before it, and if it is done."""

class Ending:
    """What the end of a backward means."""

class Lockstep(Ending):
    """The ranks agree at the end of each backward."""

    def set_on_end(self, on_end: Callable[[], object] | None) -> None: ...
    def set_on_lost(self, on_lost: Callable[[bool, str], bool]) -> None:
        """Call on_lost(counted, why) when the group fails in a backward. True: the backward has been ended."""

    @property
    def wish(self) -> bool:
        """Whether this rank wishes for something that all ranks then do."""

    @wish.setter
    def wish(self, arg1: bool, /) -> None: ...
    @property
    def wished(self) -> bool:
        """Whether any rank did, as of the last backward that ended."""

    @property
    def optimizer_steps(self) -> int: ...
    @optimizer_steps.setter
    def optimizer_steps(self, arg1: int, /) -> None: ...

class Alone(Ending):
    """Each rank ends its backwards without the others."""

    def set_listener(
        self, on_gradient: Callable[[int], object], on_end: Callable[[list[int]], object]
    ) -> None: ...

class Rounds(Ending):
    """A call ends what several backwards have brought."""

    def set_passes(self, passes: int) -> None: ...
    @property
    def under_way(self) -> bool: ...

class Join:
    """Uneven inputs: a rank without input takes part in the backwards of the others."""

    def start(
        self, mean_of_active: bool, raise_early: bool, on_begin: Callable[[], bool] | None = None
    ) -> None: ...
    def end(self) -> None: ...
    def count(self, samples: float) -> None:
        """Tell the samples behind this rank's gradients in the next synchronised backward."""

    @property
    def ended_early(self) -> bool: ...

def flat_memory_of(weight: Tensor) -> Tensor | None:
    """Return the view of flat memory that a weight in a bucket is; None for other tensors.

    The storage of the view is the whole memory. That of the weight is its own part, which tells who holds it.
    """

def inside_backward() -> bool:
    """Whether the calling thread is in a backward, such as a recomputed forward."""

def inside_backward_of_all() -> bool:
    """Whether the calling thread is in a backward that adds to param.grad. torch.autograd.grad does not."""

def owners_of(params: Sequence[Tensor]) -> list[Engine]:
    """The engines that train these parameters, each once."""

class Engine:
    """The engine of one model. Its parts are attributes, and each keeps the engine alive."""

    def __init__(
        self,
        comm: Communicator,
        control: Communicator,
        params: Sequence[Tensor],
        names: Sequence[str],
        on_late: Callable[[], object],
        on_order: Callable[[list[int]], object],
    ) -> None: ...
    def clear_buckets(self) -> None: ...
    def append_bucket(self, bucket: Bucket, work: BucketWork) -> None: ...
    def resume(self, step: int, optimizer_steps: int) -> None: ...
    def close(self, why: str = "") -> None:
        """End it. Errors of a later use say `why`."""

    @property
    def closed(self) -> bool: ...
    @property
    def sync(self) -> bool:
        """Whether the backwards that begin from now on communicate."""

    @sync.setter
    def sync(self, arg1: bool, /) -> None: ...
    def set_output_sync(self, sync: bool) -> None: ...
    def end_by(self, ending: Ending) -> None: ...
    def output_gradient(self) -> None: ...
    def set_on_begin(self, on_begin: Callable[[], None]) -> None: ...
    def abandon(self) -> None:
        """Complete the communication of a backward that raised, so that no rank waits for this one."""

    def end_round(self) -> None: ...
    def shadow(self) -> bool:
        """Take part in one backward of the other ranks with zeros. False, and nothing was sent, if none has input."""

    def redo(self) -> None:
        """Send the gradients that the parameters have, as one synchronised backward."""

    def capture_refusal(self) -> str:
        """Why a CUDA graph cannot hold a step of this engine; empty if it can."""

    def check_capture(self) -> None: ...
    @property
    def worker(self) -> Worker: ...
    @property
    def hooks(self) -> Hooks: ...
    @property
    def flight(self) -> Flight: ...
    @property
    def join(self) -> Join: ...
    @property
    def lockstep(self) -> Lockstep: ...
    @property
    def alone(self) -> Alone: ...
    @property
    def rounds(self) -> Rounds: ...
    @property
    def step(self) -> int:
        """Synchronised backward passes that have ended."""

    @property
    def recorder(self) -> Recorder: ...
    def activity(self) -> list[tuple[str, int, float]]: ...
    def tell_stall(self, facts: str, stop: bool) -> None: ...

# --- the hook for stock DDP: csrc/hook ---

class CommHook:
    """A communication hook of torch's DDP over the engine's bucket works.

    Args:
        arrange: arrange(index, parameter numbers, gradient dtype, anew) returns the buckets and works for one of
            DDP's buckets. `anew`: DDP has other buckets now.
    """

    def __init__(
        self,
        comm: Communicator,
        control: Communicator,
        params: Sequence[Tensor],
        arrange: Callable[[int, list[int], torch.dtype, bool], Sequence[tuple[Bucket, BucketWork]]],
    ) -> None: ...
    def reduce_bucket(self, bucket: GradBucket) -> Future[Tensor]: ...
    def reduce_gradient(self, grad: Tensor, param: Tensor) -> Future[Tensor]: ...
    def register(self, reducer: Reducer) -> None: ...
    def wait(self) -> None: ...
    def forget(self) -> None: ...
    @property
    def steps(self) -> int:
        """Backward passes that have begun."""

    @steps.setter
    def steps(self, arg1: int, /) -> None: ...
    def close(self) -> None: ...

# --- operations matched by name: csrc/named, csrc/negotiate ---

class Stalled:
    """An operation that some ranks have submitted and others have not."""

    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float:
        """The time since the first rank submitted it."""

    @property
    def submitted(self) -> list[int]: ...
    @property
    def missing(self) -> list[int]: ...
    @property
    def call_site(self) -> str: ...

class NamedOperation:
    """One submitted operation, as its submitter sees it."""

    @property
    def name(self) -> str: ...
    def done(self) -> bool: ...
    def wait(self) -> None: ...
    @property
    def output(self) -> Tensor: ...
    @property
    def received_splits(self) -> list[int]:
        """alltoall: the rows that came from each rank."""

    @property
    def value(self) -> int:
        """join: the last rank. add_process_set: the id of the set."""

class NamedCollectives:
    """The named operations of one process set."""

    def __init__(
        self,
        control: Backend,
        devices: Mapping[str, Communicator],
        ranks: Sequence[int],
        *,
        near: Communicator | None = None,
        fusion_bytes: int,
        fuse_groups: bool,
        cache_capacity: int,
        window_us: int,
        stall_warning_s: float,
        stall_shutdown_s: float,
        on_stall: Callable[[list[Stalled]], object] | None,
        on_event: Callable[[str, str, int, float], object] | None,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    def submit(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        names: Sequence[str],
        in_place: bool = False,
        op: int = 1,
        root: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        splits: Sequence[int] | None = None,
        group: str | None = None,
        call_site: str = "",
    ) -> list[NamedOperation]: ...
    def barrier(self, call_site: str = "") -> NamedOperation: ...
    def join(self, call_site: str = "") -> NamedOperation: ...
    def refuse_join(self, reason: str, call_site: str = "") -> NamedOperation: ...
    def add_process_set(self, ranks: Sequence[int], call_site: str = "") -> NamedOperation: ...
    def remove_process_set(self, id: int, call_site: str = "") -> NamedOperation: ...
    def refuse(self, kind: str, name: str, reason: str, call_site: str = "") -> None: ...
    def shutdown(self) -> None: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...
    def statistics(self) -> dict[str, int]: ...

def adasum(comm: Communicator, x: Tensor, lengths: Sequence[int], torch_ops: bool = False) -> None: ...

# --- what a worker does, and how long it takes: csrc/observe ---

class Recorder:
    """Counters of the last 100 steps, and what is queued or runs now. Times are nanoseconds of a steady clock."""

    @property
    def number(self) -> int:
        """From 1, in the order in which this process made its recorders."""

    def activity(self) -> list[tuple[str, int, float]]:
        """Return (what, bucket or -1, since when in seconds of the Unix epoch) of what waits or runs now."""

    def steps(self) -> list[tuple[int, int, int, int, list[int]]]:
        """Return (wall, communication, exposed, number of waits, communication of each bucket) of each step."""

    def totals(self) -> tuple[int, int, int, int]:
        """Return (steps, wall, communication, exposed) since the last clear()."""

    def clear(self) -> None: ...

def now_ns() -> int: ...
def set_counting(on: bool) -> None: ...
def tracing() -> bool: ...
def start_trace(capacity: int) -> None: ...
def stop_trace() -> tuple[list[tuple[str, str, int, bool, int, int, int, int, int]], int]:
    """Return the events and the number of older events that they replaced.

    An event is (name, category, thread, instant, bucket or -1, step or -1, bytes, begin_ns, end_ns).
    """

def add_span(name: str, begin_ns: int, step: int) -> None: ...
