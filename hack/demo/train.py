"""Trains a small convolutional network on pictures that it draws, with PyTorch's DistributedDataParallel on CPUs.

Two processes share each batch. The first one then trains the same network alone on whole batches, and compares the weights. Nothing here
is Evenkeel's but the name of the backend, and the address at which the plugin's counters are read.
"""

import os
import time
import urllib.request
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 100
BATCH = 32
SIZE = 24
"""Pixels of a picture's side."""
NETWORK_NAMES = (
    *("evenkeel_message_bytes_total", "evenkeel_flow_bytes_total", "evenkeel_flow_retransmits_total"),
    *("evenkeel_flows_lost_total", "evenkeel_flows_replaced_total", "evenkeel_repaths_total", "evenkeel_recoveries_total"),
)


def pictures(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy pictures of a disc, a ring, a square or a cross, of shape ``[count, 1, SIZE, SIZE]``, and which of them each one is."""
    kinds = torch.randint(4, (count,), generator=generator)
    centre = torch.randint(8, SIZE - 8, (2, count, 1, 1), generator=generator)
    radius = torch.randint(4, 8, (count, 1, 1), generator=generator)
    down, right = (torch.arange(SIZE).view(1, -1, 1) - centre[0]).abs(), (torch.arange(SIZE).view(1, 1, -1) - centre[1]).abs()
    distance = (down**2 + right**2).sqrt()
    shapes = torch.stack(
        [
            distance <= radius,
            (distance <= radius) & (distance > radius - 2),
            torch.maximum(down, right) <= radius,
            (torch.minimum(down, right) <= 1) & (torch.maximum(down, right) <= radius),
        ]
    )
    drawn = shapes[kinds, torch.arange(count)].to(torch.get_default_dtype())
    return (drawn + 0.3 * torch.randn(drawn.shape, generator=generator)).unsqueeze(1), kinds


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, 256), nn.ReLU(), nn.Linear(256, 4)),
    )


def train(model: nn.Module, rank: int, size: int) -> list[float]:
    """Trains on this rank's part of every batch. Returns the losses, which are averages over all ranks."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        # All ranks draw the same batch, so that one process can repeat it.
        images, kinds = pictures(BATCH, torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(images[rank::size]), kinds[rank::size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    if size > 1:
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean.tolist()


def accuracy(model: nn.Module) -> float:
    images, kinds = pictures(1000, torch.Generator().manual_seed(STEPS))
    with torch.no_grad():
        return (model(images).argmax(1) == kinds).double().mean().item()


def counters() -> list[str]:
    """What the connections of this process have carried, from the metrics that EVENKEEL_METRICS turns on."""
    with urllib.request.urlopen(f"http://{os.environ['EVENKEEL_METRICS']}/metrics", timeout=10) as answer:
        return [line for line in answer.read().decode().splitlines() if line.startswith(NETWORK_NAMES)]


def main() -> None:
    torch.set_num_threads(1)
    # In 32 bits, the order of a sum changes its rounding, and in 100 steps that alone changes weights in the second digit.
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("evenkeel", timeout=timedelta(minutes=3))
    rank, size = dist.get_rank(), dist.get_world_size()
    model = network()
    print(f"torch {torch.__version__}, rank {rank} of {size}, backend {dist.get_backend()}", flush=True)
    begun = time.monotonic()
    losses = train(DistributedDataParallel(model), rank, size)
    seconds = time.monotonic() - begun
    for line in counters():
        print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if rank != 0:
        return
    for step, loss in enumerate(losses):
        print(f"step {step} loss {loss:.6f}")
    bytes_of_gradients = sum(weights.nbytes for weights in model.parameters())
    print(f"trained {STEPS} steps in {seconds:.1f} s, {bytes_of_gradients} bytes of gradients each")
    print(f"accuracy {accuracy(model):.3f} on 1000 new pictures")
    alone = network()
    train(alone, 0, 1)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    print(f"largest difference of a weight from one process {max((a - b).abs().max().item() for a, b in pairs):.1e}", flush=True)


if __name__ == "__main__":
    main()
