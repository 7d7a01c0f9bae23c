"""send, recv and recv from any source: tags, order, both directions, any size and layout, beside collectives."""

import pytest
import torch

from tests.backend.jobs import DTYPES, LAYOUTS, assert_bits, laid_out, run_group, values

MEGABYTES = (1_300_001,)  # 5.2 MB of floats


def send(group, tensor, to, tag=0):
    return group.send([tensor], to, tag)


def recv(group, tensor, source, tag=0):
    return group.recv([tensor], source, tag)


def test_messages_go_to_the_receive_with_their_tag_whatever_the_order():
    tags = [0, 5, 1, 70_000, 2]

    def body(group):
        if group.rank() == 0:
            works = [send(group, values(tag, (tag % 100 + 1,)), 1, tag) for tag in tags]
            return [work.wait() for work in works]
        outputs = {tag: torch.empty(tag % 100 + 1) for tag in tags}
        for tag in reversed(tags):  # each is waited for before the next is asked for
            recv(group, outputs[tag], 0, tag).wait()
        return outputs

    for tag, got in run_group(2, body)[1].items():
        assert torch.equal(got, values(tag, (tag % 100 + 1,)))


def test_messages_of_megabytes_wait_for_their_tags_too():
    def body(group):
        if group.rank() == 0:
            for work in [send(group, values(tag, MEGABYTES), 1, tag) for tag in range(3)]:
                work.wait()
            return None
        outputs = [torch.empty(MEGABYTES) for _ in range(3)]
        for tag in (2, 0, 1):
            recv(group, outputs[tag], 0, tag).wait()
        return outputs

    for tag, got in enumerate(run_group(2, body)[1]):
        assert torch.equal(got, values(tag, MEGABYTES))


@pytest.mark.parametrize("count", [0, 1, 1000, *MEGABYTES])
def test_messages_with_one_tag_arrive_in_the_order_sent(count):
    many = 30 if count <= 1000 else 4

    def body(group):
        if group.rank() == 0:
            for work in [send(group, values(i, (count,)), 1) for i in range(many)]:
                work.wait()
            return None
        outputs = [torch.empty(count) for _ in range(many)]
        for work in [recv(group, output, 0) for output in outputs]:
            work.wait()
        return outputs

    for i, got in enumerate(run_group(2, body)[1]):
        assert torch.equal(got, values(i, (count,)))


@pytest.mark.parametrize("first", ["send", "recv"])
@pytest.mark.parametrize("count", [0, 3, *MEGABYTES])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_everybody_sends_to_everybody_at_once_and_waits_in_either_order(size, count, first):
    def body(group):
        rank = group.rank()
        others = [peer for peer in range(size) if peer != rank]
        outputs = {peer: torch.empty(count) for peer in others}
        receives = [recv(group, outputs[peer], peer) for peer in others]
        sends = [send(group, values(10 * rank + peer, (count,)), peer) for peer in others]
        for work in sends + receives if first == "send" else receives + sends:
            work.wait()
        return outputs

    for rank, outputs in enumerate(run_group(size, body)):
        for peer, got in outputs.items():
            assert torch.equal(got, values(10 * peer + rank, (count,)))


@pytest.mark.parametrize("layout", ["plain", *LAYOUTS])
def test_every_dtype_and_layout_arrives(layout):
    def body(group):
        rank = group.rank()
        outputs = [laid_out(torch.zeros(5, 3, dtype=dtype), layout, rank) for dtype in DTYPES]
        for tag, (dtype, output) in enumerate(zip(DTYPES, outputs, strict=True)):
            if rank == 0:
                send(group, laid_out(values(tag, (5, 3), dtype), layout, rank), 1, tag).wait()
            else:
                recv(group, output, 0, tag).wait()
        return outputs

    for tag, got in enumerate(run_group(2, body)[1]):
        assert_bits(got, values(tag, (5, 3), DTYPES[tag]))


def test_recv_from_any_source_takes_one_message_of_each_and_says_whose_it_is():
    rounds = 5

    def body(group):
        if group.rank() > 0:
            for i in range(rounds):
                send(group, torch.tensor([group.rank(), i]), 0, 9).wait()
            return None
        got = []
        for _ in range(rounds * 3):
            output = torch.empty(2, dtype=torch.int64)
            work = group.recv_anysource([output], 9)
            work.wait()
            got.append((work._source_rank(), *output.tolist()))
        return got

    got = run_group(4, body)[0]
    for source, content, _ in got:
        assert source == content
    for peer in (1, 2, 3):  # each rank's messages in their order
        assert [i for source, _, i in got if source == peer] == list(range(rounds))


def test_recv_from_any_source_leaves_messages_with_another_tag_to_others():
    def body(group):
        rank = group.rank()
        if rank == 1:
            send(group, torch.tensor([1.0]), 0, 1).wait()
            return None
        if rank == 2:
            recv(group, torch.empty(1), 0, 3).wait()
            send(group, torch.full(MEGABYTES, 2.0), 0, 2).wait()
            return None
        output, large = torch.empty(1), torch.empty(MEGABYTES)
        anybody = group.recv_anysource([large], 2)
        send(group, torch.zeros(1), 2, 3).wait()
        anybody.wait()
        named = recv(group, output, 1, 1)
        named.wait()
        return anybody._source_rank(), named._source_rank(), large, output

    source, named, large, output = run_group(3, body)[0]
    assert (source, named) == (2, 1)
    assert torch.equal(large, torch.full(MEGABYTES, 2.0))
    assert output == 1


def test_a_receive_asked_for_long_before_the_message_takes_it_while_collectives_go_on():
    def body(group):
        rank = group.rank()
        output = torch.empty(MEGABYTES)
        early = recv(group, output, (rank - 1) % 3, 4)
        totals = []
        for _ in range(10):
            total = torch.tensor([float(rank)])
            group.allreduce([total]).wait()
            totals.append(total.item())
        assert not early.is_completed()
        work = send(group, values(rank, MEGABYTES), (rank + 1) % 3, 4)
        group.barrier().wait()
        early.wait()
        work.wait()
        return totals, output

    for rank, (totals, output) in enumerate(run_group(3, body)):
        assert totals == [3.0] * 10
        assert torch.equal(output, values((rank - 1) % 3, MEGABYTES))


def test_two_ranks_talk_while_the_third_does_nothing():
    def body(group):
        if group.rank() == 2:
            return None
        output = torch.empty(4)
        for i in range(100):
            if (group.rank() + i) % 2:
                send(group, torch.full((4,), float(i)), 1 - group.rank(), i).wait()
            else:
                recv(group, output, 1 - group.rank(), i).wait()
                assert output.tolist() == [float(i)] * 4
        return output

    run_group(3, body)


def test_the_sender_may_change_its_tensor_once_the_work_is_done():
    def body(group):
        tensor = values(1, MEGABYTES)
        if group.rank() == 0:
            send(group, tensor, 1).wait()
            tensor.fill_(-7)
            send(group, tensor, 1).wait()
            return None
        first, second = torch.empty(MEGABYTES), torch.empty(MEGABYTES)
        recv(group, first, 0).wait()
        recv(group, second, 0).wait()
        return first, second

    first, second = run_group(2, body)[1]
    assert torch.equal(first, values(1, MEGABYTES))
    assert torch.equal(second, torch.full(MEGABYTES, -7.0))
