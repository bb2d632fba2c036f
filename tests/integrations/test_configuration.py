"""What adapters read of a job's configuration, by the job's own objects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from overlap_callbacks import OverlapMonitor
from overlap_callbacks.integrations import _configuration


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net(hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, 4))


def test_ddp_gives_its_model_and_buckets(group: None) -> None:
    one, other = (_configuration.of_models([DistributedDataParallel(net(), bucket_cap_mb=mb)]) for mb in (1, 2))
    assert one["model"] == "Sequential"
    assert one["parameters"] == 4 * 8 + 8 + 8 * 4 + 4
    assert one["parameter_types"] == "float32"
    assert [name for name in one if one[name] != other[name]] == ["ddp_bucket_cap_bytes"]
    assert (one["ddp_bucket_cap_bytes"], other["ddp_bucket_cap_bytes"]) == (2**20, 2**21)


def test_models_of_other_sizes_have_other_shapes() -> None:
    assert _configuration.of_models([net(8)])["shapes"] == _configuration.of_models([net(8)])["shapes"]
    assert _configuration.of_models([net(8)])["shapes"] != _configuration.of_models([net(16)])["shapes"]


def test_fsdp_gives_its_units_and_whole_parameters(group: None) -> None:
    model = net()
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    found = _configuration.of_models([model])
    assert (found["fsdp_units"], found["fsdp_prefetch"]) == (3, 0)
    assert found["shapes"] == _configuration.of_models([net()])["shapes"]
    first, second = model.children()
    first.set_modules_to_forward_prefetch([second])
    assert _configuration.of_models([model])["fsdp_prefetch"] == 1


def test_what_cannot_be_read_or_kept_is_left_out_and_nothing_is_raised() -> None:
    monitor = OverlapMonitor(sinks=[])
    _configuration.tell(
        monitor,
        lambda: {"shapes": "abc"},
        lambda: 1 / 0,
        lambda: {"odd": torch.float32, "long": "x" * 1000, "nan": float("nan")},  # type: ignore[dict-item, return-value]
    )
    kept = monitor.config.configuration
    assert kept == {"shapes": "abc", "odd": "torch.float32", "long": "x" * 100, "nan": "nan"}
    monitor.close()
