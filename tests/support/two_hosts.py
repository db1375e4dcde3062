"""A rank on one of two hosts: what it prints of its connections, found in several ways. Run by `test_links.py`."""

import os
import sys
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fshard
from fshard.hosts import compare_calls, one_host, rendezvous


def main(rank: int, address: str) -> None:
    """Connect three times, and compare a checked call."""
    where = f"[{address}]" if ":" in address else address
    seconds = timedelta(seconds=40)
    dist.init_process_group("gloo", init_method=f"tcp://{where}:29511", rank=rank, world_size=2, timeout=seconds)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    of_the_machine = mock.patch.object(rendezvous, "_host", return_value="one image")
    for way in ("named", "route", "copies"):
        if way == "route":
            del os.environ["GLOO_SOCKET_IFNAME"]
        if way == "copies":
            of_the_machine.start()
        connected, words = one_host.connect(mesh), compare_calls.lines_of(mesh)
        assert words is not None
        (link,) = words._links["shard"].values()
        print(way, type(connected.ranks("shard")).__name__, link.socket.getpeername()[0])
        try:
            words.run(lambda: fshard.all_reduce(torch.ones(3 + rank), mesh, "shard"))
        except fshard.MismatchError as failure:
            print("rank 1 all_reduce(float32[4]" in str(failure))
        print(words.run(lambda: fshard.all_reduce(torch.ones(1), mesh, "shard").item()))
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
