"""How a job is parallelised, as given by the user, validated once."""

from __future__ import annotations

import msgspec

from overlap_callbacks import _validation
from overlap_callbacks.analysis.communication.model_shape import BYTES_OF_DTYPE, MAX_SIZE, ModelShape

LAYOUTS = ("megatron", "ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3")
RECOMPUTE = ("none", "selective", "full")
# Far above any real job; bounds the memory for rows of all ranks.
MAX_RANKS = 10**6
# The names that users see.
_OPTIONS = {"p": "pp", "t": "tp", "d": "dp"}


class JobShape(msgspec.Struct, frozen=True, kw_only=True):
    """A training job: its model and how it is spread over ranks.

    Attributes:
        model: its sizes.
        layout: the framework that communicates, one of ``LAYOUTS``.
        p, t, d: pipeline stages, tensor-parallel ranks, and data-parallel ranks.
        ep: data-parallel ranks over which the experts of a layer are split.
        micro_batch, global_batch: sequences of a micro-batch, and of a step on all ranks.
        stages: layers of each stage; empty for an even split.
        chunks: model chunks of a rank in the interleaved schedule.
        sequence_parallel, distributed_optimizer: as Megatron-core names them.
        recompute: activations computed again in the backward pass: ``none``, ``selective`` (attention) or ``full``.
        dtype, gradient_dtype: of activations and parameters, and of gradients (empty for the same).
        vocabulary_multiple: Megatron-LM pads the vocabulary to a multiple of this on each tensor-parallel rank.
        bucket: size of a bucket of gradients: parameters in Megatron and ZeRO, bytes in DDP; 0 for the default.
        overlap_grad_reduce: whether Megatron reduces bucket by bucket.
        replicas: of the sharded model, in ``hsdp``.
        persistence: elements up to which ZeRO-3 keeps a parameter whole.
    """

    model: ModelShape
    layout: str = "megatron"
    p: int = 1
    t: int = 1
    d: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    stages: tuple[int, ...] = ()
    chunks: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: str = "none"
    dtype: str = "bf16"
    gradient_dtype: str = ""
    vocabulary_multiple: int = 128
    bucket: int = 0
    overlap_grad_reduce: bool = False
    replicas: int = 1
    persistence: int = 100_000
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.p * self.t * self.d

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each data-parallel rank."""
        return self.global_batch // (self.micro_batch * self.d)

    @property
    def bytes_per_value(self) -> int:
        return BYTES_OF_DTYPE[self.dtype]

    @property
    def bytes_per_gradient(self) -> int:
        return BYTES_OF_DTYPE[self.gradient_dtype or self.dtype]

    @property
    def layers_of_stages(self) -> tuple[int, ...]:
        """Layers of each stage; if they do not divide evenly, the first stages have one more."""
        if self.stages:
            return self.stages
        each, more = divmod(self.model.layers, self.p)
        return tuple([each + (stage < more) for stage in range(self.p)])

    def layers_of_chunk(self, stage: int, chunk: int) -> range:
        """Numbers of the layers of one model chunk of a stage."""
        if self.chunks == 1:
            start = sum(self.layers_of_stages[:stage])
            return range(start, start + self.layers_of_stages[stage])
        each = self.model.layers // (self.p * self.chunks)
        start = (chunk * self.p + stage) * each
        return range(start, start + each)

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of a pipeline stage, all of which send the same."""
        return self.t * self.d

    def stage_of(self, rank: int) -> int:
        """Number of a rank's pipeline stage: Megatron-core counts tensor, then data, then pipeline ranks."""
        return rank // self.ranks_per_stage

    def check(self) -> None:
        """Reject an impossible job by a TypeError or ValueError that names the parameter."""
        self.model.check()
        for name in ("p", "t", "d", "micro_batch", "global_batch", "chunks", "vocabulary_multiple", "replicas", "ep"):
            _validation.count(_OPTIONS.get(name, name), getattr(self, name), minimum=1, maximum=MAX_SIZE)
        for name in ("bucket", "persistence"):
            _validation.count(name, getattr(self, name), minimum=0)
        for name, allowed in (("layout", LAYOUTS), ("recompute", RECOMPUTE), ("dtype", tuple(BYTES_OF_DTYPE))):
            _validation.one_of(name, getattr(self, name), allowed)
        _validation.one_of("gradient_dtype", self.gradient_dtype or self.dtype, tuple(BYTES_OF_DTYPE))
        if self.world_size > MAX_RANKS:
            raise ValueError(f"pp x tp x dp must be at most {MAX_RANKS} ranks, got {self.world_size}")
        if self.global_batch % (self.micro_batch * self.d):
            raise ValueError(
                f"global_batch must be a multiple of micro_batch x dp = {self.micro_batch * self.d}, "
                f"got {self.global_batch}"
            )
        self._check_pipeline()
        self._check_split()
        self._check_experts()

    def _check_pipeline(self) -> None:
        layers = self.model.layers
        if self.stages:
            if len(self.stages) != self.p or sum(self.stages) != layers or min(self.stages) < 1:
                raise ValueError(f"stages must be pp={self.p} numbers of at least 1 that add up to the {layers} "
                                 f"layers, got {','.join(map(str, self.stages))}")  # fmt: skip
        elif self.p > layers:
            raise ValueError(f"pp must be at most the {layers} layers, got {self.p}")
        if self.chunks > 1:
            if self.p == 1 or self.stages or layers % (self.p * self.chunks):
                raise ValueError(
                    f"chunks needs pp of at least 2, and pp x chunks that divides the {layers} layers, "
                    f"got pp={self.p}, chunks={self.chunks}"
                )
            if self.micro_batches % self.p:
                raise ValueError(
                    f"chunks needs a number of micro-batches that pp={self.p} divides, got {self.micro_batches}"
                )

    def _check_split(self) -> None:
        model = self.model
        if self.layout != "hsdp" and self.replicas > 1:
            raise ValueError(f"replicas must be 1 in layout {self.layout}, which has no replicas of shards, "
                             f"got {self.replicas}")  # fmt: skip
        if self.layout != "megatron":
            for name in ("sequence_parallel", "distributed_optimizer"):
                if getattr(self, name):
                    raise ValueError(f"{name} must be off outside layout megatron, got layout {self.layout}")
            if self.p * self.t * self.chunks > 1:
                raise ValueError(f"layout {self.layout} has data parallelism only: pp, tp and chunks must be 1")
            if self.layout == "hsdp" and (self.replicas < 2 or self.d % self.replicas):
                raise ValueError(f"replicas must be at least 2 and divide dp={self.d}, got {self.replicas}")
            return
        for name, size in (
            ("hidden", model.hidden),
            ("heads", model.heads),
            ("kv_heads", model.kv_heads or model.heads),
            ("ffn", model.ffn_width),
        ):
            if size % self.t:
                raise ValueError(f"tp must divide {name}={size}, got {self.t}")
        if self.sequence_parallel and (self.t == 1 or model.sequence % self.t):
            raise ValueError(
                f"sequence_parallel needs tp of at least 2 that divides sequence={model.sequence}, got {self.t}"
            )

    def _check_experts(self) -> None:
        experts = self.model.experts
        if self.ep > 1 and (not experts or experts % self.ep or self.d % self.ep):
            raise ValueError(f"ep must divide experts={experts} and dp={self.d}, got {self.ep}")
        if experts and (
            self.layout != "megatron" or self.p * self.t > 1 or self.distributed_optimizer or self.recompute == "full"
        ):
            raise ValueError(
                "experts are predicted for layout megatron with pp=1 and tp=1, without the distributed optimizer and "
                "without full recomputation"
            )
