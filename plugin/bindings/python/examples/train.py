"""Trains a small model data-parallel on CPUs, with numpy only. Every rank has its own data, and all ranks have the same weights.

    evenkeel-run -n 4 python train.py
"""

import numpy as np

import evenkeel

INPUTS, HIDDEN, STEPS, BATCH, RATE = 2, 32, 300, 64, 1.0


def data(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's part of a step's batch: points of a square, and whether they lie in the circle."""
    points = np.random.default_rng([rank, step]).uniform(-1, 1, (BATCH, INPUTS)).astype(np.float32)
    return points, ((points**2).sum(axis=1, keepdims=True) < 0.5).astype(np.float32)


def gradients(weights: list[np.ndarray], points: np.ndarray, wanted: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """The loss (cross entropy) of a network of two layers, and its gradients."""
    w1, b1, w2, b2 = weights
    hidden = np.tanh(points @ w1 + b1)
    given = 1 / (1 + np.exp(-(hidden @ w2 + b2)))
    loss = -np.mean(wanted * np.log(given + 1e-7) + (1 - wanted) * np.log(1 - given + 1e-7))
    error = (given - wanted) / len(points)
    back = (error @ w2.T) * (1 - hidden**2)
    return float(loss), [points.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]


def main() -> None:
    with evenkeel.init() as group:
        shapes = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, 1), (1,)]
        start = np.random.default_rng(group.rank)  # different on each rank; the weights of rank 0 are broadcast
        weights = [start.normal(0, 0.5, shape).astype(np.float32) for shape in shapes]
        for weight in weights:
            group.broadcast(weight)

        losses = []
        for step in range(STEPS):
            loss, changes = gradients(weights, *data(group.rank, step))
            # One operation for all gradients. The weights are updated from views of the result.
            flat = np.concatenate([change.ravel() for change in changes] + [np.array([loss], np.float32)])
            group.allreduce(flat)
            flat /= group.size
            losses.append(float(flat[-1]))
            at = 0
            for weight in weights:
                weight -= RATE * flat[at : at + weight.size].reshape(weight.shape)
                at += weight.size

        own_weights = np.concatenate([weight.ravel() for weight in weights])
        all_weights = np.zeros((group.size, own_weights.size), np.float32)
        all_weights[group.rank] = own_weights
        group.allgather(all_weights)
        assert (all_weights == own_weights).all(), "the ranks have different weights"
        first, last = np.mean(losses[:10]), np.mean(losses[-10:])
        assert last < 0.5 * first, f"the loss fell from {first:.3f} to {last:.3f} only"
        if group.rank == 0:
            print(f"{group.size} ranks, {STEPS} steps: loss from {first:.3f} to {last:.3f}; all ranks have the same weights")


if __name__ == "__main__":
    main()
