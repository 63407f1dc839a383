"""Ray actors, recorded as one run: python docs/examples/ray_actors.py [FOLDER]. Ray assigns actors no rank, so the driver does."""

import sys

import torch

from kit.measure import Recorder


class Trainer:
    """One rank. Each actor is a separate process and writes its own file of records into the same folder."""

    def __init__(self, folder: str, rank: int, world_size: int) -> None:
        self.rec = Recorder(folder, rank=rank, world_size=world_size)
        self.layer = torch.nn.Linear(64, 64)

    def train(self, steps: int) -> float:
        for step in range(steps):
            with self.rec.phase("train", cycle=step, observe=True):
                loss = self.layer(torch.randn(8, 64)).square().mean()
                self.layer.zero_grad()
                loss.backward()
                self.rec.record("loss", loss)
        return loss.item()

    def close(self) -> None:
        self.rec.close()


if __name__ == "__main__":
    import ray

    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/ray"
    actors = [ray.remote(Trainer).remote(folder, rank, 2) for rank in range(2)]
    print(ray.get([actor.train.remote(6) for actor in actors]))
    ray.get([actor.close.remote() for actor in actors])
