"""What users' programs do with a wrapped model beside its steps, against one process that has all the data."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gossamer as gs
from tests.lives.faces import FACES, LR, MOMENTUM, Wrapped
from tests.lives.test_lives import begin, end, require_right
from tests.support.jobs import Job
from tests.support.models import batches, mlp, seeded

STEPS = 5
pytestmark = pytest.mark.usefixtures("job")
WRAPPERS = [
    ("DataParallel", "gradients"),
    ("DataParallel", "weights"),
    ("DistributedDataParallel", "gradients"),
    ("DistributedDataParallel", "weights"),
    ("with_bagua", "gradients"),
]
with_wrappers = pytest.mark.parametrize(("face", "kind"), WRAPPERS)
in_all_faces = pytest.mark.parametrize(
    ("face", "kind"), [*WRAPPERS, ("hvd.DistributedOptimizer", "gradients")]
)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    with Job(3) as job, job.within(begin, end):
        yield job


def alone(model: nn.Module) -> Wrapped:
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    return Wrapped(model, optimizer, None, lambda: None)


def parts(whole: Tensor) -> Tensor:
    """This rank's rows of each batch."""
    return whole.chunk(gs.size(), dim=1)[gs.rank()]


def train_gan(generator: Wrapped, discriminator: Wrapped, real: Tensor, noise: Tensor) -> None:
    """Goodfellow's turns. The generator's backward leaves gradients in the discriminator that nobody uses."""
    log_loss = nn.functional.binary_cross_entropy_with_logits
    for images, seeds in zip(real, noise, strict=True):
        ones, zeros = torch.ones(len(images), 1), torch.zeros(len(images), 1)
        fake = generator.forward(seeds)
        discriminator.optimizer.zero_grad()
        log_loss(discriminator.forward(images), ones).backward()
        log_loss(discriminator.forward(fake.detach()), zeros).backward()
        discriminator.optimizer.step()
        generator.optimizer.zero_grad()
        log_loss(discriminator.forward(fake), ones).backward()
        generator.optimizer.step()


@with_wrappers
def test_a_gan_trains_both_of_its_models_right(face, kind):
    """Horovod's optimizer refuses the two backwards before one step, as Horovod's own does."""

    def networks() -> list[nn.Module]:
        judge = nn.Sequential(nn.Linear(5, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
        return [seeded(mlp), seeded(lambda: judge, 1)]

    wrap: Callable[..., Wrapped] = FACES[face]
    mine, expected = networks(), networks()
    real, noise = batches(STEPS, width=5, seed=2), batches(STEPS)
    train_gan(*(alone(each) for each in expected), real, noise)
    train_gan(*(wrap(each, kind) for each in mine), parts(real), parts(noise))
    for model, right in zip(mine, expected, strict=True):
        require_right(model, right)


@in_all_faces
def test_a_spectral_norm_trains_right(face, kind):
    """Each forward moves its buffers."""

    def network() -> nn.Module:
        torch.manual_seed(3)  # the buffers are drawn
        return nn.Sequential(spectral_norm(nn.Linear(10, 12)), nn.Tanh(), spectral_norm(nn.Linear(12, 5)))

    model, expected = network(), network()
    alone(expected).train(batches(STEPS))
    FACES[face](model, kind).train(parts(batches(STEPS)))
    require_right(model, expected)
    for mine, right in zip(model.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-6)


@in_all_faces
@pytest.mark.parametrize("kept", ["SWA", "EMA"])
def test_averages_of_weights_are_right_and_can_be_swapped_in(kept, face, kind):
    """They are evaluated in the model's place for a moment after each step, and the model goes on from its own."""

    def train(
        wrap: Callable[..., Wrapped], model: nn.Module, inputs: Tensor
    ) -> tuple[AveragedModel, list[Tensor]]:
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7) if kept == "EMA" else None)
        wrapped, outputs = wrap(model), []
        for batch in inputs:
            wrapped.train(batch[None])
            averaged.update_parameters(model)
            own = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(averaged.module.state_dict())
            with torch.no_grad():
                outputs.append(wrapped.forward(seen))
            model.load_state_dict(own)
        return averaged, outputs

    seen, model, expected = batches(1, seed=5)[0], seeded(mlp), seeded(mlp)
    right, right_outputs = train(alone, expected, batches(STEPS))
    mine, outputs = train(lambda model: FACES[face](model, kind), model, parts(batches(STEPS)))
    require_right(model, expected)
    require_right(mine, right)
    torch.testing.assert_close(outputs, right_outputs, rtol=1e-4, atol=1e-6)
