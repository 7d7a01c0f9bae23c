# Calls for objects that differ between ranks, in the job of conftest.py; test_state.py has those that fit.

import threading
from functools import partial

import pytest

import gossamer.horovod.torch as hvd
from tests.horovod.sets import mine, refused, still_works

pytestmark = pytest.mark.usefixtures("job")

BROADCAST, ALLGATHER = "broadcast_object", "allgather_object"


# The calls of the first rank of a set and of the others: (function, further arguments), and what is shown of both.
@pytest.mark.parametrize(
    ("of_first", "of_others", "shown"),
    [
        ((BROADCAST, {}), (ALLGATHER, {}), ["broadcast_object(root_rank=", "allgather_object(name=None)"]),
        ((ALLGATHER, {"name": "a"}), (BROADCAST, {"name": "a"}), ["allgather_object(name='a')", "name='a')"]),
        ((BROADCAST, {"name": "a"}), (BROADCAST, {"name": "b"}), ["name='a')", "name='b')"]),
        ((ALLGATHER, {"name": "a"}), (ALLGATHER, {"name": "b"}), ["name='a')", "name='b')"]),
        ((ALLGATHER, {"name": "a"}), (ALLGATHER, {}), ["name='a')", "name=None)"]),
        ((BROADCAST, {"root": 0}), (BROADCAST, {"root": -1}), ["root_rank=", "root_rank="]),
    ],
    ids=["function", "function-of-one-name", "broadcast-name", "allgather-name", "unnamed", "root"],
)
def test_calls_that_differ_are_an_error_on_every_rank(of_first, of_others, shown) -> None:
    for process_set, rank, size in mine():
        if size == 1:
            continue
        function, arguments = of_others if rank else of_first
        given = {"process_set": process_set, "name": arguments.get("name")}
        if function == BROADCAST:
            given["root_rank"] = process_set.ranks[arguments.get("root", 0)]
        with pytest.raises(hvd.HorovodInternalError, match="must make the same calls for objects") as failed:
            getattr(hvd, function)({"of": rank}, **given)
        text = str(failed.value)
        first, *others = process_set.ranks
        assert f"on rank {first} (test_objects.py:" in text
        assert f"on rank {', '.join(map(str, others))} (test_objects.py:" in text
        assert all(each in text for each in shown)
        assert hvd.allgather_object(rank, process_set=process_set) == list(range(size))
    still_works()


def test_unnamed_objects_may_have_other_types_on_other_ranks() -> None:
    for process_set, rank, size in mine():
        for root in process_set.ranks:
            own = {"of": root} if root == hvd.rank() else None
            assert hvd.broadcast_object(own, root, process_set=process_set) == {"of": root}
        kinds = [None, "text", 3, [4]]
        assert hvd.allgather_object(kinds[rank], process_set=process_set) == kinds[:size]


def test_a_root_that_is_no_member_is_an_error_on_every_rank() -> None:
    for process_set, rank, size in mine():
        for name in ("l", None):
            root = 99 if rank == size - 1 else process_set.ranks[0]
            call = partial(hvd.broadcast_object, rank, root, name, process_set)
            text = f"root_rank must be one of the ranks {process_set.ranks} of the process set, got 99"
            refused(text, call, ValueError if root == 99 else hvd.HorovodInternalError)
    still_works()


def test_threads_may_call_in_any_order() -> None:
    """Named calls of other threads, one of which ends only after calls of the main thread."""
    for process_set, rank, size in mine():
        got: dict[str, object] = {}

        def gather(name: str, rank=rank, process_set=process_set, got=got) -> None:
            got[name] = hvd.allgather_object((rank, name), name, process_set)

        names = [f"thread {number}" for number in range(3)]
        threads = [threading.Thread(target=gather, args=(name,)) for name in names]
        early = threads if rank == 0 else threads[::-1][:1]
        for thread in early:
            thread.start()
        assert hvd.broadcast_object(rank, process_set.ranks[0], process_set=process_set) == 0
        for thread in threads:
            if thread not in early:
                thread.start()
        for thread in threads:
            thread.join()
        assert got == {name: [(each, name) for each in range(size)] for name in names}
