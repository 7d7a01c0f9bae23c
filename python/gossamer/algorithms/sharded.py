"""ZeRO-1: each rank keeps the optimizer's state of its share of the weights, and steps that share alone.

The method is that of Rajbhandari et al. 2020 (arXiv:1910.02054), stage 1. Gradients are reduce-scattered, through a
codec if one is given; then each rank steps its share, and the changes of the weights are gathered, through another
codec with error feedback. So all ranks hold equal weights, and send what a compressed all-reduce would send.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gossamer import _C, optim
from gossamer.algorithms.base import Algorithm, require_codec, require_in_optimizer
from gossamer.codec import Codec, Identity, Int8
from gossamer.collectives import all_gather, all_reduce, reduce_scatter
from gossamer.comm import Communicator
from gossamer.engine import broadcast_state
from gossamer.errors import ConfigError
from gossamer.facts import EXACT, ROUNDED, Job, Messages, Method, Traffic, Trial

_State = dict[int, dict[str, Any]]  # of whole parameters, by their place in the optimizer


@dataclass
class _Piece:
    """The part of one parameter that lies in this rank's share of a bucket.

    Args:
        index: the parameter's place in the optimizer.
        begin, end: the part, in elements of the parameter's memory.
        inside: the same part, in elements of the share.
        leaf: a view of the weights, which the inner optimizer steps.
        gradient: its mean gradient.
    """

    index: int
    param: nn.Parameter
    begin: int
    end: int
    inside: slice
    leaf: nn.Parameter
    gradient: Tensor


@dataclass
class _Share:
    """One rank's share of a bucket.

    Args:
        gradient: the mean gradients of the share [numel / size].
        unsent: what the codec has left out of the changes of the share, or None.
    """

    bucket: _C.Bucket
    begin: int
    end: int
    gradient: Tensor
    unsent: Tensor | None
    before: Tensor | None = None  # the weights before a step
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def weights(self) -> Tensor:
        return self.bucket.flat("weight")[self.begin : self.end]


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is divided among the ranks, for gs.DataParallel(..., algorithm="sharded").

    Its param_groups hold whole parameters until a model is wrapped, and then this rank's pieces of them [elements],
    with their gradients. Learning rates, schedulers and GradScaler work as with any optimizer. To limit the norm of the
    gradients, call clip_grad_norm_() of this class.

    Args:
        optimizer_class: a class of torch.optim or gs.optim that changes each element by its own gradient and state.
        params: parameters, or groups of them.
        elementwise: your word that another class does so too.
        defaults: further arguments of the class, such as lr.

    Raises:
        ConfigError: the class is not known to be elementwise (LBFGS, Muon, Adafactor, SparseAdam, LAMB).
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Any,
        *,
        elementwise: bool = False,
        **defaults: Any,
    ) -> None:
        known = (*optim.ELEMENTWISE, optim.SGD, optim.Adam, optim.AdamW)
        if not elementwise and optimizer_class not in known:
            raise ConfigError(
                f"ShardedOptimizer: optimizer_class must be elementwise, one of "
                f"{', '.join(kind.__name__ for kind in optim.ELEMENTWISE)} of torch.optim or gs.optim, got "
                f"{getattr(optimizer_class, '__name__', optimizer_class)}; if a class of your own is, pass "
                f"elementwise=True"
            )
        self._inner = optimizer_class(params, **defaults)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self._whole: list[list[nn.Parameter]] = [list(group["params"]) for group in self._inner.param_groups]
        self._shares: list[_Share] | None = None
        self._comm: Communicator | None = None
        self._loaded: dict[str, Any] | None = None  # before the model is wrapped
        self._consolidated: dict[str, Any] | None = None
        self._stepped = False  # whether this rank's share of the state is not that of a new optimizer
        self._follow()

    def _follow(self) -> None:
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's share; the wrapped model then gathers the others'. Return the closure's loss, or None.

        Raises:
            ConfigError: no model is wrapped with algorithm="sharded" and this optimizer.
        """
        if self._shares is None:
            raise ConfigError(
                "ShardedOptimizer: wrap the model first, by gs.DataParallel(model, optimizer, algorithm='sharded')"
            )
        self._consolidated, self._stepped = None, True
        return self._inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, for the whole parameters and this rank's pieces."""
        for param in self._params:
            if param.grad is not None:
                if set_to_none:
                    param.grad = None
                else:
                    param.grad.detach_().zero_()
        for group in self.param_groups:
            for piece in group["params"]:
                piece.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all ranks' pieces so that their common norm is at most max_norm. Collective.

        torch.nn.utils.clip_grad_norm_ would see the whole parameters, whose gradients are NaN by then.

        Returns:
            the norm of the mean gradients before, equal on all ranks; infinite orders are supported too.

        Raises:
            ConfigError: no model is wrapped with this optimizer.
        """
        if self._shares is None or self._comm is None:
            raise ConfigError(
                "ShardedOptimizer.clip_grad_norm_: wrap the model first, with algorithm='sharded'"
            )
        gradients = [
            piece.leaf.grad for share in self._shares for piece in share.pieces if piece.leaf.grad is not None
        ]
        norms = [torch.linalg.vector_norm(each, norm_type, dtype=torch.float64) for each in gradients]
        own = torch.zeros(1, dtype=torch.float64, device=self._shares[0].gradient.device)
        if norms:
            own[0] = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        norm = torch.linalg.vector_norm(all_gather(own, group=self._comm), norm_type)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's
        for each in gradients:
            each.mul_(factor.to(each.dtype))
        return norm.to(torch.float32)

    # --- the state, whole ---

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Bring the state of all ranks to one of them, for state_dict() there. Collective.

        Args:
            to: the rank; None: every rank.
        """
        if self._shares is None:
            raise ConfigError("ShardedOptimizer.consolidate_state_dict: wrap the model first")
        state, unsent, _ = self._gathered(keep=to is None or self._rank == to)
        self._consolidated = self._as_state_dict(state, unsent) if to is None or self._rank == to else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as the class without shards would, after consolidate_state_dict().

        Any number of ranks can load it, and so can the class itself. `unsent`, in addition, is what the codec of the
        weights has left out.

        Raises:
            ConfigError: consolidate_state_dict() was not called since the last step, or for another rank.
        """
        if self._consolidated is not None:
            return self._consolidated
        if self._shares is None and not self._stepped:
            return self._loaded or self._as_state_dict({}, {})
        raise ConfigError(
            "ShardedOptimizer.state_dict: this rank has a share of the state; first let all ranks call "
            "consolidate_state_dict(to=RANK), or to=None for every rank, after the last step and before the model is "
            "closed"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state, as state_dict() of this class or of the class without shards returns it.

        Each rank keeps its share. Before a model is wrapped the whole state is kept until then.
        """
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != [len(params) for params in self._whole]:
            raise ConfigError(
                f"ShardedOptimizer.load_state_dict: the groups must have {[len(each) for each in self._whole]} "
                f"parameters, got {sizes}"
            )
        self._consolidated = None
        if self._shares is None:
            self._loaded, self._stepped = state_dict, False
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})
        else:
            self._cut(state_dict)

    @property
    def _params(self) -> list[nn.Parameter]:
        """The whole parameters, by their place in the optimizer."""
        return [param for params in self._whole for param in params]

    @property
    def _rank(self) -> int:
        assert self._comm is not None
        return self._comm.rank

    def _as_state_dict(self, state: _State, unsent: dict[int, Tensor]) -> dict[str, Any]:
        groups, begin = [], 0
        for group, params in zip(self.param_groups, self._whole, strict=True):
            indices = list(range(begin, begin + len(params)))
            groups.append({**group, "params": indices})
            begin += len(params)
        whole: dict[str, Any] = {"state": state, "param_groups": groups}
        return whole | {"unsent": unsent} if unsent else whole

    @torch.no_grad()
    def _gathered(self, *, keep: bool) -> tuple[_State, dict[int, Tensor], dict[int, Tensor]]:
        """Return the state, what is unsent, and the gradients of all whole parameters, on the CPU, if `keep`.

        Collective.
        """
        assert self._shares is not None
        assert self._comm is not None
        own = []
        for share in self._shares:
            for piece in share.pieces:
                state = dict(self._inner.state.get(piece.leaf, {}))
                if share.unsent is not None:
                    state["unsent"] = share.unsent[piece.inside]
                if piece.leaf.grad is not None:
                    state["gradient"] = share.gradient[piece.inside]
                state = {key: each.cpu() if isinstance(each, Tensor) else each for key, each in state.items()}
                own.append((piece.index, piece.begin, piece.end, state))
        params = self._params
        whole: _State = {}
        device = self._shares[0].gradient.device
        for source in range(self._comm.size):
            pieces = broadcast_state(self._comm, lambda: own, source, take=keep, device=device)
            for index, begin, end, state in pieces if keep else []:
                into = whole.setdefault(index, {})
                for key, each in state.items():
                    if not isinstance(each, Tensor) or each.shape != (end - begin,):
                        into[key] = each
                        continue
                    param = params[index]
                    if key not in into:
                        into[key] = torch.empty_strided(param.shape, param.stride(), dtype=each.dtype)
                    _in_row(into[key])[begin:end] = each
        unsent, gradients = (
            {index: state.pop(key) for index, state in sorted(whole.items()) if key in state}
            for key in ("unsent", "gradient")
        )
        return {index: state for index, state in sorted(whole.items()) if state}, unsent, gradients

    def _divide(self, shares: list[_Share], comm: Communicator) -> None:
        """Take these shares, and what belongs to them of the shares before. Collective."""
        state, gradients = self._loaded or self._begun(), dict[int, Tensor]()
        if self._shares is None and self._stepped:
            raise ConfigError(
                "ShardedOptimizer: its state has ended with the model that was closed; give load_state_dict() what "
                "state_dict() returned before, or make a new optimizer"
            )
        if self._shares is not None:  # the plan of the buckets has changed
            whole, unsent, gradients = self._gathered(keep=True)
            state = self._as_state_dict(whole, unsent)
        self._loaded = None
        place = {param: index for index, param in enumerate(self._params)}
        for share in shares:
            _cut_share(share, place)
        by_index = {piece.index: piece for share in shares for piece in share.pieces}
        for group, params in zip(self.param_groups, self._whole, strict=True):
            indices = (place[param] for param in params)
            group["params"] = [by_index[index].leaf for index in indices if index in by_index]
        self._inner.state.clear()
        self._shares, self._comm, self._consolidated = shares, comm, None
        if state is not None:
            self._cut(state)
        for index, piece in by_index.items():
            if index in gradients:
                piece.gradient.copy_(_part_of(gradients[index], piece))
                piece.leaf.grad = piece.gradient

    def _begun(self) -> dict[str, Any] | None:
        """The state of a class that makes it before the first step."""
        state = {
            index: self._inner.state[each]
            for index, each in enumerate(self._params)
            if each in self._inner.state
        }
        return self._as_state_dict(state, {}) if state else None

    def _cut(self, whole: dict[str, Any]) -> None:
        """Keep this rank's share of a whole state."""
        assert self._shares is not None
        leaves = [leaf for group in self._inner.param_groups for leaf in group["params"]]
        places = {leaf: place for place, leaf in enumerate(leaves)}
        state: _State = {}
        for share in self._shares:
            for piece in share.pieces:
                if piece.index in whole["state"]:
                    state[places[piece.leaf]] = {
                        key: _part_of(each, piece) for key, each in whole["state"][piece.index].items()
                    }
                if share.unsent is not None and piece.index in whole.get("unsent", {}):
                    share.unsent[piece.inside] = _part_of(whole["unsent"][piece.index], piece)
        groups, begin = [], 0
        for group, saved in zip(self._inner.param_groups, whole["param_groups"], strict=True):
            count = len(group["params"])
            groups.append({**saved, "params": list(range(begin, begin + count))})
            begin += count
        self._inner.load_state_dict({"state": state, "param_groups": groups})
        self._follow()

    def _let_go(self) -> None:
        """The model is no longer wrapped: hold whole parameters again, without a state."""
        for group, params in zip(self.param_groups, self._whole, strict=True):
            group["params"] = list(params)
        self._inner.state.clear()
        self._shares, self._comm = None, None


def _in_row(x: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of its memory [numel]."""
    return x.as_strided((x.numel(),), (1,), x.storage_offset())


def _part_of(value: Any, piece: _Piece) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape != piece.param.shape:
        return value
    like = torch.empty_strided(piece.param.shape, piece.param.stride(), dtype=value.dtype)
    return _in_row(like.copy_(value))[piece.begin : piece.end].clone()


def _cut_share(share: _Share, place: dict[nn.Parameter, int]) -> None:
    """Make the pieces of the parameters that lie in a share."""
    bucket = share.bucket
    start = bucket.flat("weight").storage_offset()
    for param, view in zip(bucket.params, bucket.views("weight"), strict=True):
        at = view.storage_offset() - start
        begin, end = max(share.begin, at), min(share.end, at + view.numel())
        if begin >= end:
            continue
        inside = slice(begin - share.begin, end - share.begin)
        shape = (end - begin,) if param.dim() else ()  # the state of a scalar is made of scalars
        leaf = nn.Parameter(share.weights[inside].view(shape))
        gradient = share.gradient[inside].view(shape)
        share.pieces.append(_Piece(place[param], param, begin - at, end - at, inside, leaf, gradient))  # type: ignore


class Sharded(Algorithm):
    """ZeRO-1: a rank steps its share of the weights, so it keeps 1/n of the optimizer's state.

    After backward, the gradients of this rank's share are in the optimizer's pieces. param.grad of the model is NaN:
    no rank holds the mean of all gradients. DataParallel's optimizer must be one ShardedOptimizer.

    Args:
        codec: of the gradients, whose sums are in rank order. None: exact.
        gather_codec: of the changes of the weights. What it leaves out is sent with the next step's. None: exact.
    """

    name = "sharded"
    methods: ClassVar[tuple[Method, ...]] = (
        Method(
            "sharded",
            lambda _: Sharded(),
            EXACT,
            "keeps 1/n of the optimizer's state",
            "sharded.md",
            trial=Trial(),
        ),
        Method(
            "sharded_int8",
            lambda _: Sharded(Int8(), Int8()),
            ROUNDED,
            "keeps 1/n of the optimizer's state, and sends gradients and changes of weights in 8 bits",
            "sharded.md",
            trial=Trial(),
        ),
    )
    fields: ClassVar[tuple[str, ...]] = ("grad", "weight")
    needs_optimizer = True
    optimizer_class = ShardedOptimizer

    _optimizer: ShardedOptimizer

    def __init__(self, codec: Codec | None = None, gather_codec: Codec | None = None) -> None:
        for each in (codec, gather_codec):
            require_codec("Sharded", each)
            if each is not None and (each.feeds_back or each.gathers):
                raise ConfigError(
                    f"Sharded: a codec must have neither error feedback, which the weights have anyway, nor send whole "
                    f"rows, got {each!r}"
                )
        self.codec, self.gather_codec = codec, gather_codec

    @property
    def own_weights(self) -> bool:
        return False  # they are equal

    @classmethod
    def make_optimizer(
        cls, params: Iterable[Tensor], *, lr: float, warmup_steps: int
    ) -> torch.optim.Optimizer:
        return ShardedOptimizer(torch.optim.AdamW, params, lr=lr)

    def use_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().use_optimizers(optimizers)
        assert isinstance(optimizers[0], ShardedOptimizer)
        self._optimizer = optimizers[0]

    def traffic(self, messages: Messages, *, warm: bool = True) -> Traffic:
        def half(bucket: Any, codec: Codec | None) -> Job:
            job = messages.mean(bucket, codec or Identity())  # a reduce-scatter and an all-gather
            return Job(job.cost.times(0.5), job.cpu_s / 2, job.done, job.beside_s / 2, job.inside / 2)

        finite = messages.finite()
        sums = [half(bucket, self.codec).after(bucket.done) for bucket in messages.buckets]
        return Traffic(
            in_backward=[job + agreed for job, agreed in zip(sums, finite, strict=True)],
            after=[half(bucket, self.gather_codec) for bucket in messages.buckets],
        )

    def block(self) -> int:
        return math.lcm(*(codec.block for codec in (self.codec, self.gather_codec) if codec is not None))

    def alignment(self, comm: Communicator) -> int:
        return comm.size * math.lcm(self.block(), 8)

    def setup(self, comm: Communicator, buckets: list[_C.Bucket]) -> None:
        require_in_optimizer("Sharded", buckets, set(self._optimizer._params))
        self._comm = comm
        self._shares = {bucket.index: self._share_of(bucket, comm) for bucket in buckets}
        self._optimizer._divide(list(self._shares.values()), comm)

    def _share_of(self, bucket: _C.Bucket, comm: Communicator) -> _Share:
        numel = bucket.numel // comm.size
        gradient = torch.zeros(numel, dtype=bucket.dtype, device=bucket.device)
        unsent = torch.zeros_like(gradient) if self.gather_codec is not None else None
        return _Share(bucket, comm.rank * numel, (comm.rank + 1) * numel, gradient, unsent)

    def bucket_ready(self, bucket: _C.Bucket) -> None:
        share, flat = self._shares[bucket.index], bucket.flat()
        bucket.clear_padding("grad")
        codec, nonce = self.codec or Identity(), bucket.step * 2**20 + bucket.index
        reduce_scatter(flat, codec=codec, op="mean", nonce=nonce, group=self._comm, out=share.gradient)
        # A GradScaler skips a step on all ranks or on none.
        infinite = (~torch.isfinite(share.gradient)).any().float().view(1)
        all_reduce(infinite, group=self._comm)
        share.gradient.add_(torch.where(infinite > 0, torch.nan, 0.0))
        for piece in share.pieces:
            piece.leaf.grad = piece.gradient
        flat.fill_(torch.nan)  # whoever takes it for the mean shall notice
        bucket.clear_padding("grad")

    def before_step(self, step: int) -> None:
        for share in self._shares.values():
            for piece in share.pieces:
                if piece.param.grad is None:  # no rank has used it
                    piece.leaf.grad = None
            if share.unsent is not None:
                share.before = share.weights.clone()
                share.weights.add_(share.unsent)

    def after_step(self, step: int) -> None:
        for share in self._shares.values():
            self.submit(share.bucket, self._gather)
        self.wait()

    def _gather(self, bucket: _C.Bucket) -> None:
        share, flat = self._shares[bucket.index], bucket.flat("weight")
        if self.gather_codec is None or share.before is None or share.unsent is None:
            all_gather(share.weights, group=self._comm, out=flat)
            return
        changes = share.weights - share.before
        share.weights.copy_(share.before)
        nonce = self.optimizer_steps * 2**20 + bucket.index
        decoded = all_gather(changes, codec=self.gather_codec, nonce=nonce, group=self._comm)
        flat.add_(decoded)
        torch.sub(changes, decoded[share.begin : share.end], out=share.unsent)
        share.unsent.nan_to_num_(0.0, 0.0, 0.0)
        share.before = None

    def after_consensus(self) -> None:
        for share in self._shares.values():
            if share.unsent is not None:
                share.unsent.zero_()

    def close(self, *, crashed: bool = False) -> None:
        self._optimizer._let_go()
