"""gs.Options: sums and gathers of a process group go through its codec, with the bits of gs.all_reduce and its like.

The tests run in the ranks of a job (tests/support/jobs.py). Each compares a group with a codec, made once a rank, with
the default group, which has none.
"""

from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce
from torch.distributed.device_mesh import init_device_mesh

import gossamer as gs
from tests.backend.jobs import CPU, DTYPES, FLOATS, OPS, TESTED, assert_bits, join, laid_out, noise, values
from tests.support.jobs import Job

pytestmark = [
    pytest.mark.usefixtures("job"),
    pytest.mark.skipif(TESTED != "gossamer", reason="Gloo has no codecs"),
]

CODECS = [gs.Int8(), gs.Int4(), gs.BF16(), gs.MinMaxUInt8(), gs.OneBit(), gs.Int8(stochastic=True, seed=3)]
EXACT_OPS = (OPS.MAX, OPS.MIN, OPS.PRODUCT)
_calls: "dict[str, count[int]]" = {}


@pytest.fixture(scope="module", params=[2, 3])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with Job(request.param) as job, job.within(join, _end, backend=TESTED):
        yield job


def _end() -> None:
    group.cache_clear()
    _calls.clear()
    dist.destroy_process_group()


@cache
def group(codec: gs.Codec | None = None, **more: Any) -> dist.ProcessGroup:
    """A group of all ranks with this codec, for any size of tensor."""
    return dist.new_group(pg_options=gs.Options(codec, **{"min_bytes": 0} | more))


def nonce(codec: object) -> int:
    """The number of this encoded call in its group."""
    return next(_calls.setdefault(repr(codec), count()))


def every(tensor: torch.Tensor) -> list[torch.Tensor]:
    outputs = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, tensor)
    return outputs


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_reduce_has_the_bits_of_a_direct_call(codec: gs.Codec, dtype: torch.dtype) -> None:
    for op, word in ((OPS.SUM, "sum"), (OPS.AVG, "mean")):
        for shape in ((1,), (5, 13), (10_007,)):
            mine = noise(dist.get_rank(), shape, dtype)
            direct = gs.all_reduce(mine.clone(), codec=codec, op=word, nonce=nonce(codec))
            dist.all_reduce(mine, op, group=group(codec))
            assert_bits(mine, direct, (op, shape))
            assert_bits(every(mine)[0], mine)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_codec_and_not_an_exact_sum_made_the_result(codec: gs.Codec) -> None:
    mine = noise(dist.get_rank(), (4096,))
    exact = mine.clone()
    dist.all_reduce(exact)
    nonce(codec)
    dist.all_reduce(mine, group=group(codec))
    assert not torch.equal(mine, exact)


def test_fewer_bytes_are_sent() -> None:
    backend = group(gs.Int8())._get_backend(CPU)
    before = backend.comm.bytes_sent
    tensor = noise(0, (64_000,))
    nonce(gs.Int8())
    dist.all_reduce(tensor, group=group(gs.Int8()))
    size = dist.get_world_size()
    exact = 2 * (size - 1) / size * tensor.nbytes
    assert 0.25 < (backend.comm.bytes_sent - before) / exact < 0.27


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_form_of_reduce_scatter_has_the_bits_of_a_direct_call(
    codec: gs.Codec, dtype: torch.dtype
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = noise(rank, (size * 301,), dtype)
    for op, word in ((OPS.SUM, "sum"), (OPS.AVG, "mean")):

        def direct(word: str = word) -> torch.Tensor:
            return gs.reduce_scatter(whole, codec=codec, op=word, nonce=nonce(codec))

        want, out = direct(), torch.empty(301, dtype=dtype)
        dist.reduce_scatter_tensor(out, whole, op, group=group(codec))
        assert_bits(out, want, "tensor")
        want, out = direct(), torch.empty(301, dtype=dtype)
        parts = [part.clone() for part in whole.chunk(size)]
        dist.reduce_scatter(out, parts, op, group=group(codec))
        assert_bits(out, want, "list")
        wants, outs = [direct(), direct()], [torch.empty(301, dtype=dtype) for _ in range(2)]
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        group(codec).reduce_scatter_tensor_coalesced(outs, [whole, whole.clone()], options).wait()
        for got, expected in zip(outs, wants, strict=True):
            assert_bits(got, expected, "coalesced")


def test_coalesced_functional_and_strided_sums_have_the_same_bits() -> None:
    codec = gs.Int8()
    tensors = [noise(10 * dist.get_rank() + i, (7, 11 + i)) for i in range(3)]
    wants = [gs.all_reduce(t.clone(), codec=codec, nonce=nonce(codec)) for t in tensors]
    layouts = ("strided", "transposed", "offset")
    strided = [laid_out(t, layout) for t, layout in zip(tensors, layouts, strict=True)]
    for tensor, want in zip(strided, wants, strict=True):
        nonce(codec)
        dist.all_reduce(tensor, group=group(codec))
        assert_bits(tensor, want)
    [nonce(codec) for _ in tensors]
    copies = [t.clone() for t in tensors]
    dist.all_reduce_coalesced(copies, group=group(codec))
    for tensor, want in zip(copies, wants, strict=True):
        assert_bits(tensor, want)
    nonce(codec)
    got = functional_all_reduce(tensors[0], "sum", group(codec))
    assert_bits(got + 0, wants[0])


def test_sums_of_which_nobody_waits_at_once_keep_their_order() -> None:
    codec = gs.Int8(stochastic=True, seed=3)
    tensors = [noise(10 * dist.get_rank() + i, (4001,)) for i in range(8)]
    wants = [gs.all_reduce(t.clone(), codec=codec, nonce=nonce(codec)) for t in tensors]
    works = [dist.all_reduce(t, group=group(codec), async_op=True) for t in tensors]
    for work in reversed(works):
        work.wait()
    for tensor, want in zip(tensors, wants, strict=True):
        assert_bits(tensor, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [OPS.SUM, OPS.AVG, *EXACT_OPS], ids=str)
def test_only_sums_of_floats_are_encoded(dtype: torch.dtype, op: Any) -> None:
    """The table of dtype x operation: what is not a sum of floats is exact, and refused where it is refused without."""
    encoded = dtype in FLOATS and op in (OPS.SUM, OPS.AVG)
    make = noise if encoded else values
    backend = group(gs.Int4())._get_backend(CPU)
    results, before = [], backend.comm.bytes_sent
    for target in (None, group(gs.Int4())):
        tensor = make(dist.get_rank(), (1000,), dtype)
        try:
            dist.all_reduce(tensor, op, group=target)
        except (ValueError, RuntimeError) as error:
            results.append(str(error))
        else:
            results.append(tensor)
    assert (backend.comm.bytes_sent > before) == encoded
    plain, coded = results
    if isinstance(plain, str):
        assert coded == plain
    elif encoded:
        assert not torch.equal(coded, plain)
    else:
        assert_bits(coded, plain)


def test_a_premultiplied_sum_is_encoded_after_the_factor() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    factor = 2.0 ** (rank + 1)
    op = dist._make_nccl_premul_sum(factor)
    mine = noise(rank, (size * 100,))
    kept = mine.clone()
    want = gs.reduce_scatter(mine * factor, codec=gs.Int8(), nonce=nonce(gs.Int8()))
    out = torch.empty(100)
    dist.reduce_scatter_tensor(out, mine, op, group=group(gs.Int8()))
    assert_bits(out, want)
    assert_bits(mine, kept, "the input is not changed")
    want = gs.all_reduce(mine * factor, codec=gs.Int8(), nonce=nonce(gs.Int8()))
    dist.all_reduce(mine, op, group=group(gs.Int8()))
    assert_bits(mine, want)


def test_gathers_have_a_codec_of_their_own_and_none_by_default() -> None:
    rank, size, codec = dist.get_rank(), dist.get_world_size(), gs.BF16()
    mine = noise(rank, (333,))
    want = gs.all_gather(mine, codec=codec)
    exact = torch.cat(every(mine))
    assert not torch.equal(want, exact)
    for target, expected in ((group(gs.Int8()), exact), (group(gather_codec=codec), want)):
        out = torch.empty(size * 333)
        dist.all_gather_into_tensor(out, mine, group=target)
        assert_bits(out, expected, "tensor")
        parts = [torch.empty(333) for _ in range(size)]
        dist.all_gather(parts, mine, group=target)
        assert_bits(torch.cat(parts), expected, "list")
        summed, again = noise(rank, (333,)), noise(rank, (333,))
        if expected is want:
            dist.all_reduce(summed, group=target)
            dist.all_reduce(again)
            assert_bits(summed, again, "sums stay exact")


def test_integers_objects_and_other_operations_of_the_group_are_exact() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    target = group(gs.OneBit(), gather_codec=gs.OneBit())
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "pi": 3.14159}, group=target)
    assert objects == [{"rank": r, "pi": 3.14159} for r in range(size)]
    tensor = noise(rank, (1000,))
    dist.broadcast(tensor, 0, group=target)
    assert_bits(tensor, noise(0, (1000,)))
    out = torch.empty(size * 10)
    dist.all_to_all_single(out, noise(rank, (size * 10,)), group=target)
    assert_bits(out, torch.cat([noise(r, (size * 10,)).chunk(size)[rank] for r in range(size)]))
    tensor = noise(rank, (1000,))
    dist.reduce(tensor, 0, group=target)
    want = noise(rank, (1000,))
    dist.reduce(want, 0)
    assert_bits(tensor, want)


def test_tensors_below_min_bytes_travel_as_they_are() -> None:
    target = dist.new_group(pg_options=gs.Options(gs.Int4()))
    for numel, exact in ((16_383, True), (16_384, False)):
        tensor, want = noise(dist.get_rank(), (numel,)), noise(dist.get_rank(), (numel,))
        dist.all_reduce(tensor, group=target)
        dist.all_reduce(want)
        assert torch.equal(tensor, want) == exact, numel


def test_a_direct_call_over_the_group_chooses_its_own_codec() -> None:
    tensor, want = noise(dist.get_rank(), (1000,)), noise(dist.get_rank(), (1000,))
    gs.all_reduce(tensor, group=group(gs.OneBit()))
    dist.all_reduce(want)
    assert_bits(tensor, want)


def test_ranks_that_call_differently_are_all_told_and_the_group_goes_on() -> None:
    rank, target = dist.get_rank(), group(gs.Int8())
    for tensor in (
        torch.ones(100 if rank else 99),
        torch.ones(100) if rank else torch.ones(100, dtype=torch.int64),
        torch.ones(100, dtype=torch.float64 if rank else torch.float32),
    ):
        with pytest.raises(gs.ConfigError, match="every rank must make the same call"):
            dist.all_reduce(tensor, group=target)
    with pytest.raises(gs.ConfigError, match="must not hold one element in several places"):
        dist.all_reduce(torch.ones(100) if rank else torch.ones(1).expand(100), group=target)
    tensor = torch.ones(100)
    nonce(gs.Int8())
    dist.all_reduce(tensor, group=target)
    assert tensor[0] == dist.get_world_size()


def test_ranks_with_other_options_are_all_told_when_the_group_is_made() -> None:
    rank = dist.get_rank()
    pairs: list[tuple[Any, Any, str]] = [
        (gs.Options(gs.Int8()), gs.Options(gs.Int4()), "Int4.* on rank 0 and .*Int8"),
        (gs.Options(gs.Int8()), None, "no options on rank 0 and .*Int8"),
        (gs.Options(gs.Int8()), gs.Options(gs.Int8(), min_bytes=1), "min_bytes=1.*min_bytes=65536"),
        (gs.Options(gs.Int8()), {"codec": "int8"}, "'codec': 'int8'.* on rank 0"),
    ]
    for others, first, text in pairs:
        with pytest.raises(gs.ConfigError, match=f"the same options, got .*{text}"):
            dist.new_group(pg_options=others if rank else first)
    with pytest.raises(gs.ConfigError, match=r"pg_options must be a gossamer.Options or None, got 7"):
        dist.new_group(pg_options=7)
    with pytest.raises(gs.ConfigError, match=r"hosts must name each of the ranks 0 to \d once"):
        dist.new_group(pg_options=gs.Options(gs.Int8(), hosts=[[0], [0, 1]]))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"codec": "int8"}, "codec must be a Codec or None, got 'int8'"),
        ({"gather_codec": 8}, "gather_codec must be a Codec or None, got 8"),
        ({"gather_codec": gs.Delta(gs.Int4())}, r"use gs.fsdp.compress\(model, weights=Delta\(Int4"),
        ({"codec": gs.ErrorFeedback(gs.Int8())}, "without error feedback, got ErrorFeedback"),
        ({"codec": gs.TopK(0.1)}, "must be a native codec, got TopK"),
        ({"min_bytes": -1}, "min_bytes must be an integer of at least 0, got -1"),
        ({"min_bytes": 1.5}, "min_bytes must be an integer of at least 0, got 1.5"),
        ({"hosts": 2}, "hosts must be None or the ranks of each host, got 2"),
        ({"hosts": [[0], []]}, "hosts must be None or the ranks of each host"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unfit_options_are_refused_with_their_values(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(gs.ConfigError, match=text):
        gs.Options(**arguments)


def test_parts_of_a_group_inherit_its_options_or_have_their_own() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parent = group(gs.Int8())
    ranks = list(range(size))
    timeout = dist.constants.default_pg_timeout
    inherited = parent.split_group(ranks, timeout=timeout, group_name="inherited")
    other = parent.split_group(
        ranks, timeout=timeout, group_name="other", opts=gs.Options(gs.Int4(), min_bytes=0)
    )
    plain = dist.group.WORLD.split_group(ranks, timeout=timeout, group_name="plain")
    for part, codec in ((inherited, gs.Int8()), (other, gs.Int4()), (plain, None)):
        tensor = noise(rank, (1000,))
        want = gs.all_reduce(tensor.clone(), codec=codec)
        part.allreduce([tensor]).wait()
        assert_bits(tensor, want, codec)
    assert "Int8" in repr(inherited._get_backend(CPU).options)


def test_an_axis_of_a_mesh_has_a_codec_of_its_own() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    options = gs.Options(gs.Int8(), min_bytes=0)
    mesh = init_device_mesh(
        "cpu",
        (size, 1),
        mesh_dim_names=("hosts", "shards"),
        backend_override={"hosts": ("gossamer", options)},
    )
    tensor = noise(rank, (1000,))
    want = gs.all_reduce(tensor.clone(), codec=gs.Int8())
    dist.all_reduce(tensor, group=mesh["hosts"].get_group())
    assert_bits(tensor, want)
    assert isinstance(mesh["hosts"].get_group()._get_backend(CPU), gs._C.CodecBackend)
    assert not isinstance(mesh["shards"].get_group()._get_backend(CPU), gs._C.CodecBackend)


def test_hosts_sum_exactly_inside_and_by_the_codec_between() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts = [[0], list(range(1, size))]
    tensor = noise(rank, (1000,))
    want = gs.all_reduce(tensor.clone(), codec=gs.Int8(), group=gs.Hierarchical(hosts=hosts))
    target = dist.new_group(pg_options=gs.Options(gs.Int8(), min_bytes=0, hosts=hosts))
    dist.all_reduce(tensor, group=target)
    assert_bits(tensor, want)
    one_host = dist.new_group(pg_options=gs.Options(gs.Int8(), min_bytes=0, hosts=[list(range(size))]))
    tensor, exact = noise(rank, (1000,)), noise(rank, (1000,))
    dist.all_reduce(tensor, group=one_host)
    dist.all_reduce(exact)
    assert_bits(tensor, exact)
