"""ShardedOptimizer: an optimizer of torch that steps this rank's pieces of the parameters."""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gossamer import _C, optim
from gossamer.algorithms.sharded.pieces import (
    Held,
    Piece,
    Share,
    Span,
    State,
    copy_common,
    cut_share,
    in_row,
    outside,
    part_of,
    piece_again,
)
from gossamer.collectives import all_gather
from gossamer.comm import Communicator
from gossamer.engine import broadcast_state
from gossamer.errors import CommError, ConfigError


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
        self._pieces: list[Piece] | None = None  # that this rank steps
        self._counted: list[Piece] = []  # those of them that no other rank counts in norms and whole states
        self._comm: Communicator | None = None
        self._loaded: dict[str, Any] | None = None  # before the model is wrapped
        self._consolidated: dict[str, Any] | None = None
        self._resting = False  # the wrapper is gone; the next one goes on with the shares
        self._stepped = False  # whether this rank's share of the state is not that of a new optimizer
        self._aside: list[Held] = []  # between two groups; of several divisions the last one first
        self._heal: Callable[[], bool] | None = None  # see Sharded.heal_clips()
        self._clipped: tuple[int, float] = 0, 0.0  # see Sharded.clipped
        self._clips = 0  # calls of clip_grad_norm_() so far
        self._follow()

    def _follow(self) -> None:
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's share; the wrapped model then gathers the others'. Return the closure's loss, or None.

        Raises:
            ConfigError: no model is wrapped with algorithm="sharded" and this optimizer.
        """
        if self._pieces is None or self._resting:
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
        if self._pieces is None or self._comm is None:
            raise ConfigError(
                "ShardedOptimizer.clip_grad_norm_: wrap the model first, with algorithm='sharded'"
            )
        self._clips += 1
        while True:
            try:
                norm = self._norm(norm_type)
                break
            except RuntimeError:  # torch's own too
                if self._heal is None or not self._heal():
                    raise
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's
        for piece in self._pieces:
            if piece.leaf.grad is not None:
                piece.leaf.grad.mul_(factor.to(piece.leaf.grad.dtype))
        return norm.to(torch.float32)

    def _norm(self, norm_type: float) -> Tensor:
        """Return the norm of the mean gradients, float64. Collective, unless another rank has told it."""
        device = self._params[0].device
        if self._clipped[0] == self._clips:
            return torch.tensor(self._clipped[1], dtype=torch.float64, device=device)
        norms = [
            torch.linalg.vector_norm(piece.leaf.grad, norm_type, dtype=torch.float64)
            for piece in self._counted
            if piece.leaf.grad is not None
        ]
        own = torch.zeros(1, dtype=torch.float64, device=device)
        if norms:
            own[0] = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        norm = torch.linalg.vector_norm(all_gather(own, group=self._comm), norm_type)
        if self._heal is not None:
            self._clipped = self._clips, norm.item()
        return norm

    # --- the state, whole ---

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Bring the state of all ranks to one of them, for state_dict() there. Collective.

        Args:
            to: the rank; None: every rank.
        """
        if self._pieces is None:
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
        if self._pieces is None and not self._stepped:
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
        if self._pieces is None:
            self._loaded, self._stepped = state_dict, False
            self.load_settings(state_dict)
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

    def _as_state_dict(self, state: State, unsent: dict[int, Tensor]) -> dict[str, Any]:
        groups, begin = [], 0
        for group, params in zip(self.param_groups, self._whole, strict=True):
            indices = list(range(begin, begin + len(params)))
            groups.append({**group, "params": indices})
            begin += len(params)
        whole: dict[str, Any] = {"state": state, "param_groups": groups}
        return whole | {"unsent": unsent} if unsent else whole

    @torch.no_grad()
    def _gathered(self, *, keep: bool) -> tuple[State, dict[int, Tensor], dict[int, Tensor]]:
        """Return the state, what is unsent, and the gradients of all whole parameters, on the CPU, if `keep`.

        Collective.
        """
        assert self._comm is not None
        own = []
        for piece in self._counted:
            state = dict(self._inner.state.get(piece.leaf, {}))
            if piece.unsent is not None:
                state["unsent"] = piece.unsent.clone()
            if piece.leaf.grad is not None:
                state["gradient"] = piece.gradient.reshape(-1).clone()
            state = {key: each.cpu() if isinstance(each, Tensor) else each for key, each in state.items()}
            own.append((piece.index, piece.begin, piece.end, state))
        params = self._params
        whole: State = {}
        device = params[0].device
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
                    in_row(into[key])[begin:end] = each
        unsent, gradients = (
            {index: state.pop(key) for index, state in sorted(whole.items()) if key in state}
            for key in ("unsent", "gradient")
        )
        return {index: state for index, state in sorted(whole.items()) if state}, unsent, gradients

    def _divide(self, own: list[Share], copies: list[Share], comm: Communicator) -> None:
        """Take these shares, and what belongs to them of the shares before. Collective.

        Args:
            own: the shares that this rank sends.
            copies: shares that others send, and this rank steps too.
        """
        state, gradients = self._loaded or self._begun(), dict[int, Tensor]()
        if self._pieces is None and self._stepped:
            raise ConfigError(
                "ShardedOptimizer: its state has ended with the model that was closed; give load_state_dict() what "
                "state_dict() returned before, or make a new optimizer"
            )
        if self._resting:  # ranks of the wrapper before may be missing, and would be waited for
            assert self._comm is not None
            if (comm.rank, comm.size) != (self._comm.rank, self._comm.size):
                raise ConfigError(
                    f"ShardedOptimizer: its state is divided among the ranks of the wrapper before, where this rank is "
                    f"{self._comm.rank} of {self._comm.size}, and now it is {comm.rank} of {comm.size}; "
                    f"load_state_dict() of what was consolidated before, or make a new optimizer"
                )
            self._comm = comm
        if self._pieces is not None:  # the plan of the buckets has changed
            whole, unsent, gradients = self._gathered(keep=True)
            state = self._as_state_dict(whole, unsent)
        self._loaded = None
        pieces, counted = self._pieces_of(own, copies)
        self._step_from_now(pieces, counted, comm)
        if state is not None:
            self._cut(state)
        for piece in pieces:
            if piece.index in gradients:
                piece.gradient.copy_(part_of(gradients[piece.index], piece))
                piece.leaf.grad = piece.gradient

    def _pieces_of(self, own: list[Share], copies: list[Share]) -> tuple[list[Piece], list[Piece]]:
        """Return all pieces of these shares, and those of the shares that this rank sends."""
        place = {param: index for index, param in enumerate(self._params)}
        for share in (*own, *copies):
            cut_share(share, place)
        counted = [piece for share in own for piece in share.pieces]
        return counted + [piece for share in copies for piece in share.pieces], counted

    def _step_from_now(self, pieces: list[Piece], counted: list[Piece], comm: Communicator) -> None:
        """Make these pieces the parameters of the inner optimizer, without a state."""
        leaves: dict[int, list[nn.Parameter]] = {}
        for piece in pieces:
            leaves.setdefault(piece.index, []).append(piece.leaf)
        index = 0
        for group, params in zip(self.param_groups, self._whole, strict=True):
            indices = range(index, index + len(params))
            group["params"] = [leaf for each in indices for leaf in leaves.get(each, ())]
            index += len(params)
        self._inner.state.clear()
        self._pieces, self._counted, self._comm, self._consolidated = pieces, counted, comm, None
        self._resting = False

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
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for piece in self._pieces or ():
            if piece.index in whole["state"]:
                of_param = whole["state"][piece.index]
                state[piece.leaf] = {key: part_of(each, piece) for key, each in of_param.items()}
            if piece.unsent is not None and piece.index in whole.get("unsent", {}):
                piece.unsent.copy_(part_of(whole["unsent"][piece.index], piece))
        self._load(state, whole["param_groups"])

    def _load(self, state: dict[nn.Parameter, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Give the inner optimizer the state of its leaves, and the settings of groups."""
        leaves = [leaf for group in self._inner.param_groups for leaf in group["params"]]
        of_leaves = {place: state[leaf] for place, leaf in enumerate(leaves) if leaf in state}
        numbered, begin = [], 0
        for group, saved in zip(self._inner.param_groups, groups, strict=True):
            count = len(group["params"])
            numbered.append({**saved, "params": list(range(begin, begin + count))})
            begin += count
        self._inner.load_state_dict({"state": of_leaves, "param_groups": numbered})
        self._follow()

    # --- between two groups ---

    def settings(self) -> dict[str, Any]:
        """Return the settings of the groups, such as learning rates, without a state."""
        return {
            "param_groups": [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        }

    def load_settings(self, saved: dict[str, Any]) -> None:
        """Take what settings() returned on another rank, or as much of a whole state."""
        for group, settings in zip(self.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})

    def _begin_step(self, *, alone: bool) -> None:
        """Called before a step. `alone`: no rank sends its weights after it."""
        self._aside = []
        for piece in self._pieces or ():
            if piece.param.grad is None:  # no rank has used it
                piece.leaf.grad = None
            if alone and piece.unsent is not None:
                piece.leaf.data.view(-1).add_(piece.unsent)
                piece.unsent.zero_()

    def _take_gradients(self, bucket: _C.Bucket) -> None:
        """Take this rank's pieces of a bucket's mean gradients."""
        gradients = dict(zip(bucket.params, bucket.views("grad"), strict=True))
        for piece in self._pieces or ():
            if piece.param in gradients:
                piece.gradient.view(-1).copy_(in_row(gradients[piece.param])[piece.begin : piece.end])
                piece.leaf.grad = piece.gradient

    def _held(self) -> list[Held]:
        now = [
            Held(
                piece.index,
                piece.begin,
                piece.end,
                dict(self._inner.state.get(piece.leaf, {})),
                piece.gradient.view(-1) if piece.leaf.grad is not None else None,
                piece.unsent,
            )
            for piece in self._pieces or ()
        ]
        return [*now, *self._aside]

    def _rest(self) -> None:
        """The wrapper is gone: take no steps until there is another one."""
        self._resting = True

    def _set_aside(self) -> None:
        """Keep the pieces, without memory of a bucket, until another group goes on with them."""
        self._aside = self._held()
        self._let_go()

    @torch.no_grad()
    def _go_on(
        self, comm: Communicator, texts: Callable[[str], list[str]], clipped: tuple[int, float]
    ) -> None:
        """Step what was set aside. See Sharded.go_on()."""
        held = list[Held]()
        covered: dict[int, list[Span]] = {}
        for each in self._aside:
            free = outside((each.begin, each.end), covered.setdefault(each.index, []))
            covered[each.index] += free
            held += [each.part(*span) for span in free]
        told = [json.loads(each) for each in texts(json.dumps([each.key for each in held]))]
        # Ranks may have divided differently: pieces begin and end where any rank's do.
        cuts: dict[int, set[int]] = {}
        for index, begin, end in (key for keys in told for key in keys):
            cuts.setdefault(index, set()).update((begin, end))
        held = [part for each in held for part in each.cut_at(cuts[each.index])]
        pieces = [piece_again(each, self._params[each.index]) for each in held]
        others = [key for keys in told[: comm.rank] for key in keys]
        counted = [
            piece
            for piece, (index, begin, end) in zip(pieces, (each.key for each in held), strict=True)
            if not any(index == i and b <= begin and end <= e for i, b, e in others)
        ]
        self._step_from_now(pieces, counted, comm)
        self._inner.state.update(
            {piece.leaf: each.state for piece, each in zip(pieces, held, strict=True) if each.state}
        )
        self._clipped = clipped

    @torch.no_grad()
    def _divide_anew(
        self,
        make_shares: Callable[[], tuple[list[Share], list[Share]]],
        comm: Communicator,
        texts: Callable[[str], list[str]],
        *,
        planned: set[Tensor],
        holds: bool,
    ) -> None:
        """Take the pieces of new shares. See Sharded.divide_anew(). `planned`: the parameters that are in buckets."""
        held, params = self._held() if holds else [], self._params
        self._let_go()
        self._aside = held  # a member may die before this rank has its new pieces
        mine = {"keys": [each.key for each in held], "clips": self._clips}
        told = [json.loads(each) for each in texts(json.dumps(mine))]
        self._require_all([key for each in told for key in each["keys"]], planned)
        pieces, counted = self._pieces_of(*make_shares())
        state: dict[nn.Parameter, dict[str, Any]] = {}
        sent = set[tuple[int, ...]]()
        for source, keys in enumerate(list(map(tuple, each["keys"])) for each in told):
            fresh = [place for place, key in enumerate(keys) if key not in sent]
            sent.update(keys)

            def parts(fresh: list[int] = fresh) -> list[tuple[Any, ...]]:
                return [held[place].message(params) for place in fresh]

            for index, begin, end, weights, unsent, of_part in broadcast_state(
                comm, parts, source, take=True, device=params[0].device
            ):
                in_row(params[index].data)[begin:end].copy_(weights)
                for piece in (each for each in pieces if each.index == index):
                    copy_common(piece, (begin, end), unsent, of_part, state)
        self._step_from_now(pieces, counted, comm)
        self._load(state, self.param_groups)
        self._stepped = True
        self._clips = max(each["clips"] for each in told)

    def _require_all(self, keys: list[list[int]], planned: set[Tensor]) -> None:
        """Raise CommError unless these pieces, as (index, begin, end), are all elements of these parameters."""
        missing = 0
        for index, param in enumerate(self._params):
            spans = [(begin, end) for of, begin, end in keys if of == index]
            if param in planned:
                missing += sum(end - begin for begin, end in outside((0, param.numel()), spans))
        if missing:
            total = sum(param.numel() for param in planned)
            raise CommError(
                f"ShardedOptimizer: the state of {missing} of {total} elements was only on ranks that are gone; begin "
                f"again from a checkpoint, and give gs.Sharded more holders"
            )

    def _let_go(self) -> None:
        """The model is no longer wrapped: hold whole parameters again, without a state."""
        for group, params in zip(self.param_groups, self._whole, strict=True):
            group["params"] = list(params)
        self._inner.state.clear()
        self._pieces, self._counted, self._comm = None, [], None
