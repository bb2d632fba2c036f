"""Which environment variables a record keeps, and how: an allow list, without secrets, of bounded length."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Variables of the libraries that communicate, and of those whose settings change how kernels run side by side.
_PREFIXES = (
    "NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "NVTE_", "NVSHMEM_", "UCX_", "FI_EFA_", "HSA_", "MSCCL_", "MSCCLPP_",
)  # fmt: skip
_NAMES = frozenset(
    {
        "AMD_SERIALIZE_COPY", "AMD_SERIALIZE_KERNEL", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING", "CUDA_SCALE_LAUNCH_QUEUES", "FI_PROVIDER", "GPU_MAX_HW_QUEUES",
        "HIP_FORCE_DEV_KERNARG", "HIP_LAUNCH_BLOCKING", "KMP_AFFINITY", "KMP_BLOCKTIME", "MKL_NUM_THREADS",
        "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING",
        "ROC_GLOBAL_CU_MASK", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG",
    }
)  # fmt: skip
# A name with one of these may hold a secret, whatever its prefix: NCCL_PSK is the key of encrypted sockets.
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|PSK|AUTH|CERT")

MAX_VARIABLES = 100
MAX_VALUE_LENGTH = 200

# The part of a path, or of an address, that names a user.
_HOME = re.compile(r"/(home|Users)/[^/:;,\s]+")
_USER_OF_ADDRESS = re.compile(r"://[^/@\s]+@")


def environment_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a record keeps, by name in alphabetical order.

    Kept are variables on an allow list of names and prefixes, without those whose name may mean a secret. In a value,
    the name of a user in a path below ``/home`` or ``/Users``, or before the ``@`` of an address, is left out. Long
    values are cut.

    Args:
        environment: e.g. ``os.environ``.
    """
    names = sorted(name for name in environment if is_kept(name))[:MAX_VARIABLES]
    return {name: shown_value(environment[name]) for name in names}


def is_kept(name: str) -> bool:
    """Whether a record keeps the variable of this name."""
    return (name in _NAMES or name.startswith(_PREFIXES)) and _SECRET.search(name) is None


def shown_value(value: str) -> str:
    """A value as the record has it."""
    value = _USER_OF_ADDRESS.sub("://…@", _HOME.sub(r"/\1/…", value))
    return value if len(value) <= MAX_VALUE_LENGTH else f"{value[: MAX_VALUE_LENGTH - 1]}…"
