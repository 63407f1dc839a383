"""Two plain functions under test, which leave groups behind: the run exits with 1.
kit run offload --set implementation=docs.examples.own_pair:OwnPair"""

from typing import Any

from megatron.core import parallel_state


def destroy_groups() -> dict[str, int]:
    sizes = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
    }
    parallel_state.destroy_model_parallel()
    return sizes


def rebuild_groups(sizes: dict[str, int]) -> None:
    parallel_state.initialize_model_parallel(**sizes)


class OwnPair:
    def __init__(self, ctx: Any) -> None:
        print(f"rank {ctx.rank} of {ctx.world_size} on {ctx.device}: {len(ctx.groups)} groups to release")

    def destroy(self) -> dict[str, int]:
        return destroy_groups()

    def reload(self, snapshot: dict[str, int]) -> None:
        rebuild_groups(snapshot)
