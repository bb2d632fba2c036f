"""Rules that classify a kernel by its name: whether it communicates, which collective it is, its family of compute.

Each is a table searched from top to bottom; the first match decides. Extend the tables if your job has custom kernels:
``names.families.insert(0, Rule("attention", r"my_attention"))``.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple


class Rule(NamedTuple):
    """Gives ``label`` to names that contain ``pattern``, a regular expression."""

    label: str
    pattern: str


# Patterns of communication kernels, searched anywhere in the name; extend with ``communication_patterns.append``. A
# fixed prefix would not do: hipblaslt_* is compute, and multimem_all_reduce_kernel is communication. A pattern may
# match copies too: ``Memcpy PtoP`` is a copy engine that moves data between devices.
communication_patterns: list[str] = [
    r"^(void )?(nccl|rccl|ncclx|oneccl|hccl)",
    r"nccl(Dev)?Kernel",
    r"mscclpp|msccl[A-Z_]|^(void )?msccl",
    r"nvshmem|rocshmem|barrier_on_stream",
    r"multimem_(all_reduce|one_shot|all_gather|reduce)",
    # All-reduces in one or two shots, by any library (oneshot_mc_allreduce, allreduce_2shot_mc).
    r"(?i:(one|two|[12])_?shot_?(\w*_)?(all_?reduce|reduce_?scatter|all_?gather))",
    r"(?i:(all_?reduce|reduce_?scatter|all_?gather)_(\w*_)?(one|two|[12])_?shot)",
    r"symmetric_memory(::|\d)|intra_node_comm::|(?i:symm_mem).*(all_gather|all_reduce|reduce_scatter|all_to_all)",
    # DeepEP, by its own name and by the one in DeepSeek's traces. (cdpsk::ep::CUB_* are scans of CUB.)
    r"(?<![a-z])(deep_ep|dpsk::ep)::|hybrid_ep::",
    # Dispatch and combine of MORI, TensorRT-LLM and FlashInfer, and pplx. MORI's names may be mangled.
    r"(^|[:\s\d])Ep(Dispatch|Combine)[A-Z]|moeA2A(Dispatch|Combine)|moeAllToAll|a2a_(dispatch|combine)_(send|recv)",
    r"userbuffers_|cross_device_reduce_|allreduce_fusion_kernel",
    # All-reduces of AMD's quickreduce and aiter. Their names may be mangled.
    r"quickreduce(::|\d)|allreduce_prototype_|reduce_scatter_cross_device|aiter(::|\d+)\w*(?i:all_?(reduce|gather))",
    # Kernels on NCCL's device API: torch's operators, UBX, kernels on memory that others load and store (LSA) or access
    # over the network (GIN), and any with NCCL's communicator or window as a parameter. Names may be mangled.
    r"nccl_extension(::|\d)|(?<![a-zA-Z])ubx_kernel_|reshardKernelUserWindow|ncclDevComm|ncclWindow_",
    r"_lsa_kernel|(?<![a-zA-Z])lsa_(\w*_)?(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|a2a|comm|put|get)",
    r"(?<![a-zA-Z])gin_(\w*_)?(all_?to_?all|put|get)|(PureGin|Gin|Hybrid)AlltoAllKernel",
    r"^Memcpy PtoP",
]
_OF_KERNELS = frozenset(communication_patterns)
# Torch's ranges of collectives of host libraries; kernels' patterns do not apply to ranges.
ON_HOST = r"^(gloo|ucc|mpi):\w"
communication_patterns.append(ON_HOST)

# Those whose kernels access other ranks' memory directly, so their companions may be copies within the device.
direct_communication: list[str] = [
    r"symmetric_memory::|(?i:symm_?mem)|userbuffers|barrier_on_stream|nvshmem|rocshmem|multimem_",
    r"nccl_extension|ubx_kernel_|_lsa_kernel|(?<![a-zA-Z])lsa_|reshardKernelUserWindow|shot_mc_|ncclWindow_",
]

# Kernels that only prepare or finish communication in their own device's memory: compute, although a pattern above may
# match. The rule: a kernel communicates if it reads, writes or awaits memory of another rank. So exchanges of counts
# (DeepEP's notify_dispatch) and barriers communicate, but layouts, packing and local sums do not.
not_communication: list[str] = [
    # Inductor names kernels after the operators whose results they use; all of its kernels are local.
    r"^triton_[a-z_]+_fused_",
    r"get_dispatch_layout|deep_ep::layout::",
    r"deep_ep::elastic::\w*(prologue|epilogue)",
    r"hybrid_ep::scan",
    r"moeA2A(Prepare|Sanitize)",
    r"EpDispatchCopyToStaging|EpCombineAll|EpCombineSync(?!Barrier)",
]

# For names of kernels, of torch's ranges (nccl:all_reduce), and in trace metadata (_allgather_base).
collectives: list[Rule] = [
    Rule("reduce_scatter", r"(?i)reduce_?scatter"),
    Rule("all_reduce", r"(?i)all_?reduce|cross_device_reduce_|userbuffers_fp16_sum|quickreduce"),
    Rule("all_gather", r"(?i)all_?gather"),
    Rule(
        "all_to_all",
        r"(?i)all_?to_?all|deep_ep::|dpsk::ep::|hybrid_ep::|Ep(Dispatch|Combine)|a2a_?(dispatch|combine)|\ba2av?_|_a2av?_",
    ),
    Rule("broadcast", r"(?i)broadcast"),
    Rule("send_recv", r"(?i)send|recv"),
    Rule("reduce", r"(?i)reduce"),
    Rule("gather", r"(?i)gather"),
    Rule("scatter", r"(?i)scatter"),
    Rule("barrier", r"(?i)barrier"),
    Rule("peer_copy", r"^Memcpy PtoP"),
]

# Copies by direction, as CUPTI, roctracer and rocprofiler name them.
copies: list[Rule] = [
    Rule("copies to the host", r"^Memcpy [DA]toH|^CopyDeviceToHost"),
    Rule("copies from the host", r"^Memcpy Hto[DA]|^CopyHostToDevice"),
    Rule("copies within the device", r"^Memcpy [DA]to[DA]|^CopyDeviceToDevice"),
    Rule("copies between devices", r"^Memcpy PtoP"),
]
COPIES = tuple([rule.label for rule in copies])

# For kernels of the device and for torch operators on the host. Convolutions count as GEMM: they are computed as such.
families: list[Rule] = [
    Rule("elementwise", r"^triton_poi_fused_\w*(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)"),
    Rule("attention", r"(?i)flash|fmha|attention|attn|sdpa|paged_kv"),
    Rule("optimizer", r"(?i)multi_tensor_apply|fused_?(adam|sgd|lamb)|_?adamw?_|adagrad|_foreach_|lamb_"),
    Rule("normalisation", r"(?i)(layer|rms|batch|group|instance)_?norm|native_norm|ln_(fwd|bwd)|(\b|_)bn_"),
    Rule("normalisation", r"GammaBeta|RowwiseMoments|ComputeInternalGradients"),
    Rule("gemm", r"(?i)(?<!fb)gemm|gemv|cutlass|cublas|hipblaslt|nvjet|rocblas|tensile|^Cijk_|splitk|triton_(tem|mm)"),
    Rule("gemm", r"(?i)xmma|scudnn|wgrad|dgrad|fprop|conv(?!ert)|winograd"),
    Rule("gemm", r"^aten::_?(addmm|mm|bmm|baddbmm|linear|matmul|mv|addmv|addbmm)(_|$)"),
    Rule("copy", r"(?i)memcpy|memset|direct_copy|copy_kernel|CatArrayBatchedCopy|nchwToNhwc|nhwcToNchw|transpose"),
    Rule("copy", r"^aten::(copy_|_to_copy|clone|cat|contiguous)$"),
    Rule("reduction", r"(?i)reduce|softmax|cross_entropy|nll_loss|logsumexp|cumsum|scan|triton_(red|per)"),
    Rule("reduction", r"^aten::(sum|mean|max|min|amax|amin|norm|argmax|argmin)$"),
    Rule("elementwise", r"(?i)elementwise|triton_poi|pointwise|dropout|gelu|relu|silu|swiglu|bias|fill"),
    Rule("elementwise", r"^aten::(add|sub|rsub|mul|div|addcmul|addcdiv|lerp|neg|abs|exp|log|sqrt|rsqrt|pow)(_|$)"),
    Rule("elementwise", r"^aten::(tanh|sigmoid|threshold|where|zero|zeros|ones|sign|clamp|maximum|minimum)(_|$)"),
]

OTHER = "other"


# Cached names: a trace asks for the same few hundred repeatedly, and some have thousands of characters.
_REMEMBERED = 2048


def is_communication(name: str) -> bool:
    """Whether a kernel or copy (on CPU, an asynchronous range) with this name communicates."""
    return not is_local(name) and _any(tuple(communication_patterns), name)


def is_communication_range(name: str) -> bool:
    """Whether an asynchronous host range communicates: torch's own, or one that matches a user's pattern."""
    return _any(tuple([pattern for pattern in communication_patterns if pattern not in _OF_KERNELS]), name)


def is_local(name: str) -> bool:
    """Whether a kernel's name only suggests communication."""
    return _any(tuple(not_communication), name)


def collective_of(name: str) -> str:
    """The kind of collective, such as ``all_reduce``; ``other`` without a match."""
    return _first(tuple(collectives), name)


def collective_in_words(name: str) -> str:
    """The one name of a collective on all screens, from an operator or a range.

    E.g. ``all_gather`` of ``_allgather_base_``, ``all_reduce (gloo)`` of ``gloo:all_reduce``, ``recv`` of ``recv_``.
    """
    library, colon, operator = name.rpartition(":")
    operator = operator.strip("_")
    kind = collective_of(operator)
    if kind == "send_recv" and operator.startswith(("send", "recv")) and "send_recv" not in operator:
        kind = operator[:4]
    return f"{operator if kind == 'other' else kind}{f' ({library})' if colon else ''}"


def family_of(name: str) -> str:
    """The family of a compute kernel, e.g. ``gemm``; ``other`` if no rule matches."""
    return _first(tuple(families), name)


def copy_of(name: str) -> str:
    """The direction of a copy, one of ``COPIES``; ``other`` of fills, and if no rule matches."""
    return _first(tuple(copies), name)


@functools.lru_cache(_REMEMBERED)
def _any(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


@functools.lru_cache(_REMEMBERED)
def _first(rules: tuple[Rule, ...], name: str) -> str:
    for label, pattern in rules:
        if re.search(pattern, name):
            return label
    return OTHER
