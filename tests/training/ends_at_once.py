"""A program of two processes that ends right after a backward pass, while gloo's threads still want Python's lock."""

import sys

import torch
from torch.nn.parallel import DistributedDataParallel

import specdec.training.distributed  # noqa: F401  waits for gloo when Python ends

if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    layers = [torch.nn.Linear(64, 64) for _ in range(20)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)
    sys.setswitchinterval(1000)  # seconds: no thread gets the lock unless the program lets go of it
    for _ in range(3):
        model(torch.ones(4, 64)).sum().backward()
