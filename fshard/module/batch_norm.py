"""Batch norms whose statistics are those of the batch of all ranks."""

from __future__ import annotations

from torch import nn

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
