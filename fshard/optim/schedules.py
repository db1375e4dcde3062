"""Schedules: functions from the number of updates so far (a 0-d tensor) to a value (a 0-d tensor).

Any such function is a schedule. The schedules of this file, from torch.optim.lr_scheduler and optax, make no copies
from device to host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.arguments import check_whole, expect, is_number, wrong
from ..core.scalars import double

Schedule = Callable[[Tensor], Tensor]


def _check_numbers(name: str, steps: object = 1, **numbers: object) -> None:
    check_whole(f"schedule {name}: steps", steps, what="a number of steps")
    for argument, value in numbers.items():
        expect(f"schedule {name}: {argument}", value, is_number(value) and math.isfinite(value), "a finite number")


def _share(count: Tensor, steps: int) -> Tensor:
    return (double(count) / steps).clamp(0, 1)


def constant(value: float) -> Schedule:
    """A schedule of `value` at every step.

    >>> constant(0.1)(torch.tensor(5.0)).item()
    0.1
    """
    _check_numbers("constant", value=value)
    return lambda count: torch.full((), value, dtype=torch.float64, device=double(count).device)


def linear(start: float, end: float, steps: int) -> Schedule:
    """A linear schedule from `start` to `end` in `steps` steps, then `end`. As optax.linear_schedule.

    >>> linear(0.0, 1.0, 4)(torch.tensor(1.0)).item()
    0.25
    """
    _check_numbers("linear", steps, start=start, end=end)
    return lambda count: start + (end - start) * _share(count, steps)


def cosine(start: float, steps: int, end: float = 0.0) -> Schedule:
    """Return half a cosine from `start` to `end` in `steps` steps, then `end`.

    Until `steps`, the values are those of torch's CosineAnnealingLR.

    >>> cosine(1.0, 4)(torch.tensor(2.0)).item()
    0.5
    """
    _check_numbers("cosine", steps, start=start, end=end)
    return lambda count: end + (start - end) * (1 + torch.cos(math.pi * _share(count, steps))) / 2


def warmup_cosine(peak: float, warmup: int, steps: int, start: float = 0.0, end: float = 0.0) -> Schedule:
    """A schedule with a linear warm-up, then half a cosine. As optax.warmup_cosine_decay_schedule.

    The value rises from `start` to `peak` in `warmup` steps, and falls to `end` at step `steps`, warm-up included.

    >>> schedule = warmup_cosine(1.0, warmup=2, steps=6)
    >>> [schedule(torch.tensor(float(i))).item() for i in (0, 1, 2, 4)]
    [0.0, 0.5, 1.0, 0.5]
    """
    _check_numbers("warmup_cosine", warmup, peak=peak, start=start, end=end)
    check_whole("schedule warmup_cosine: steps", steps, warmup + 1, what="a number of steps, warm-up included")
    return join([linear(start, peak, warmup), cosine(peak, steps - warmup, end)], [warmup])


def join(schedules: Sequence[Callable[[Tensor], Tensor]], boundaries: Sequence[int]) -> Schedule:
    """A schedule that runs `schedules` in sequence. As optax.join_schedules.

    Schedule `i + 1` begins at step `boundaries[i]`, and counts from that step. ValueError unless boundaries rise
    and are one fewer than schedules.

    >>> join([constant(1.0), linear(1.0, 0.0, 2)], [3])(torch.tensor(4.0)).item()
    0.5
    """
    if not isinstance(schedules, list | tuple) or not all(callable(schedule) for schedule in schedules):
        raise TypeError(f"schedule join: {wrong('schedules', schedules, 'a list of schedules, functions of a count')}")
    if not isinstance(boundaries, list | tuple) or not all(map(is_number, boundaries)):
        raise TypeError(f"schedule join: {wrong('boundaries', boundaries, 'a list of numbers of steps')}")
    if len(boundaries) != len(schedules) - 1 or list(boundaries) != sorted(boundaries):
        raise ValueError(
            f"schedule join: expected {len(schedules) - 1} rising boundaries for {len(schedules)} schedules, got "
            f"{list(boundaries)}"
        )

    def schedule(count: Tensor) -> Tensor:
        t = count if isinstance(count, Tensor) else double(count)
        value = schedules[0](t)
        for boundary, following in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(t >= boundary, following(t - boundary), value)
        return value

    return schedule
