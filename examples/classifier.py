"""A classifier of images: batch norms over all ranks, mixup, and an average of the weights that is evaluated.

    python examples/classifier.py                           # two simulated ranks
    torchrun --nproc-per-node=2 examples/classifier.py      # two processes

The images are scikit-learn's 1,797 digits of 8 x 8. Needs `pip install -e ".[examples]"`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from ranks import on_ranks
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fshard

EPOCHS, ROWS, TRAIN = 6, 64, 1500  # the rows are those of all ranks; what is no image for training is for the test


class Block(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


class Network(nn.Sequential):
    def __init__(self) -> None:
        convolutions = [Block(1, 16), nn.MaxPool2d(2), Block(16, 32), Block(32, 64), nn.MaxPool2d(2)]
        super().__init__(*convolutions, nn.Flatten(), nn.Linear(256, 10))


def images(device: str) -> tuple[Tensor, Tensor]:
    digits = load_digits()
    x, y = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))  # by writer before: the last are hardest
    return x[order].to(device), y[order].to(device)


def averaged(average: Any, new: Any, rate: float) -> Any:
    """The average after one more step. A leaf of parameters is this rank's shard here, and is not gathered."""
    return fshard.tree.map(lambda a, b: a.lerp(b, rate) if b.is_floating_point() else b, average, new)


def main(mesh: Any) -> None:
    rank, ranks = mesh.get_rank(), mesh.size()
    x, y = images(mesh.device_type)
    torch.manual_seed(0)  # all ranks make the same network, and the same order of images
    apply, params, buffers = fshard.module.functionalize(Network().to(mesh.device_type), sync_batch_norm=True)

    def loss(params: Any, buffers: Any, batch: tuple[Tensor, Tensor]) -> tuple[fshard.Mean, Any]:
        x, y = batch
        # mixup: each image is blended with another one of this rank; each rank draws numbers of its own
        share, other = torch.rand(len(x), 1, device=x.device), torch.randperm(len(x), device=x.device)
        x, soft = torch.lerp(x[other], x, share[..., None, None]), F.one_hot(y, 10).float()
        scores, buffers = apply(params, buffers, x)
        total = F.cross_entropy(scores, torch.lerp(soft[other], soft, share), reduction="sum")
        return fshard.Mean(total, len(x)), buffers  # the statistics of batch norms are new values

    def accuracy(params: Any, buffers: Any, batch: tuple[Tensor, Tensor]) -> fshard.Mean:
        x, y = batch
        scores, _ = apply.eval(params, buffers, x)
        return fshard.Mean((scores.argmax(1) == y).float().sum(), len(x))

    plan = fshard.make_plan(params, mesh)
    lr = fshard.optim.schedules.warmup_cosine(1e-2, warmup=10, steps=EPOCHS * -(-TRAIN // ROWS))
    tx = fshard.optim.adamw(lr, weight_decay=0.05)
    state = fshard.init_state(fshard.shard_params(params, plan), tx, seed=0, extra=buffers)
    step = fshard.train_step(loss, tx, clip_norm=1.0, with_extra=True)

    average, number = (state.params, state.extra), 0
    for _ in range(EPOCHS):
        for rows in torch.randperm(TRAIN).split(ROWS):
            own = rows[rank::ranks]  # the last batch has 28 images: the loss counts them
            state, metrics = step(state, (x[own], y[own]))
            number += 1
            average = averaged(average, (state.params, state.extra), max(0.02, 1 / number))

    test = slice(TRAIN + rank, None, ranks)  # 297 images: one rank has one more
    value = fshard.evaluate(accuracy)
    last = value(state.params, state.extra, (x[test], y[test])).item()
    smooth = value(*average, (x[test], y[test])).item()
    if rank == 0:
        print(f"loss {metrics['loss'].item():.4f}, test accuracy {last:.4f}, of the average {smooth:.4f}")


if __name__ == "__main__":
    on_ranks(main)
