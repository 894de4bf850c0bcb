"""The hash of a model's weights: the same for one checkpoint under any names, in any wrapper, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from ragkv.errors import UnsupportedModelError
from ragkv.model.stamp import adapter_switches

_HASH_THREADS = 4
_HASH_AHEAD = 16  # entries in the works at once, so that a model on a GPU is not copied to the host as a whole


def weights_sha256(model: nn.Module, dtype: torch.dtype) -> str:
    """SHA-256 over shape and values of all weights, floating ones of 16 bits and more cast to `dtype`.

    Entries are those of the state dictionary, in its order: that in which the modules are put together, first a
    module's own parameters and buffers and then its children. The order tells the layers apart, so that two weights
    that trade places are noticed, while no name is hashed: one more prefix or a new name changes nothing. A tensor that
    stands twice (tied embeddings) counts once, where it stands first. Quantised weights count as they are stored, with
    their scales.

    Raises
    ------
    UnsupportedModelError
        If a weight is not in memory (on the meta device, or offloaded), or of a kind that cannot be read.
    """
    total = sha256()
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        waiting = []
        for name, value in _entries(model):
            waiting.append(pool.submit(_digest, name, value, dtype))
            if len(waiting) == _HASH_AHEAD:
                total.update(waiting.pop(0).result())
        for entry in waiting:
            total.update(entry.result())
    for module in model.modules():  # nothing for a model without adapters
        total.update(adapter_switches(module).encode())
    return total.hexdigest()


def _entries(model: nn.Module) -> Iterator[tuple[str, object]]:
    """What the state dictionary holds, flat, each tensor once."""
    seen: set[tuple[Any, ...]] = set()
    state = model.state_dict()  # held meanwhile, so that no place is used again by another tensor
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and (place := _place(value)) is not None:
            if place in seen:
                continue
            seen.add(place)
        for part in _parts(value):
            yield name, part


def _parts(value: object) -> Iterator[object]:
    """The tensors and plain values of an entry: packed weights and extra states are nested."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key)
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _parts(each)
    elif isinstance(value, torch.Tensor) and value.is_quantized:
        yield from _quantised_parts(value)
    else:
        yield value


def _quantised_parts(tensor: torch.Tensor) -> Iterator[object]:
    yield tensor.int_repr()
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        yield from (tensor.q_scale(), tensor.q_zero_point())
    else:
        yield from (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis())


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Where a tensor lies; None if nowhere that could be told from other places."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided or tensor.numel() == 0:
        return None
    try:
        return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    except RuntimeError:  # a tensor that is made of others has no place of its own
        return None


def _digest(name: str, value: object, dtype: torch.dtype) -> bytes:
    if isinstance(value, torch.Tensor):
        return _tensor_digest(name, value.detach(), dtype)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.Size):
        return sha256(repr(value).encode()).digest()
    if isinstance(value, bytes | bytearray):
        return sha256(value).digest()
    raise UnsupportedModelError(
        f"the model's state {name!r} holds a {type(value).__name__}, which cannot be hashed, so no archive could tell "
        "this model from another; load the model without it"
    )


def _tensor_digest(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> bytes:
    if tensor.device.type == "meta":
        raise UnsupportedModelError(
            f"weight {name!r} is not in memory (meta device, or offloaded), so the model cannot be told from another; "
            "load the whole model to one device"
        )
    try:
        if tensor.is_floating_point() and tensor.itemsize > 1:
            tensor = tensor.to(dtype)
        tensor = tensor.cpu().contiguous()
        digest = sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        raise UnsupportedModelError(
            f"weight {name!r} is a {type(tensor).__name__} of {tensor.dtype}, whose numbers cannot be read; load the "
            "model in bf16, fp16 or fp32"
        ) from error
    return digest.digest()
