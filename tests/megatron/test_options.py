"""NCCL options of a group, converted to plain JSON and back. No GPU is needed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from kit.megatron.handles import _settings, make_options
from kit.megatron.observe import Seen, changed


def test_every_setting_is_kept_whatever_this_torch_calls_it() -> None:
    config = SimpleNamespace(min_ctas=4, net_name=None, of_a_later_version=7, unsafe_get_ptr=lambda: 0, _private=1)
    assert _settings(config) == {"min_ctas": 4, "net_name": None, "of_a_later_version": 7}


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_options_come_back_as_they_were() -> None:
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.min_ctas, options.config.net_name = 4, "Socket"
    plain = {"cpu": {}, "cuda": {"is_high_priority_stream": True, "config": _settings(options.config)}}
    made = make_options(json.loads(json.dumps(plain)), 77.0)
    assert made.is_high_priority_stream
    assert made._timeout.total_seconds() == 77.0
    assert _settings(made.config) == _settings(options.config)
    assert len(_settings(made.config)) >= 7


def test_gloo_takes_none() -> None:
    assert make_options({"cpu": {}}, 60.0) is None


def test_only_the_values_that_differ_are_named() -> None:
    def seen(seconds: float, **more: int) -> Seen:
        backends = {"cpu": {"backend": "ProcessGroupGloo", "timeout_s": seconds, **more}}
        return Seen(options={"TP": {"backends": backends, "description": "tp"}})

    assert changed(seen(23.0), seen(23.0)) == []
    assert changed(seen(23.0), seen(30.0)) == ["TP: backends cpu timeout_s 23.0 became 30.0"]
    assert changed(seen(23.0), seen(23.0, min_ctas=4)) == ["TP: backends cpu min_ctas None became 4"]
