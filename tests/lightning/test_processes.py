# gossamer.lightning where a launcher of its own starts the processes.


import pytest

pytest.importorskip("lightning.pytorch")

# Popen runs the script again for rank 1, so what comes before runs only on rank 0; only it makes forks.
SCRIPT = """
import os, sys
import lightning.pytorch as pl, torch
import gossamer.lightning

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, index):
        if self.trainer.strategy._algorithm == "async" and self.global_rank == 1:
            raise KeyError("a mistake of the user")
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def fit(strategy):
    torch.manual_seed(0)
    module, data = Net(), torch.utils.data.DataLoader(torch.randn(34, 8), batch_size=4)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, data)
    # In one piece: both ranks write.
    sys.stdout.write(f"{strategy} {module.layer.weight.double().sum().item()}\\n")
    sys.stdout.flush()

if "LOCAL_RANK" not in os.environ:
    fit("gossamer_bytegrad_notebook_find_unused_parameters_true")
fit("gossamer_bytegrad")
fit("gossamer_async")
"""


def test_names_start_processes_which_train_alike_and_end_with_the_first_error(start, tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code, out, err = start([str(script)]).finish()
    results = [line.split() for line in out.splitlines() if line.startswith("gossamer_")]
    assert len(results) == 3, (
        out + err
    )  # the forks' weights come back to rank 0; both ranks of the popen launcher print
    assert len({weights for _, weights in results}) == 1
    assert code != 0
    assert "KeyError: 'a mistake of the user'" in err
    assert "AttributeError" not in err
