"""Megatron-core's own switches, which make a step sequential without the gate."""

from __future__ import annotations

from typing import Any

from overlap_callbacks.gate.switches import AttributeSwitch, OverlapSwitch, RefusedError

# With these settings the switches were verified to leave the weights bit-identical. Tensor, context and expert
# parallelism also have communication that no switch reaches.
_PROVEN: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "overlap_p2p_comm_warmup_flush": False,
    "cuda_graph_impl": "none",
    "fp8": None,
    "delay_wgrad_compute": False,
    "num_distributed_optimizer_instances": 1,
    "average_in_collective": False,
    "reduce_scatter_with_fp32_accumulation": False,
    "fp8_param_gather": False,
    "overlap_param_gather_with_optimizer_step": False,
}


class Switches(AttributeSwitch, OverlapSwitch):
    """Megatron's switches that are on in this job. ``by_hand``: the user marks the steps.

    Raises a ValueError if they are not known to be safe for this job, or do not reach all of its communication.
    """

    def __init__(self, ddp: type[Any], chunks: list[Any], by_hand: bool) -> None:
        super().__init__()
        if not all(isinstance(chunk, ddp) for chunk in chunks):
            raise ValueError("sequential='native' needs model chunks in Megatron-core's DistributedDataParallel")
        configs = list({id(c): c for chunk in chunks for c in (chunk.ddp_config, chunk.config)}.values())
        settings = {(name, getattr(holder, name, None)) for holder in (*chunks, *configs) for name in _PROVEN}
        unproven = ", ".join(sorted(f"{name}={x!r}" for name, x in settings if x not in (None, _PROVEN[name])))
        if unproven:
            raise ValueError(
                f"sequential='native' is not known to be safe, or to reach all communication, with {unproven}: "
                f"use sequential='gate'"
            )
        names = ("overlap_grad_reduce", "overlap_p2p_comm")
        self._flags = [(c, name) for c in configs for name in names if getattr(c, name, False)]
        self._gathering = [chunk for chunk in chunks if chunk.use_forward_hook]
        if not self._flags and not self._gathering:
            raise ValueError("sequential='native' has nothing to switch off: the job was built without overlap")
        if self._gathering and by_hand:
            raise ValueError(
                "sequential='native' with overlap_param_gather needs the optimizer: attach(model, optimizer)"
            )
        gather = ["overlap_param_gather"] if self._gathering else []
        self.name = ", ".join(dict.fromkeys([name for _, name in self._flags] + gather))
        self._configs = configs

    def disable(self) -> None:
        # check all before setting one: with half of them off, gradients are reduced twice
        for config, name in self._flags:
            if getattr(config, name) is not True:
                raise RefusedError(f"{name} was switched off by somebody else: it is left alone [OC135]")
        for config, name in self._flags:
            self._set(config, name, False)
        # If these are set, pipeline stages start reductions and gathers themselves: gradients would be reduced twice.
        for config in self._configs:
            for name in ("grad_sync_func", "param_sync_func"):
                if getattr(config, name, None) is not None:
                    self._set(config, name, None)

    def _set(self, config: Any, name: str, value: Any) -> None:
        self.set(config, name, value)
        if getattr(config, name) is not value:
            raise RefusedError(f"{name} did not take the value {value} [OC136]")

    def gather_parameters(self) -> None:
        """Gather all parameters when a sequential step begins, so that the layers' hooks find them gathered.

        The flag and the hooks stay: Megatron-LM itself removes the hooks and adds them again.
        """
        for chunk in self._gathering:
            if chunk.remove_forward_pre_hook_handles:  # empty in Megatron-LM's first step
                chunk.start_param_sync(force_sync=True)
