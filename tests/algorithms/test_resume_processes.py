"""For every algorithm, a run that other processes resume has the bits of an uninterrupted run.

The runs stay a script, because the processes that resume must start fresh.
"""

from tests.support.forks import fork_job

JOB = """
import json, pathlib, sys
import torch
import gossamer as gs

folder, parts = pathlib.Path(sys.argv[1]), sys.argv[2:]  # "whole", "first", "second"
gs.init("gossamer")
STEPS = {"whole": range(10), "first": range(6), "second": range(6, 10)}
EXACT_NAMES = ["gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam", "powersgd",
               "local_sgd", "zero_one_adam"]
SETTINGS = {"local_sgd": {"period": 4}, "powersgd": {"rank": 1, "min_compression_rate": 1.0},
            "zero_one_adam": {"double_every": 1, "longest": 4}}
MORE = {
    "few bits": lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.Int4(stochastic=True))),
    "one bit": lambda: gs.GradientAllReduce(codec=gs.ErrorFeedback(gs.OneBit())),
    "by rows": lambda: gs.ByteGrad(codec=gs.MinMaxUInt8()),
}

def build(name):
    if name in MORE:
        return MORE[name]()
    from gossamer.algorithms import ALGORITHMS
    return ALGORITHMS[name](**SETTINGS.get(name, {}))

def run(name, part):
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(10, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5))
    params = module.parameters()
    adams = {"qadam": gs.QAdamOptimizer, "zero_one_adam": gs.ZeroOneAdamOptimizer}
    optimizer = adams[name](params, 0.01, 3) if name in adams else torch.optim.SGD(params, 0.1, momentum=0.9)
    file = folder / f"{name}-{gs.rank()}.pt"
    saved = torch.load(file) if part == "second" else None
    model = gs.DataParallel(module, optimizer, algorithm=build(name), broadcast=saved is None, bucket_bytes=1000)
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        model.load_algorithm_state_dict(saved["algorithm"])
    for step in STEPS[part]:
        inputs = torch.randn(6, 10, generator=torch.Generator().manual_seed(100 * step + gs.rank()))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    if part == "first":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "algorithm": model.algorithm_state_dict()}, file)
    else:
        torch.save(model.state_dict(), folder / f"{name}-{gs.rank()}-{part}.pt")
        if part == "second":
            whole = torch.load(folder / f"{name}-{gs.rank()}-whole.pt")
            equal = all(torch.equal(whole[key], value) for key, value in model.state_dict().items())
            sys.stdout.write("\\n" + json.dumps([name, gs.rank(), equal]) + "\\n")  # at once: ranks share the stream
            sys.stdout.flush()
    model.close()

for part in parts:
    for name in [*EXACT_NAMES, *MORE]:
        run(name, part)
gs.shutdown()
"""


def test_other_processes_go_on_where_the_first_ones_ended(tmp_path):
    fork_job(JOB, 2, tmp_path, str(tmp_path), "whole", "first")
    out = fork_job(JOB, 2, tmp_path, str(tmp_path), "second")
    verdicts = [line for line in out.splitlines() if line.startswith("[")]
    assert len(verdicts) == 2 * 11
    assert [line for line in verdicts if "true" not in line] == []
