"""Megatron-core's own switches, as a native form."""

from __future__ import annotations

from typing import Any

from overlap_callbacks.gate.native import OverlapSwitch

# The settings under which the switches were seen to leave every bit of the weights as it is. With tensor, context or
# expert parallelism there is besides communication that no switch reaches.
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


class Switches(OverlapSwitch):
    """Megatron's own switches, between steps; only those that the job was built with."""

    def __init__(self, core: Any, chunks: list[Any], by_hand: bool) -> None:
        if not all(isinstance(chunk, core.ddp) for chunk in chunks):
            raise ValueError("sequential='native' needs model chunks in Megatron-core's DistributedDataParallel")
        configs = list({id(c): c for chunk in chunks for c in (chunk.ddp_config, chunk.config)}.values())
        found = {(name, getattr(holder, name, None)) for holder in (*chunks, *configs) for name in _PROVEN}
        odd = sorted(f"{name}={value!r}" for name, value in found if value not in (None, _PROVEN[name]))
        if odd:
            raise ValueError(
                f"sequential='native' is not known to be safe, or to reach all communication, with {', '.join(odd)}: "
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
        self._undo: list[tuple[Any, str, Any]] = []

    def disable(self) -> None:
        for config, name in self._flags:  # all, before the first is turned: half of them would reduce twice
            if getattr(config, name) is not True:
                raise RuntimeError(f"{name} was switched off by somebody else: it is left alone")
        for config, name in self._flags:
            self._set(config, name, False)
        # With these set, pipeline stages start the reductions and gathers themselves: reductions would be done twice.
        for config in self._configs:
            for name in ("grad_sync_func", "param_sync_func"):
                if getattr(config, name, None) is not None:
                    self._set(config, name, None)

    def _set(self, config: Any, name: str, value: Any) -> None:
        self._undo.append((config, name, getattr(config, name)))
        setattr(config, name, value)
        if getattr(config, name) is not value:
            raise RuntimeError(f"{name} did not take the value {value}")

    def restore(self) -> None:
        while self._undo:
            setattr(*self._undo.pop())

    def gather_parameters(self) -> None:
        """At a sequential step's begin: gather all parameters now, so that the hooks before the layers find them.

        The flag and the hooks stay as they are, because Megatron-LM takes the hooks off and on itself.
        """
        for chunk in self._gathering:
            if chunk.remove_forward_pre_hook_handles:  # it has them off in its first step
                chunk.start_param_sync(force_sync=True)
