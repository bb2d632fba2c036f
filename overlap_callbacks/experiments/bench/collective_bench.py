"""One point of ``overlap bench collectives`` in one round: consecutive calls of one kind and size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlap_callbacks.analysis.results.bench import TransferPoint, TransferRound
from overlap_callbacks.experiments.bench.results import ELEMENT_BYTES
from overlap_callbacks.experiments.bench.site import Call, Site

_WARM_UP, _LOOK, _MAX_CALLS = 2, 3, 2000
# One side finishes before the other, so time the receiver.
_ONE_SIDED = ("broadcast", "send_recv")
# torch has renamed it, and warns about the old name.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def transfer_of(point: TransferPoint, group: Any, members: Sequence[int], device: torch.device) -> Call | None:
    """A function that runs a collective, or issues it and returns its work; None on a rank that takes no part.

    ``group``: this rank's process group of ``members``. Messages are on ``device``.
    """
    ranks, place = len(members), list(members).index(dist.get_rank())
    count = point.message_bytes // ELEMENT_BYTES
    asynchronous = device.type == "cuda"

    def zeros(elements: int) -> torch.Tensor:
        return torch.zeros(elements, device=device)

    if point.kind == "send_recv":
        if place > 1:
            return None
        message = zeros(count)
        if place == 0:
            return _point_to_point(dist.isend if asynchronous else dist.send, message, members[1], group)
        return _point_to_point(dist.irecv if asynchronous else dist.recv, message, members[0], group)
    whole, part = zeros(count), zeros(count // ranks)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group, async_op=asynchronous),
        "all_gather": lambda: _ALL_GATHER(whole, part, group=group, async_op=asynchronous),
        "reduce_scatter": lambda: _REDUCE_SCATTER(part, whole, group=group, async_op=asynchronous),
        "broadcast": lambda: dist.broadcast(whole, members[0], group=group, async_op=asynchronous),
    }
    if point.kind == "all_to_all":
        received = zeros(count)
        return lambda: dist.all_to_all_single(received, whole, group=group, async_op=asynchronous)
    return calls[point.kind]


def _point_to_point(function: Callable[..., Any], message: torch.Tensor, peer: int, group: Any) -> Call:
    return lambda: function(message, peer, group=group)


def measure_transfer(
    point: TransferPoint,
    number: int,
    groups: Sequence[Sequence[int]],
    transfer: Call | None,
    site: Site,
    block_s: float,
) -> TransferRound:
    """Measure a point in one round. All ranks call it together, and get the same result.

    Args:
        point: what is measured.
        number: of the round.
        groups: the ranks of each group; all groups communicate at the same time.
        transfer: from ``transfer_of``.
        site: where it is measured.
        block_s: minimum length of a block.
    """
    _chain_ms(transfer, _WARM_UP, site)
    look_ms = _chain_ms(transfer, _LOOK, site)
    one_ms = max(1e-6, max(ms for ms in look_ms if ms is not None) / _LOOK)
    calls = int(site.ranks.agree(max(_LOOK, min(_MAX_CALLS, math.ceil(1e3 * block_s / one_ms)))))
    chains = _chain_ms(transfer, calls, site)
    # An early rank's time includes waiting for the others; the last rank waits for none.
    counts = max if point.kind in _ONE_SIDED else min
    logs = [math.log(counts(_known(chains, group)) / calls) for group in groups]
    time_ms = math.exp(sum(logs) / len(logs))
    return TransferRound(point=point, round=number, group_size=len(groups[0]), time_ms=time_ms, calls=calls)


def _known(chains: Sequence[float | None], group: Sequence[int]) -> list[float]:
    """Times of the ranks of a group that took part and measure; a phantom does not."""
    return [max(ms, 1e-6) for rank in group if rank < len(chains) and (ms := chains[rank]) is not None]


def _chain_ms(transfer: Call | None, calls: int, site: Site) -> list[float | None]:
    """How long consecutive calls took on each rank; None on a rank that takes no part."""
    site.ranks.barrier()
    return site.ranks.gather(None if transfer is None else site.trials.run(None, 0, transfer, calls).transfers_ms)
