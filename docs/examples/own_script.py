"""A small training of your own, recorded. Run it with: torchrun --nproc-per-node 2 docs/examples/own_script.py [FOLDER]."""

import sys

import torch
import torch.distributed as dist

from kit.measure import Recorder

dist.init_process_group("gloo")
with Recorder(sys.argv[1] if len(sys.argv) > 1 else "runs/own", config={"cycles": 3}) as rec:
    torch.manual_seed(rec.rank)
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters())

    for cycle in range(3):
        with rec.phase("train", cycle=cycle):
            loss = model(torch.randn(32, 512)).square().mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            rec.record("loss", loss)

        with rec.phase("offload", cycle=cycle):
            kept = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.data = torch.empty(0)

        with rec.phase("reload", cycle=cycle):
            for parameter, data, shape in zip(model.parameters(), kept, [(512, 512), (512,)], strict=True):
                parameter.data = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(shape)

    rec.record("parameters", sum(p.numel() for p in model.parameters()))
dist.destroy_process_group()
