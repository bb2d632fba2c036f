"""Communication hooks with and without a planted race. DDP reads their annotations, which must not be strings."""

import time
from typing import Any

import torch
import torch.distributed as dist

_LATE_S = 0.03
_works: list[Any] = []


def hasty(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hands the bucket back before its all-reduce is done: the race.

    A rank comes late to the last bucket, as ranks do: the other's all-reduce cannot be done when it reads the bucket.
    """
    if dist.get_rank() and bucket.is_last():
        time.sleep(_LATE_S)
    tensor = bucket.buffer().div_(dist.get_world_size())
    _works.append(dist.all_reduce(tensor, async_op=True))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(tensor)
    return done


def patient(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The same with the wait in place."""
    tensor = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(tensor, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
