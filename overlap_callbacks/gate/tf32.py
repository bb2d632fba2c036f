"""TF32 on and off; restores torch's precisions.

Torch 2.9 has a precision of each backend and operation, beside the older settings: the precision of matrix products,
and whether cuDNN may use TF32. An older getter raises where the two disagree, so both are set, and both restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from overlap_callbacks.gate.switches import Switch, expect_taken

_HAS_OPERATIONS = hasattr(torch._C, "_set_fp32_precision_setter")
_WIDER = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))  # hold for operations whose own precision is "none"
_PRODUCTS = (("cuda", "matmul"), ("mkldnn", "matmul"))
_CONVOLUTIONS = (("cuda", "conv"), ("cuda", "rnn"))


def line(allowed: bool) -> str:
    """What to write into a job to allow TF32, or forbid it, in all steps."""
    lines = [
        f'torch.set_float32_matmul_precision("{_products(allowed)}")',
        f"torch.backends.cudnn.allow_tf32 = {allowed}",
    ]
    if _HAS_OPERATIONS and not allowed:
        lines += [f'torch.backends.cudnn.{op}.fp32_precision = "ieee"' for _, op in _CONVOLUTIONS]
    return "; ".join(lines)


class TF32Switch(Switch):
    """Allows TF32 in 32-bit matrix products and convolutions, or forbids it.

    Raises ValueError if that changes nothing, or torch does not tell what is to be restored.
    """

    name = "allow_tf32"
    only_between_steps = False  # collectives do not depend on it, and the process goes on after the last step

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._before: _Precisions | None = None
        if _allowed_now() == {allowed}:
            raise ValueError(f"TF32 is {'allowed' if allowed else 'not allowed'} already: nothing would change")
        try:
            _Precisions.read()
        except RuntimeError as error:
            raise ValueError(f"torch does not tell the 32-bit precisions to restore: {error}") from error

    def apply(self) -> None:
        self._before = _Precisions.read()
        torch.set_float32_matmul_precision(_products(self._allowed))
        torch.backends.cudnn.allow_tf32 = self._allowed
        if _HAS_OPERATIONS and not self._allowed:
            _set(dict.fromkeys(_CONVOLUTIONS, "ieee"))  # torch sets "none", for which a wider precision may say TF32
        expect_taken("the 32-bit precision", _allowed_now() == {self._allowed})

    def restore(self) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.write()


def _products(allowed: bool) -> str:
    return "high" if allowed else "highest"


def _allowed_now() -> set[bool]:
    """Whether matrix products may use TF32, and whether convolutions may."""
    if not _HAS_OPERATIONS:
        return {torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32}
    return {torch._C._get_fp32_precision_getter(*op) == "tf32" for op in (_PRODUCTS[0], *_CONVOLUTIONS)}


@dataclass(frozen=True)
class _Precisions:
    """All that torch's setters of 32-bit precision change.

    Attributes:
        products: the older setting of matrix products.
        convolutions: whether the older setting lets cuDNN use TF32.
        own: of each backend and operation, without what it takes from a wider one.
    """

    products: str
    convolutions: bool
    own: Mapping[tuple[str, str], str]

    @classmethod
    def read(cls) -> _Precisions:
        """Raises RuntimeError if torch does not tell."""
        if not _HAS_OPERATIONS:
            return cls(torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, {})
        own: dict[tuple[str, str], str] = {}

        def exchange(ops: Sequence[tuple[str, str]], precision: str) -> None:
            for op in ops:
                own[op] = torch._C._get_fp32_precision_getter(*op)
                torch._C._set_fp32_precision_setter(*op, precision)

        try:
            exchange(_WIDER, "none")  # the widest first, so that each getter tells what is the operation's own
            exchange(_PRODUCTS, "ieee")  # disagrees with no older setting
            exchange(_CONVOLUTIONS, "tf32")
            return cls(torch.get_float32_matmul_precision(), _does_cudnn_agree_with_tf32(), own)
        finally:
            _set(own)

    def write(self) -> None:
        torch.set_float32_matmul_precision(self.products)
        torch.backends.cudnn.allow_tf32 = self.convolutions
        _set(self.own)


def _set(precisions: Mapping[tuple[str, str], str]) -> None:
    for op, precision in precisions.items():
        torch._C._set_fp32_precision_setter(*op, precision)


def _does_cudnn_agree_with_tf32() -> bool:
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return False
