"""Removes private content from a record: secrets and user names in environment variables, and, with ``hosts=False``,
host names.

A rank replaces its host's name by a mark, and rank 0, which knows the order of the hosts, replaces marks by numbers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

import msgspec

from overlap_callbacks.analysis.environment.job import EnvironmentSums
from overlap_callbacks.analysis.results.environment import RankEnvironment
from overlap_callbacks.analysis.results.window import RankWindow
from overlap_callbacks.analysis.safe_text import digest

T = TypeVar("T")

# Replaces a host whose number is unknown.
ANOTHER_HOST = "another host"
# Variables whose value is a host's name or address, possibly another rank's.
_NAMES_A_HOST = frozenset({"NCCL_COMM_ID", "NCCL_HOSTID"})
_MARK = re.compile(r"host:[0-9a-f]{12}")
_LOCAL = frozenset({"", "localhost", "localhost.localdomain"})


def mark_of(identity: str) -> str:
    """The mark of a host until its number is known. Host names contain no colon."""
    return f"host:{digest(identity)[:12]}"


class HiddenNames:
    """Replaces host names in texts, with or without their domains; ``localhost`` and similar names stay."""

    def __init__(self, names: Mapping[str, str]) -> None:
        by_name: dict[str, str] = {}
        for name, instead in names.items():
            if _is_local(name):
                continue
            short = name if _is_address(name) else name.partition(".")[0]
            by_name.setdefault(name.lower(), instead)
            by_name.setdefault(short.lower(), instead)
        self._instead = by_name
        longest_first = sorted(map(re.escape, by_name), key=len, reverse=True)
        # Not within another word; including a domain that follows.
        self._pattern = re.compile(
            rf"(?<![\w.-])({'|'.join(longest_first)})(?:\.[\w-]+)*(?![\w-])" if by_name else r"(?!)", re.IGNORECASE
        )

    def __call__(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._instead[found[1].lower()], text)


def _is_local(name: str) -> bool:
    if name.lower() in _LOCAL:
        return True
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


# -- on each rank


def hidden_environment(environment: RankEnvironment, hide: Callable[[str], str]) -> RankEnvironment:
    """A rank's environment with a mark instead of its host's name; ``hide`` replaces names in texts."""
    variables = {name: hide(value) for name, value in environment.variables.items() if name not in _NAMES_A_HOST}
    mark = mark_of(environment.host_id or environment.hostname)
    return msgspec.structs.replace(environment, hostname=mark, variables=variables)


def hidden_window(window: RankWindow, hide: Callable[[str], str]) -> RankWindow:
    """A rank's window without host names, except in its environment (``hidden_environment``)."""
    parts = {
        name: with_texts(getattr(window, name), hide) for name in ("problems", "doubts", "let_pass", "power", "race")
    }
    return msgspec.structs.replace(window, **parts)


# -- on rank 0


def host_numbers_of(sums: EnvironmentSums | None) -> dict[str, int]:
    """The number of each host by its mark, in the order of their lowest ranks; limited to the first hosts."""
    if sums is None:
        return {}
    names = [host.lowest[1] for host in sums.hosts] or [place.hostname for place in sums.places]
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def numbered(content: T, numbers: Mapping[str, int]) -> T:
    """Plain data with host numbers instead of marks, and without the digests of machines."""

    def number(found: re.Match[str]) -> str:
        known = numbers.get(found[0])
        return ANOTHER_HOST if known is None else f"host {known}"

    return with_texts(content, lambda text: _MARK.sub(number, text) if "host:" in text else text)


def has_marks(sums: EnvironmentSums | None) -> bool:
    """Whether ranks have replaced their hosts' names."""
    return sums is not None and _MARK.fullmatch(sums.lowest.hostname) is not None


def with_texts(content: T, change: Callable[[str], str]) -> T:
    """Plain data with all texts changed; unchanged parts stay the same objects."""
    value: Any = content
    if isinstance(value, str):
        return value if isinstance(value, Enum) else change(value)  # type: ignore[return-value]
    if isinstance(value, (tuple, list)):
        if value and isinstance(value[0], float):  # long, and without texts
            return content
        changed = [with_texts(item, change) for item in value]
        return content if _same(value, changed) else type(value)(changed)  # type: ignore[return-value]
    if isinstance(value, dict):
        changed = [with_texts(item, change) for item in value.values()]
        return content if _same(value.values(), changed) else dict(zip(value, changed, strict=True))  # type: ignore[return-value]
    if isinstance(value, RankEnvironment) and value.host_id and _MARK.fullmatch(value.hostname):
        value = msgspec.structs.replace(value, host_id="")
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        new = {name: with_texts(field, change) for name, field in fields.items()}
        different = {name: field for name, field in new.items() if field is not fields[name]}
        return msgspec.structs.replace(value, **different) if different else value  # type: ignore[return-value]
    return content


def _same(before: Iterable[Any], after: Iterable[Any]) -> bool:
    return all(old is new for old, new in zip(before, after, strict=True))


# -- environment variables: an allow list, without secrets, of limited length

# Variables of communication libraries, and those that affect how kernels run concurrently.
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
# A variable with one of these in its name may hold a secret, whatever its prefix: NCCL_PSK is the key of encrypted
# sockets.
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|PSK|AUTH|CERT")

MAX_VARIABLES = 100
MAX_VALUE_LENGTH = 200

# The part of a path, or of an address, that names a user.
_HOME = re.compile(r"/(home|Users)/[^/:;,\s]+")
_USER_OF_ADDRESS = re.compile(r"://[^/@\s]+@")


def environment_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a record keeps, sorted by name.

    They match an allow list of names and prefixes, and their name does not suggest a secret. User names in a path below
    ``/home`` or ``/Users``, or before the ``@`` of an address, are removed. Long values are cut.
    """
    names = sorted(name for name in environment if is_kept(name))[:MAX_VARIABLES]
    return {name: shown_value(environment[name]) for name in names}


def is_kept(name: str) -> bool:
    return (name in _NAMES or name.startswith(_PREFIXES)) and _SECRET.search(name) is None


def shown_value(value: str) -> str:
    """A value in the form kept by the record."""
    value = _USER_OF_ADDRESS.sub("://…@", _HOME.sub(r"/\1/…", value))
    return value if len(value) <= MAX_VALUE_LENGTH else f"{value[: MAX_VALUE_LENGTH - 1]}…"
