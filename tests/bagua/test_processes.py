# The Bagua face in processes that no launcher started.


STORE = """
import sys
import torch, torch.distributed as dist
import gossamer.bagua.torch_api as bagua
rank, size, file = int(sys.argv[1]), 3, sys.argv[2]
bagua.init_process_group(dist.FileStore(file, size), rank, size, 2)
place = bagua.get_rank(), bagua.get_world_size(), bagua.get_local_rank(), bagua.get_local_size()
group = bagua.new_group()
inside, across = group.get_intra_node_communicator(), group.get_inter_node_communicator()
x = torch.tensor([rank + 1])
bagua.allreduce_inplace(x)
print(*place, bagua.env.get_node_rank(), inside.nranks(), hasattr(across, "rank"), x.item())
bagua.barrier()
"""


def test_processes_that_no_launcher_started_meet_through_a_store(fork, tmp_path) -> None:
    ranks = [fork(["-c", STORE, str(rank), str(tmp_path / "store")]) for rank in range(3)]
    lines = []
    for one in ranks:
        code, out, err = one.finish()
        assert code == 0, err
        lines.append(out.split())
    assert lines == [
        ["0", "3", "0", "2", "0", "2", "True", "6"],
        ["1", "3", "1", "2", "0", "2", "False", "6"],
        ["2", "3", "0", "2", "1", "1", "True", "6"],
    ]
