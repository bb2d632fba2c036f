"""Matrix products in each precision."""

from __future__ import annotations

from collections.abc import Callable

import torch

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")
_TORCH = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Ada and Hopper were the first to multiply in 8 bit, Ampere the first in TF32 and BF16.
_NEEDS = {"fp8": (8, 9), "tf32": (8, 0), "bf16": (8, 0)}


def refusal(dtype: str, device: str) -> str:
    """Why a device cannot multiply in a precision, in a sentence; empty if it can."""
    if device == "cpu":
        if dtype in ("tf32", "fp8"):
            return f"--dtype {dtype} needs a GPU: a CPU multiplies in fp32, fp16 and bf16"
        return ""
    if dtype == "fp8" and torch.version.hip is not None:
        return "--dtype fp8 is for NVIDIA GPUs: AMD's have other 8-bit numbers"
    needed = _NEEDS.get(dtype)
    if needed is None or torch.version.hip is not None:
        return ""
    found = torch.cuda.get_device_capability()
    if found >= needed:
        return ""
    name = torch.cuda.get_device_name()
    return f"--dtype {dtype} needs compute capability {needed[0]}.{needed[1]}, {name} has {found[0]}.{found[1]}"


def usable(device: str) -> tuple[str, ...]:
    """The precisions in which a device can multiply."""
    return tuple([dtype for dtype in DTYPES if not refusal(dtype, device)])


def message_dtype(dtype: str) -> torch.dtype:
    """The type of the numbers that are reduced beside products of this precision."""
    return _TORCH.get(dtype, torch.bfloat16)


def product(dtype: str, n: int, device: torch.device) -> Callable[[], object]:
    """A function that multiplies two N x N matrices into a third, or issues that on the current stream.

    Args:
        dtype: one of ``DTYPES``.
        n: rows and columns.
        device: where the matrices are.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    generator = torch.Generator(device).manual_seed(0)
    # Random numbers: products of zeros draw less power.
    left, right = (torch.randn(n, n, device=device, generator=generator) for _ in range(2))
    if dtype == "fp8":
        scale = torch.ones((), device=device)
        # The second operand stands column by column, as the 8-bit units want it.
        a, b = left.to(torch.float8_e4m3fn), right.t().contiguous().to(torch.float8_e4m3fn).t()
        return lambda: torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    left, right = left.to(_TORCH[dtype]), right.to(_TORCH[dtype])
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def flop(n: int) -> int:
    """Floating-point operations of a product of two N x N matrices: a product and a sum for each of N^3 terms."""
    return 2 * n**3
