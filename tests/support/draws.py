"""Functions that draw random numbers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Functions that draw random numbers of the shape of `h`.
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "dropout twice": lambda h: F.dropout(F.dropout(h, 0.3), 0.2),
    "dropout of channels": lambda h: F.dropout1d(h, 0.5),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, True),
    "rand": lambda h: h * torch.rand(h.shape, dtype=h.dtype),
    "rand, float32": lambda h: h * torch.rand(4),
    "rand, much": lambda h: h * (torch.rand(300, 4).sum(0) - 150),
    "rand_like": lambda h: h * torch.rand_like(h),
    "randn": lambda h: h * torch.randn(h.shape),
    "randn_like": lambda h: h * torch.randn_like(h),
    "randint": lambda h: h * torch.randint(7, (4,)),
    "randint, from": lambda h: h * torch.randint(2, 7, (4,), dtype=torch.int32),
    "randint_like": lambda h: h * torch.randint_like(h, 5),
    "randperm": lambda h: h * torch.randperm(50)[: len(h), None],
    "randperm, int32": lambda h: (
        h * torch.randperm(40, dtype=torch.int32)[:4] + torch.randperm(1) + torch.randperm(0).sum()
    ),
    "bernoulli": lambda h: h * torch.bernoulli(torch.sigmoid(h.detach())),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.3),
    "bernoulli_, bool": lambda h: h * torch.empty(h.shape, dtype=torch.bool).bernoulli_(0.5),
    "uniform_": lambda h: h * torch.empty_like(h).uniform_(-1, 2),
    "uniform_, strides": lambda h: h * torch.empty_like(h.t()).uniform_().t(),
    "uniform_, a view": lambda h: h * torch.zeros(2 * len(h), 4)[::2].uniform_(),
    "normal_": lambda h: h * torch.empty_like(h).normal_(),
    "normal_, numbers": lambda h: h * torch.empty_like(h).normal_(1, 2),
    "exponential_": lambda h: h * torch.empty_like(h).exponential_(),
    "log_normal_": lambda h: h * torch.empty_like(h).log_normal_(),
    "cauchy_": lambda h: h * torch.empty_like(h).cauchy_(),
    "geometric_": lambda h: h * torch.empty_like(h).geometric_(0.5),
    "random_": lambda h: h * torch.empty_like(h).random_(5),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h),
    "attention": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.3)[0],
}
