"""Your own training script, recorded: torchrun --nproc-per-node 2 docs/examples/own_script.py [FOLDER]."""

import sys

import torch
import torch.distributed as dist

from kit.measure import Recorder

dist.init_process_group("gloo")
with Recorder(sys.argv[1] if len(sys.argv) > 1 else "runs/own", config={"cycles": 3}) as rec:
    layer = torch.nn.Linear(512, 512)
    for parameter in layer.parameters():
        dist.broadcast(parameter.data, src=0)

    for cycle in range(3):
        with rec.phase("train", cycle=cycle):
            loss = layer(torch.randn(32, 512)).square().mean()
            layer.zero_grad()
            loss.backward()
            for parameter in layer.parameters():
                dist.all_reduce(parameter.grad)
                parameter.data -= 0.1 / rec.world_size * parameter.grad
            rec.record("loss", loss)
        with rec.phase("offload", cycle=cycle):
            kept = [(parameter, parameter.data.numpy().tobytes(), parameter.shape) for parameter in layer.parameters()]
            for parameter in layer.parameters():
                parameter.data = torch.empty(0)
        with rec.phase("reload", cycle=cycle):
            for parameter, data, shape in kept:
                parameter.data = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)
dist.destroy_process_group()
