"""A quick look at a model's weights: enough to tell whether they changed since the last look, in a few milliseconds.

Hashing all weights takes seconds; this is what lets every request ask whether the hash still holds.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SAMPLES = 32
"""Numbers read of each tensor at least, evenly spread over it; all of them where there are fewer."""

ADAPTER_SWITCHES = ("_active_adapter", "_disable_adapters", "scaling")
"""What PEFT keeps on a layer beside its tensors: which adapters count, and how much."""

_Group = tuple[torch.device, torch.dtype]


@dataclass(frozen=True)
class WeightStamp:
    """Two equal stamps of one model: its weights did not change in between, as far as `weight_stamp` can tell."""

    structure: tuple[Any, ...]
    samples: tuple[bytes, ...]


@torch.no_grad()
def weight_stamp(model: nn.Module) -> WeightStamp:
    """Look at the modules, and at the place, the version and a few numbers of every parameter and buffer.

    Noticed are: a parameter or module that was replaced, added, renamed or removed (an adapter, say), an adapter that
    was switched on or off, tensors that were moved or cast, any change that PyTorch counts (``weight.zero_()`` also
    under ``no_grad``, ``load_state_dict``, an optimizer's step), and changes behind PyTorch's back, through
    ``weight.data``, of at least one of the numbers that are read (see `SAMPLES`). Not noticed is a change through
    ``.data`` that leaves all of those as they were, such as that of a single number, and a change inside weights that
    ``torch.ao`` keeps packed. What is read of one device is copied from it in one piece for each dtype.
    """
    structure: list[Any] = []
    samples: dict[_Group, list[torch.Tensor]] = defaultdict(list)
    left: list[tuple[str, nn.Module]] = [("", model)]
    while left:
        name, module = left.pop()
        structure.append((name, id(module)))
        if "_active_adapter" in module.__dict__:
            structure.append(adapter_switches(module))
        for name, parameter in module._parameters.items():
            if parameter is not None:
                structure.append((name, *_identity(parameter)))
                _sample(parameter, samples)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                # Some are put in their place again by every forward pass; what they hold is what counts.
                kept = name not in module._non_persistent_buffers_set
                structure.append((name, *(_identity(buffer) if kept else ())))
                _sample(buffer, samples)
        left.extend((name, child) for name, child in module._modules.items() if child is not None)
    read = tuple(torch.cat(views).cpu().view(torch.uint8).numpy().tobytes() for views in samples.values())
    return WeightStamp(structure=tuple(structure), samples=read)


def adapter_switches(module: nn.Module) -> str:
    """The state of an adapter layer that its tensors do not show; empty for any other module."""
    own = module.__dict__
    return repr([own.get(name) for name in ADAPTER_SWITCHES]) if "_active_adapter" in own else ""


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        place = tensor.data_ptr()
    except RuntimeError:  # a tensor that is made of others has no place of its own
        place = 0
    version = -1 if tensor.is_inference() else tensor._version  # inference tensors count no versions
    return id(tensor), place, version, tensor.dtype, tensor.shape


def _sample(tensor: torch.Tensor, samples: dict[_Group, list[torch.Tensor]]) -> None:
    """Add a view of a few numbers of `tensor`, if it has numbers that can be viewed."""
    if tensor.device.type == "meta" or tensor.numel() == 0 or tensor.is_quantized or tensor.layout != torch.strided:
        return
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    step = span // SAMPLES | 1  # an odd step does not stay in one column of a matrix
    count = (span - 1) // step + 1
    try:
        view = tensor.as_strided((count,), (step,), tensor.storage_offset())
        view = view.view(torch.uint8) if view.itemsize == 1 else view  # not all small dtypes can be joined
    except RuntimeError:  # tensors that are made of others cannot be looked into
        return
    samples[view.device, view.dtype].append(view)
