"""Operators whose results on the simulated device are compared with the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Case = Callable[[Callable[..., Tensor]], Any]

# What each case gets makes a tensor of random numbers of a shape on the device at hand; its results are compared.
EXACT: dict[str, Case] = {
    "fill": lambda new: (torch.zeros_like(new(5)), torch.ones_like(new(5)), torch.full_like(new(3, 4), 2.5)),
    "add": lambda new: (new(6, 8) + new(6, 8), new(6, 8) + 1.5, new(7) - new(7), 1 - new(7)),
    "add with broadcasting": lambda new: (new(6, 8) + new(8), new(6, 8) + new(6, 1), new(6, 8) - new(())),
    "add with a factor": lambda new: (new(6, 8).add(new(6, 8), alpha=2), new(6, 8).add_(new(8), alpha=-0.5)),
    "mul": lambda new: (new(6, 8) * new(6, 8), new(6, 8) * 2.5, new(6, 8) * new(6, 1), new(6, 8) / new(6, 8)),
    "div by a number": lambda new: (new(6, 8) / 4, new(6, 8) / new(8), -new(6, 8), new(6, 8).abs()),
    "compare": lambda new: (new(9) > new(9), new(9) >= 0, new(9) == new(9), new(9) != 0, new(9) < 0.5, new(9) <= 0),
    "logic": lambda new: (
        (new(9) > 0) & (new(9) > 0),
        (new(9) > 0) | (new(9) > 0),
        ~(new(9) > 0),
        (new(9) > 0).logical_and(new(9) > 0),
        (new(9) > 0).logical_or(new(9).round()),
        new(9).round().logical_xor(new(9) > 0),
    ),
    "where": lambda new: (torch.where(new(6, 8) > 0, new(6, 8), new(8)), new(6, 8).masked_fill(new(6, 8) > 0, 2.0)),
    "clamp": lambda new: (new(9).clamp(-0.5, 0.5), new(9).clamp(min=0), new(9).clamp_(max=0.1), new(9).relu()),
    "extremes of two": lambda new: (torch.maximum(new(9), new(9)), torch.minimum(new(6, 8), new(8))),
    "rounding": lambda new: (new(9).floor(), (new(9) * 3).round(), new(9).sign(), new(9).ceil(), new(9).trunc()),
    "kinds of numbers": lambda new: [
        kind(torch.tensor([1.0, float("inf"), float("-inf"), float("nan")], dtype=dtype).to(new(1).device))
        for kind in (torch.isnan, torch.isfinite, torch.isinf)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    ],
    "compare with a number of 16 bit": lambda new: [
        compare(new(9).to(dtype), 0.5)
        for compare in (torch.eq, torch.ne, torch.gt, torch.ge, torch.lt, torch.le)
        for dtype in (torch.float16, torch.bfloat16)
    ],
    "casts": lambda new: (new(9).bfloat16(), new(9).half(), new(9).double(), (new(9) * 9).long(), (new(9) > 0).float()),
    "casts back": lambda new: (new(9).bfloat16().float(), new(9).half().float(), (new(9) * 9).int().float()),
    "copies of strides": lambda new: (
        new(6, 8).t().contiguous(),
        new(6, 8)[:, ::2].contiguous(),
        new(6, 8)[:, :3].clone(),
        new(3, 5, 7).permute(2, 0, 1).contiguous(),
        new(8).expand(3, 8).contiguous(),
    ),
    "copies of strides and types": lambda new: (new(6, 8).t().bfloat16(), new(6, 8)[:, ::2].double()),
    "copies of 16 bit": lambda new: (new(6, 8).bfloat16().t().contiguous(), new(6, 8).half()[:, ::2].contiguous()),
    "integers": lambda new: (
        (new(9) * 9).long() + 1,
        (new(9) * 9).long() * 2,
        (new(9) * 9).long().sum(),
        (new(9) > 0).sum(),
        (new(3, 9) * 9).long().cumsum(1),
        torch.arange(7, device=new(1).device),
        torch.arange(2, 9, 0.5, device=new(1).device),
    ),
    "any and all": lambda new: ((new(9) > 0).any(), (new(9) > -9).all(), (new(6, 8) > 0).any(1)),
    "extremes": lambda new: (new(6, 8).max(), new(6, 8).amin(1), *new(6, 8).max(1), new(6, 8).argmax(1), new(9).min()),
    "cat": lambda new: (
        torch.cat([new(6, 8), new(2, 8)]),
        torch.cat([new(6, 8), new(6, 4)], 1),
        torch.cat([new(6, 3), new(6, 5)], 1),
        torch.stack([new(5), new(5)]),
        torch.cat([new(2, 3, 4), new(2, 5, 4)], 1),
        torch.cat([new(7).bfloat16(), new(8).bfloat16()]),
        torch.cat([new(8, 6).t(), new(6, 4)], 1),
        torch.cat([new(2, 3, 4).transpose(0, 1), new(3, 2, 5)], 2),
    ),
    "rows": lambda new: (
        new(6, 8)[_indices(new)],
        new(6, 8).index_select(0, _indices(new)),
        new(6, 8).index_select(1, _indices(new)),
        F.embedding(_indices(new), new(6, 5)),
        F.embedding(_indices(new), new(6, 16).bfloat16()),
    ),
    "elements by index": lambda new: (
        new(6, 8)[_indices(new), _indices(new)],
        new(6, 8)[_indices(new), 1:3],
        new(6, 8, 2)[:, _indices(new)],
        new(6, 8).index_put((_indices(new)[1:], _indices(new)[:4] + 1), new(4)),
        new(6, 8).bfloat16().index_put((_indices(new)[2:],), new(3, 8).bfloat16()),
    ),
    "places of what is not zero": lambda new: (
        (new(9) > 0).nonzero(),
        (new(6, 8) > 0).nonzero(),
        new(6, 8).masked_select(new(6, 8) > 0),
        new(6, 8)[new(6) > 0],
    ),
    "gather and scatter": lambda new: (
        new(6, 8).gather(1, _indices(new, 6)[:, None]),
        new(6, 8).scatter(1, _indices(new, 6)[:, None], new(6, 1)),
        new(6, 8).scatter(0, _indices(new)[None, :].expand(2, 5) * 0 + 1, 2.5),
        (new(6, 8) > 0).scatter(1, _indices(new, 6)[:, None], True),
    ),
    "greatest and sorted": lambda new: (
        *new(6, 8).topk(2),
        *new(6, 8).topk(3, dim=0, largest=False),
        *new(6, 8).topk(2, dim=1, sorted=True),
    ),
    "masked scatter": lambda new: new(6, 8).masked_scatter(new(6, 8) > 0, new(48)),
    "triangles": lambda new: (new(6, 6).tril(), new(6, 8).triu(1)),
    "split with sizes": lambda new: torch.split_with_sizes_copy(new(2, 18), [12, 6], 1),
    "roll": lambda new: (new(6, 8).roll(-1, 1), new(6, 8).roll(2, 0), (new(9) * 9).long().roll(1)),
    "chunk cat": lambda new: (
        torch._chunk_cat([new(4, 6), new(3, 3)], 0, 2),
        torch._chunk_cat([new(4, 6), new(4, 3)], 0, 2, out=new(2, 18)),
    ),
    "copies of many": lambda new: (
        _copied([new(5), new(6, 7)], [new(5), new(6, 7)]),
        _copied([new(5), new(6, 7)], [new(5).bfloat16(), new(6, 7).bfloat16()]),
        _copied([new(5).bfloat16(), new(70000).bfloat16()], [new(5), new(70000)]),
    ),
    "dropout of nothing": lambda new: F.dropout(new(64), 0.0),
}

CLOSE: dict[str, Case] = {
    "functions": lambda new: (
        new(99).exp(),
        new(99).abs().log(),
        new(99).tanh(),
        new(99).sigmoid(),
        new(99).sin(),
        new(99).cos(),
        new(99).erf(),
        new(99).abs().sqrt(),
        new(99).abs().rsqrt(),
        new(99).reciprocal(),
    ),
    "functions of 16 bit": lambda new: (new(99).bfloat16().exp(), new(99).bfloat16().tanh(), new(9).bfloat16() * 2),
    "arithmetic of 16 bit": lambda new: (
        new(6, 8).bfloat16() + new(6, 8).bfloat16(),
        new(6, 8).bfloat16() * new(8).bfloat16(),
        new(6, 8).bfloat16() + new(6, 8),
        new(6, 8).bfloat16() / 3,
    ),
    "powers": lambda new: (new(9) ** 2, new(9) ** 3, new(9).abs() ** 1.5, new(9).abs() ** 0.5, new(9) ** -1),
    "gelu": lambda new: (F.gelu(new(99)), F.gelu(new(99), approximate="tanh"), F.silu(new(99)), F.leaky_relu(new(9))),
    "lerp": lambda new: (
        new(9).lerp(new(9), 0.1),
        new(9).lerp(new(9), new(9)),
        new(9).addcmul(new(9), new(9), value=2),
        new(9).addcdiv(new(9), new(9).abs() + 1, value=-0.5),
    ),
    "sums": lambda new: (
        new(6, 8).sum(),
        new(6, 8).sum(0),
        new(6, 8).sum(1),
        new(3, 4, 5).sum((0, 2)),
        new(300, 70).sum(0),
    ),
    "sums at indices": lambda new: (
        new(6, 8).index_add(0, _indices(new), new(5, 8)),
        new(6, 8).index_add(1, _indices(new), new(6, 5), alpha=0.5),
        new(6, 8).scatter_add(1, _indices(new, 6)[:, None], new(6, 1)),
        new(6, 8).scatter_add(0, _indices(new)[:, None].expand(5, 8), new(5, 8)),
    ),
    "means": lambda new: (new(6, 8).mean(), new(6, 8).mean(1), new(9).bfloat16().mean(), new(6, 8).bfloat16().sum(0)),
    "norms": lambda new: (new(6, 8).norm(), new(6, 8).norm(dim=1), new(70, 70).norm()),
    "products": lambda new: (
        new(6, 8) @ new(8, 5),
        new(6, 8) @ new(5, 8).t(),
        new(8, 6).t() @ new(8, 5),
        torch.bmm(new(3, 6, 8), new(3, 8, 5)),
        F.linear(new(6, 8), new(5, 8), new(5)),
        torch.addmm(new(6, 5), new(6, 8), new(8, 5), beta=0.5, alpha=2),
        new(6, 8) @ new(8),
        new(2, 3, 6, 8) @ new(2, 3, 8, 5),
        torch.dot(new(9), new(9)),
    ),
    "products of 16 bit": lambda new: (
        new(6, 8).bfloat16() @ new(8, 5).bfloat16(),
        F.linear(new(6, 8).bfloat16(), new(5, 8).bfloat16(), new(5).bfloat16()),
        torch.bmm(new(3, 6, 8).bfloat16(), new(3, 8, 5).bfloat16()),
        new(6, 8).half() @ new(8, 5).half(),
        F.linear(new(6, 8).half(), new(5, 8).half(), new(5).half()),
        torch.bmm(new(3, 6, 8).half(), new(3, 8, 5).half()),
    ),
    "products of 64 bit": lambda new: (
        new(6, 8).double() @ new(8, 5).double(),
        F.linear(new(6, 8).double(), new(5, 8).double(), new(5).double()),
        torch.bmm(new(3, 6, 8).double(), new(3, 8, 5).double()),
        new(6, 8).double() @ new(8).double(),
        torch.dot(new(9).double(), new(9).double()),
    ),
    "softmax": lambda new: (
        new(6, 8).softmax(-1),
        new(6, 8).log_softmax(-1),
        new(6, 8).softmax(0),
        new(3, 3000).softmax(-1),
        new(3, 3000).log_softmax(-1),
        new(6, 8).bfloat16().softmax(-1),
    ),
    "layer norm": lambda new: (
        F.layer_norm(new(6, 64), (64,), new(64), new(64)),
        F.layer_norm(new(5, 4, 64), (64,)),
        F.rms_norm(new(6, 64), (64,), new(64)),
        F.layer_norm(new(6, 64).bfloat16(), (64,), new(64).bfloat16(), new(64).bfloat16()),
    ),
    "losses": lambda new: (
        F.cross_entropy(new(6, 8), _indices(new, 6)),
        F.cross_entropy(new(6, 8), _indices(new, 6), reduction="sum"),
        F.mse_loss(new(6, 8), new(6, 8)),
    ),
    "attention": lambda new: _attention(*(new(2, 2, 8, 16) for _ in range(3))),
    "fused attention": lambda new: (
        _fused(*_heads(new)),
        _fused(*_heads(new), is_causal=True),
        _fused(*_heads(new, keys=5)),
        _fused(*_heads(new), attn_mask=new(8, 8)),
        _fused(*_heads(new), attn_mask=new(8, 8) > -1),
        _fused(*_heads(new), attn_mask=new(2, 1, 8, 8), scale=0.3),
        _fused(*(one.bfloat16() for one in _heads(new)), is_causal=True),
        _fused(*(one.half() for one in _heads(new, keys=37)), is_causal=True),
        _fused(*(one.transpose(1, 2) for one in _heads(new)), is_causal=True),
    ),
    "flash attention": lambda new: (
        _flash(*(one.bfloat16() for one in _heads(new))),
        _flash(*(one.half() for one in _heads(new, keys=37))),
        _flash(*(one.bfloat16() for one in _heads(new)), is_causal=True),
        _flash(*(one.half().transpose(1, 2) for one in _heads(new)), is_causal=True),
        _flash(*(one.half() for one in _heads(new, keys=700))),
        _flash(new(2, 4, 8, 16).half(), *(one.half() for one in _heads(new)[1:]), enable_gqa=True),
    ),
    "gradients of flash attention": lambda new: (
        _gradients(_flash, *(one.bfloat16() for one in _heads(new))),
        _gradients(_flash, *(one.half() for one in _heads(new, keys=37))),
        _gradients(_causal_flash, *(one.half() for one in _heads(new))),
        _gradients(_causal_flash, *(one.bfloat16().transpose(1, 2) for one in _heads(new))),
    ),
    "gradients of activations": lambda new: (
        _gradients(F.gelu, new(6, 8)),
        _gradients(lambda x: F.gelu(x, approximate="tanh"), new(6, 8)),
        _gradients(lambda x: x.relu(), new(6, 8)),
        _gradients(lambda x: x.tanh(), new(6, 8)),
        _gradients(lambda x: x.sigmoid(), new(6, 8)),
        _gradients(F.silu, new(6, 8)),
        _gradients(lambda x: x.pow(2).mean(), new(6, 8)),
        _gradients(lambda x: x.softmax(-1), new(6, 8)),
        _gradients(lambda x: x.log_softmax(-1), new(6, 8)),
        _gradients(lambda x: x.softmax(0), new(6, 8)),
        _gradients(lambda x: x.softmax(-1), new(2, 3000)),
    ),
    "gradients of layers": lambda new: (
        _gradients(F.linear, new(6, 8), new(5, 8), new(5)),
        _gradients(lambda x, w, b: F.layer_norm(x, (64,), w, b), new(6, 64), new(64), new(64)),
        _gradients(lambda x, w, b: F.layer_norm(x, (64,), w, b), new(128, 64), new(64), new(64)),
        _gradients(lambda x, w: F.rms_norm(x, (64,), w), new(6, 64), new(64)),
        _gradients(lambda w: F.embedding(_indices(new), w), new(6, 16)),
        _gradients(lambda x: F.cross_entropy(x, _indices(new, 6)), new(6, 8)),
        _gradients(F.mse_loss, new(6, 8), new(6, 8)),
    ),
    "gradients of attention": lambda new: _gradients(_attention, *(new(2, 2, 8, 16) for _ in range(3))),
    "gradients of fused attention": lambda new: (
        _gradients(_fused, *_heads(new)),
        _gradients(_causal, *_heads(new)),
        _gradients(_causal, *_heads(new, keys=5)),
        _gradients(_causal, *(one.bfloat16() for one in _heads(new))),
        _gradients(_causal, *(one.half() for one in _heads(new))),
    ),
    "clipping": lambda new: _clipped([new(5), new(6, 7)]),
    "foreach": lambda new: (
        torch._foreach_add([new(5), new(6, 7)], [new(5), new(6, 7)], alpha=0.5),
        torch._foreach_mul([new(5), new(6, 7)], 3.0),
        torch._foreach_div([new(5), new(6, 7)], [2.0, 3.0]),
        torch._foreach_sqrt([new(5).abs(), new(6, 7).abs()]),
        torch._foreach_norm([new(5), new(6, 7)]),
        torch._foreach_lerp([new(5)], [new(5)], 0.25),
        torch._foreach_addcdiv([new(5)], [new(5)], [new(5).abs() + 1], [0.5]),
    ),
}


# How far results may be from the CPU's: absolutely, and eight times that relatively.
WITHIN = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def _indices(new: Callable[..., Tensor], count: int = 5) -> Tensor:
    return torch.tensor([0, 3, 3, 5, 1, 4][:count]).to(new(1).device)


def _gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    result = function(*leaves)
    weights = torch.linspace(0.5, 1.5, result.numel()).view(result.shape).to(result.device, result.dtype)
    result.backward(weights)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def _copied(to: list[Tensor], given: list[Tensor]) -> list[Tensor]:
    torch._foreach_copy_(to, given)
    return to


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    # By torch's own operators.
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _heads(new: Callable[..., Tensor], keys: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return new(2, 2, 8, 16), new(2, 2, keys, 16), new(2, 2, keys, 16)


def _fused(*heads: Tensor, by: SDPBackend = SDPBackend.EFFICIENT_ATTENTION, **options: Any) -> Tensor:
    with sdpa_kernel(by if heads[0].is_cuda else SDPBackend.MATH):
        return F.scaled_dot_product_attention(*heads, **options)


def _flash(*heads: Tensor, **options: Any) -> Tensor:
    return _fused(*heads, by=SDPBackend.FLASH_ATTENTION, **options)


def _causal_flash(*heads: Tensor) -> Tensor:
    return _flash(*heads, is_causal=True)


def _causal(*heads: Tensor) -> Tensor:
    return _fused(*heads, is_causal=True)


def _clipped(gradients: list[Tensor]) -> list[Tensor]:
    parameters = [torch.nn.Parameter(torch.zeros_like(one)) for one in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    return [norm, *(parameter.grad for parameter in parameters if parameter.grad is not None)]


def results(case: Case, device: str) -> list[Tensor]:
    """What a case gives on a device, on the CPU."""
    generator = torch.Generator().manual_seed(7)

    def new(*shape: Any) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    found: list[Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            found.append(value.detach().cpu())
            return
        for one in value:
            collect(one)

    collect(case(new))
    return found


def differences(case: Case, exact: bool) -> str:
    """How the simulated device's results differ from the CPU's; empty where they do not."""
    try:
        here = results(case, "cuda")
    except (RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {str(error)[:1500]}"
    lines = []
    for index, (found, expected) in enumerate(zip(here, results(case, "cpu"), strict=True)):
        if found.dtype != expected.dtype or found.shape != expected.shape:
            lines.append(f"result {index}: {found.dtype} {found.shape} for {expected.dtype} {expected.shape}")
        elif exact and not torch.equal(found, expected):
            lines.append(f"result {index}: {found.flatten()[:6].tolist()} for {expected.flatten()[:6].tolist()}")
        elif not exact:
            within = WITHIN.get(found.dtype, 0.0)
            if not torch.allclose(found, expected, rtol=8 * within, atol=within):
                lines.append(f"result {index}: {found.flatten()[:6].tolist()} for {expected.flatten()[:6].tolist()}")
    return "\n".join(lines)
