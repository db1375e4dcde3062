"""Ray Train: the same job as Ray's workers.

`storage` is a folder that all hosts share, or a URL as s3://bucket/run:

    python examples/clusters/ray_train.py --storage /shared --workers 16 --gpu

Ray makes the process group. A second run with the same storage goes on from the
checkpoint of the first.
"""

import argparse
import os
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from train import train


def worker(config: dict[str, Any]) -> None:
    train(config["out"], config["steps"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    storage = args.storage if "://" in args.storage else os.path.abspath(args.storage)
    trainer = TorchTrainer(
        worker,
        train_loop_config={"out": f"{storage}/checkpoints", "steps": args.steps},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpu),
        torch_config=TorchConfig(backend="nccl" if args.gpu else "gloo"),
        run_config=RunConfig(
            name="fshard",
            storage_path=storage,
            # if a worker is lost, all start again, from the checkpoint
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
