"""Traces of odd shapes, drawn at random, for tests of statistics as people see them."""

import functools
from typing import Any

import numpy as np

from perfmodel.routing import RoutingTrace
from perfmodel.routing.statistics import Survey, survey


def drawn_trace(
    lengths: list[int],
    prompts: list[int],
    *,
    layers: int = 3,
    experts: int = 6,
    top_k: int = 2,
    weights: bool = True,
    holes: bool = False,
    first_layer: int = 0,
    seed: int = 0,
    **metadata: Any,
) -> RoutingTrace:
    """Sequences that each favour some experts; ``holes`` leaves every fifth token of the last layer without picks."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    favour = np.repeat(rng.normal(0, 1, (len(lengths), layers, experts)), lengths, axis=0)
    order = np.argsort(-(favour + rng.gumbel(size=(tokens, layers, experts))), axis=-1)[..., :top_k]
    if holes:
        order[::5, -1] = -1
    share = np.sort(rng.random((tokens, layers, top_k)), axis=-1)[..., ::-1]
    return RoutingTrace(
        topk_ids=order,
        topk_weights=share.astype(np.float32) if weights else None,
        sequence_offsets=np.cumsum([0, *lengths]),
        prompt_len=np.array(prompts),
        layer_index=np.arange(first_layer, first_layer + layers),
        num_experts=experts,
        metadata={"model": "drawn", "source": "synthetic", **metadata},
    )


#: Shapes that leave something out, or that are hard to draw.
SHAPES: dict[str, RoutingTrace] = {
    "one sequence": drawn_trace([60], [20]),
    "prefill only": drawn_trace([40, 30], [40, 30]),
    "decode only": drawn_trace([50, 60, 40], [0, 0, 0]),
    "no weights": drawn_trace([60, 50], [30, 20], weights=False),
    "holes": drawn_trace([60, 50, 70], [30, 20, 0], holes=True),
    "one layer": drawn_trace([60, 50], [30, 20], layers=1, first_layer=5),
    "two experts": drawn_trace([60, 50], [30, 20], experts=2, top_k=1),
    "one expert": drawn_trace([60, 50], [30, 20], experts=1, top_k=1),
    "all experts": drawn_trace([60, 50], [30, 20], experts=3, top_k=3),
    "one token": drawn_trace([1], [0]),
    "short": drawn_trace([5, 4, 3], [2, 2, 3]),
    "many": drawn_trace([60, 50, 90], [30, 20, 10], layers=48, experts=160, top_k=8),
    "odd name": drawn_trace([60, 50], [30, 20], model="模型 $x_1$ " + 40 * "long"),
}


@functools.cache
def surveyed(name: str) -> Survey:
    """The survey of a shape, made once."""
    return survey(SHAPES[name])
