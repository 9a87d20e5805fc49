"""Every tensor of a network with its class, and parameters and bytes by class."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from perfmodel.families import Shape, Tensor
from perfmodel.storage.classes import CLASSES, Storage


class Stored(NamedTuple):
    """A tensor that several layers may have alike.

    kind : its class of tensors. layers : the layers that have it; empty for what belongs to no layer.
    copies : how often a layer has it, for a routed expert the number of experts.
    """

    kind: str
    tensor: Tensor
    layers: tuple[int, ...] = ()
    copies: int = 1

    @property
    def params(self) -> int:
        """Parameters of all its copies in all layers [1]."""
        return self.tensor.params * self.copies * (len(self.layers) or 1)


def stored_tensors(shape: Shape) -> Iterator[Stored]:
    """What a checkpoint holds; a tied head is the embedding table and comes once. Norms come as one sum each."""
    for tensor in shape.embedding:
        yield Stored("embedding", tensor)
    for tensor in shape.head:
        if not (shape.tied_embeddings and tensor.is_matrix):
            yield Stored("head", tensor)
    yield Stored("norm", Tensor("norm", (shape.final_norm_params,)))
    for mixer in shape.attention:
        if not mixer.layers:
            continue
        yield Stored("norm", Tensor("norm", (mixer.norm_params,)), mixer.layers)
        for tensor in mixer.tensors:
            yield Stored("attention", tensor, mixer.layers)
    for kind in shape.feed_forward:
        if not kind.layers:
            continue
        yield Stored("norm", Tensor("norm", (kind.norm_params,)), kind.layers)
        for name, tensors in (("dense", kind.dense), ("shared", kind.shared), ("router", kind.router)):
            for tensor in tensors:
                yield Stored(name, tensor, kind.layers)
        if kind.experts is not None:
            for tensor in kind.experts.tensors:
                yield Stored("expert", tensor, kind.layers, kind.experts.count)


def class_params(shape: Shape) -> dict[str, int]:
    """Stored parameters by class of tensor [1]; the sum is the total."""
    params = dict.fromkeys(CLASSES, 0)
    for stored in stored_tensors(shape):
        params[stored.kind] += stored.params
    return params


def class_bytes(shape: Shape, storage: Storage) -> dict[str, float]:
    """Memory of the weights by class of tensor [byte], ``parameters * bits / 8``."""
    formats = storage.by_class()
    return {name: _whole(params * formats[name].bits / 8) for name, params in class_params(shape).items()}


def _whole(size: float) -> float:
    """A number of bytes without the error of rounding the mean bits of a mix, so that files are added up exactly."""
    near = float(round(size))
    return near if math.isclose(size, near, rel_tol=2**-50) else size
