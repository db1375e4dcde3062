"""A physics-informed network (Raissi et al., 2019) for Poisson's equation: second derivatives inside the loss.

    python examples/pinn.py                               # two simulated ranks
    torchrun --nproc-per-node=2 examples/pinn.py          # two processes

The equation is u_xx + u_yy = -f on the unit square and u = 0 on its boundary, where f is such that the solution is
sin(pi x) sin(2 pi y). The loss is the mean square of the residual at random points, others on every rank.
"""

from itertools import pairwise
from typing import Any

import torch
from ranks import on_ranks
from torch import Tensor
from torch.func import jacrev, vmap

import fshard

STEPS, POINTS, WIDTH = 200, 128, 32  # the points are those of one rank


def exact(points: Tensor) -> Tensor:
    x, y = points.unbind(-1)
    return torch.sin(torch.pi * x) * torch.sin(2 * torch.pi * y)


def new_params() -> list[Any]:
    sizes = [2, WIDTH, WIDTH, 1]
    return [{"w": torch.randn(n, m) / n**0.5, "b": torch.randn(m)} for n, m in pairwise(sizes)]


def u(params: Any, point: Tensor) -> Tensor:
    """The network at one point: (2,) -> (). The factor before it is zero on the boundary."""
    x = 4 * point - 2
    for layer in params[:-1]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return 16 * (point * (1 - point)).prod() * (x @ params[-1]["w"] + params[-1]["b"]).squeeze()


def loss(params: Any, points: Tensor) -> fshard.Mean:
    hessian = jacrev(jacrev(lambda point: u(params, point)))  # torch.func.hessian is the same, and slower here
    laplacian = vmap(lambda point: hessian(point).trace())(points)
    residual = laplacian + 5 * torch.pi**2 * exact(points)
    return fshard.Mean(residual.square().sum(), len(points))


def error(params: Any, points: Tensor) -> Tensor:
    """The relative error in the 2-norm."""
    solution = exact(points)
    return (vmap(lambda point: u(params, point))(points) - solution).norm() / solution.norm()


def main(mesh: Any) -> None:
    torch.manual_seed(0)  # the same parameters on every rank
    params = new_params()
    plan = fshard.make_plan(params, mesh, regather=False)  # regather=True: the loss would start twice
    tx = fshard.optim.adam(fshard.optim.schedules.cosine(1e-2, STEPS))
    state, step = fshard.init_state(fshard.shard_params(params, plan), tx), fshard.train_step(loss, tx)
    grid = torch.cartesian_prod(torch.linspace(0, 1, 33), torch.linspace(0, 1, 33))
    before = fshard.evaluate(error)(state.params, grid)
    torch.manual_seed(1 + mesh.get_rank())  # other points on every rank
    for _ in range(STEPS):
        state, _ = step(state, torch.rand(POINTS, 2))
    after = fshard.evaluate(error)(state.params, grid)
    if mesh.get_rank() == 0:
        print(f"relative error of the solution: before {before:.4f}, after {after:.4f}")


if __name__ == "__main__":
    on_ranks(main, default_device=True)
