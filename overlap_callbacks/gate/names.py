"""Names of collectives, as the framework that issues them knows them: a unit, a bucket, a module, a micro-batch.

A function that issues a collective has what it is for among its variables. So the stack is searched for functions that
are known, from the inside out. That is done in a window's recorded steps alone, which are not timed; steps with the
same sequence get the names by the place in it. Nothing is patched, and nothing of the job outlives the step.

DDP issues the all-reduces of its buckets from C++: in a backward pass, what no function explains is compared with the
buckets in their order. What else a backward pass issues, such as a DTensor's redistribution, is of the module in whose
forward autograd recorded the operation: both have a number.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import torch

from overlap_callbacks._log import logger
from overlap_callbacks.analysis.formatting import one_line
from overlap_callbacks.analysis.name_rules import collective_in_words
from overlap_callbacks.analysis.sums import grouped
from overlap_callbacks.gate.collectives import SENDS, Collective

# From the variables of a function that issues collectives to a name; empty if they do not tell.
Reader = Callable[["StepNames", Mapping[str, Any]], str]

_MAX_LENGTH = 120
# More collectives of a kind in a step are not named by their place.
_MAX_PLACES = 24
# A stack that is deeper is not of a framework.
_MAX_DEPTH = 400
# The backward pass begins here. What is further out belongs to its caller.
_OUTSIDE = "torch.autograd.graph:_engine_run_backward"
# Modules that only wrap others, by their attributes' names.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class Buckets:
    """The buckets that a reducer on ``group`` sends in order, by numbers of elements and names."""

    def __init__(self, group: str, buckets: Sequence[tuple[int, str]]) -> None:
        self._group, self._buckets, self._next = group, buckets, 0

    def claim(self, group: str, elements: int) -> str:
        """The name of the next bucket if it has so many elements; else empty."""
        if group != self._group or not self._buckets:
            return ""
        size, name = self._buckets[self._next]
        if size != elements:
            return ""
        self._next = (self._next + 1) % len(self._buckets)
        return name


class ForwardPasses:
    """Which modules ran while autograd numbered the operations of a step.

    Not where torch.compile is in use: it would compile anew.
    """

    def __init__(self) -> None:
        self._thread, self._one_thread = get_ident(), True
        self._open: list[list[Any]] = []
        self._found: list[list[Any]] = []  # since, until, module; in the order of their beginnings
        hooks = torch.nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._begin),
            hooks.register_module_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, module: torch.nn.Module, _: Any) -> None:
        if get_ident() != self._thread:  # each has numbers of its own
            self._one_thread = False
            return
        self._open.append([_next_number(), 0, module])
        self._found.append(self._open[-1])

    def _end(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        if get_ident() == self._thread and self._open and self._open[-1][2] is module:
            self._open.pop()[1] = _next_number()

    def module_of(self, number: int) -> object:
        """The innermost module whose forward recorded the operation of this number; None if none did."""
        inner = [module for since, until, module in self._found if since <= number < until] if self._one_thread else []
        return inner[-1] if inner else None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._found.clear()


def _next_number() -> int:
    autograd: Any = torch.autograd
    return int(autograd._get_sequence_nr())


class StepNames:
    """Names the collectives of one recorded step.

    Args:
        readers: by function, as ``module:qualified name``.
        models: those of the job, or their wrappers.
        buckets: the reducers of these models.

    Attributes:
        sends: whether it is a send that is being named.
        inner: what the reader of an inner function tells those of outer ones.
    """

    def __init__(
        self, readers: Mapping[str, Reader], models: Iterable[torch.nn.Module], buckets: Sequence[Buckets] = ()
    ) -> None:
        self._readers, self._models, self._buckets = readers, models, buckets
        self._known: dict[CodeType, Reader | None] = {}
        self._of_objects: dict[int, str] | None = None
        self._numbers: dict[str, int] = {}
        self._counts = Counter[str]()
        self._forwards: ForwardPasses | None = None
        self.sends = False
        self.inner = ""

    def of(self, call: Collective, tensor: torch.Tensor | None) -> str:
        """The name of the collective that is being issued, without control characters; empty if nothing tells it.

        Never raises.
        """
        self.sends, self.inner = call.operator in SENDS, ""
        try:
            name = self._from_stack() or self._from_buckets(call.group.name, tensor) or self._from_forward()
            return one_line(name, _MAX_LENGTH)
        except Exception:
            logger.debug("a collective could not be named", exc_info=True)
            return ""

    def _from_stack(self) -> str:
        frame: FrameType | None = sys._getframe(2)
        for _ in range(_MAX_DEPTH):
            if frame is None:
                break
            code = frame.f_code
            if code not in self._known:
                function = f"{frame.f_globals.get('__name__')}:{code.co_qualname}"
                # ``f_locals`` is the dictionary that ``locals()`` returns, and is emptied below.
                self._known[code] = None if "locals" in code.co_names else self._readers.get(function)
                if function == _OUTSIDE:
                    self._known[code] = _outside
            reader = self._known[code]
            if reader is _outside:
                break
            if reader is not None:
                variables = frame.f_locals
                try:
                    name = reader(self, variables)
                finally:
                    if type(variables) is dict:  # until Python 3.12: it would keep them until the function returns
                        variables.clear()
                if name:
                    return name
            frame = frame.f_back
        return ""

    def _from_buckets(self, group: str, tensor: torch.Tensor | None) -> str:
        if tensor is None or torch._C._current_graph_task_id() == -1:
            return ""
        return next(filter(None, [bucket.claim(group, tensor.numel()) for bucket in self._buckets]), "")

    def _from_forward(self) -> str:
        node: Any = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        if node is None or self._forwards is None:
            return ""
        return self.name_of(self._forwards.module_of(node._sequence_nr()))

    def watch(self) -> None:
        """Watch which modules run, until ``close``."""
        self._forwards = ForwardPasses()

    def close(self) -> None:
        if self._forwards is not None:
            self._forwards.close()
            self._forwards = None

    # -- for readers

    def name_of(self, thing: object) -> str:
        """The name of a module or a parameter of the job's models; empty if it is none of theirs."""
        if self._of_objects is None:
            self._of_objects = {}
            for model in self._models:
                for name, module in model.named_modules():
                    self._of_objects.setdefault(id(module), plain(name))
                    for own, parameter in module.named_parameters(recurse=False):
                        self._of_objects.setdefault(id(parameter), plain(f"{name}.{own}"))
        return self._of_objects.get(id(thing), "")

    def count(self, kind: str, *, again: bool = False) -> int:
        """How often this was asked before in the step; ``again``: without the last time, for more of the same."""
        self._counts[kind] += not again
        return self._counts[kind] - 1

    def bucket(self, parameters: Iterable[object], number: int | None = None) -> str:
        """E.g. ``bucket 3: layers.7.mlp.weight … layers.6.norm.bias``; numbered as they come unless numbered."""
        text = span([self.name_of(parameter) for parameter in parameters])
        if number is None:
            number = self._numbers.setdefault(text, len(self._numbers))
        return f"bucket {number}: {text}" if text else f"bucket {number}"


def names_of(calls: Sequence[Collective]) -> list[str]:
    """What each is for, as its framework knows it; by the place of its kind in the step if there are few; else empty.

    ``calls``: all of a step. Those of a group of one rank do not count.
    """
    of_kind = grouped([call for call in calls if call.group_size > 1], lambda call: collective_in_words(call.operator))
    by_place = {
        id(call): f"{kind} {number} of {len(alike)}"
        for kind, alike in of_kind.items()
        for number, call in enumerate(alike if len(alike) <= _MAX_PLACES else (), start=1)
    }
    return [call.name or by_place.get(id(call), "") for call in calls]


def made(names: Callable[[], StepNames] | None, *, compiled: bool) -> StepNames | None:
    """What names the collectives of a step; None if nothing does, or it cannot be made.

    ``compiled``: whether torch.compile is in use.
    """
    try:
        found = None if names is None else names()
        if found is not None and not compiled:
            found.watch()
        return found
    except Exception:
        logger.debug("the collectives of a step cannot be named", exc_info=True)
        return None


def let_go(names: StepNames | None) -> None:
    """The step is over: watch modules no longer."""
    if names is not None:
        names.close()


def _outside(_: StepNames, __: Mapping[str, Any]) -> str:
    return ""


def plain(name: str) -> str:
    """A module's name without those of modules that only wrap others."""
    parts = [part for part in name.split(".") if part and part not in _WRAPPERS]
    while parts and parts[0] == "module":
        del parts[0]
    return ".".join(parts)


def span(names: Iterable[str]) -> str:
    """The first and the last of some names."""
    known = [name for name in names if name]
    return " … ".join(dict.fromkeys([*known[:1], *known[-1:]]))
