"""What one GPU of each pipeline stage holds: its part of the weights, and the caches that it keeps.

Of a stage the rank with most is taken:

- Matrices are divided evenly, which engines see to by padding. Whole are kept norms and biases, routers, matrices
  narrower than the number of ranks, the down-projections to a latent, and the indexer of sparse attention, because
  their outputs are needed everywhere.
- A rank has ``ceil(experts / ranks)`` whole experts, whose matrices ``expert_tensor`` may then cut, and
  ``ceil(heads / ranks)`` whole key-value heads. With fewer heads than ranks each head, with its cache and its
  projections, is kept by several ranks. A latent is kept by all.
- Constant states are divided among the ranks, as their heads are.
"""

import dataclasses
import math
from bisect import bisect_left
from dataclasses import dataclass

from perfmodel.errors import PlacementError
from perfmodel.families import Attention, Cache, FeedForward, Tensor, Tensors, one_line, params_of
from perfmodel.memory.parallel import Parallel
from perfmodel.model import MoEModel

#: Ends of the names of down-projections to a latent, and what the names of an indexer contain.
_TO_LATENT = ("q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj")
_INDEXER = "indexer."
_KEY_VALUE = ("k_proj", "v_proj")
_FUSED = ("qkv_proj", "Wqkv", "query_key_value")


@dataclass(frozen=True, slots=True)
class Stage:
    """The fullest GPU of one pipeline stage.

    weights : bytes by class of tensors, without routed experts [byte].
    experts : of each MoE layer its index, the experts of the whole layer, and the bytes of one expert that are on a GPU
        that has it [byte].
    attention : the mixers of the stage, with what the GPU has of their caches and states.
    feed_forward : the feed-forward kinds of the stage.
    has_head : whether it is the last stage.
    """

    weights: dict[str, float]
    experts: tuple[tuple[int, int, float], ...]
    attention: tuple[Attention, ...]
    feed_forward: tuple[FeedForward, ...]
    has_head: bool


def _matrix_share(tensor: Tensor, ranks: int) -> float:
    """The part of a tensor that one of the ranks keeps [1]."""
    whole = len(tensor.shape) < 2 or tensor.shape[0] < ranks
    return 1.0 if whole else 1.0 / ranks


def _attention_share(tensor: Tensor, caches: tuple[Cache, ...], ranks: int) -> float:
    """The same for a tensor of a mixer; projections to keys and values follow the heads of the cache."""
    name = tensor.name.rpartition(".")[2]
    if name in _TO_LATENT or _INDEXER in tensor.name:
        return 1.0
    divided = _matrix_share(tensor, ranks)
    if not caches or len(tensor.shape) < 2 or name not in (*_KEY_VALUE, *_FUSED):
        return divided
    rows = tensor.shape[0]
    heads = math.ceil(caches[0].heads / ranks) / caches[0].heads
    follow = rows if name in _KEY_VALUE else min(rows, caches[0].elements)
    return (follow * heads + (rows - follow) * divided) / rows


def _share_of(tensors: Tensors, ranks: int) -> float:
    """Parameters of some tensors that one of the ranks keeps [1]."""
    return sum(tensor.params * _matrix_share(tensor, ranks) for tensor in tensors)


def _cache_on_rank(cache: Cache, ranks: int) -> Cache:
    def part(elements: int, heads: int) -> int:
        return math.ceil(elements * math.ceil(heads / ranks) / heads)

    expanded = cache.expanded_elements
    return dataclasses.replace(
        cache,
        elements=part(cache.elements, cache.heads),
        expanded_elements=None if expanded is None else part(expanded, cache.expanded_heads),
    )


def _mixer_on_rank(kind: Attention, layers: tuple[int, ...], ranks: int) -> Attention:
    return dataclasses.replace(
        kind,
        layers=layers,
        caches=tuple(_cache_on_rank(cache, ranks) for cache in kind.caches),
        recurrent_elements=math.ceil(kind.recurrent_elements / ranks),
        convolution_elements=math.ceil(kind.convolution_elements / ranks),
    )


def _within(layers: tuple[int, ...], stage: range) -> tuple[int, ...]:
    """Those of ascending layers that a stage has."""
    return layers[bisect_left(layers, stage.start) : bisect_left(layers, stage.stop)]


def rank_stages(model: MoEModel, parallel: Parallel) -> tuple[Stage, ...]:
    """The fullest GPU of each pipeline stage.

    Raises
    ------
    PlacementError : more stages than layers, or more expert ranks than a layer has experts.
    """
    fewest = min((kind.experts.count for kind in model.feed_forward if kind.experts is not None), default=1)
    if parallel.expert > fewest:
        raise PlacementError(
            f"parallel: expert is {parallel.expert}; allowed: at most {fewest}, the experts of a layer of "
            f"{one_line(model.name)}, for the other ranks would have none"
        )
    stages = parallel.stages(model.num_layers)
    return tuple(_stage(model, parallel, layers, len(stages)) for layers in stages)


def _stage(model: MoEModel, parallel: Parallel, layers: range, count: int) -> Stage:
    ranks = parallel.tensor
    first, last = layers.start == 0, layers.stop == model.num_layers
    params = dict.fromkeys(("embedding", "head", "attention", "dense", "shared", "router", "norm"), 0.0)
    mixers, networks = [], []
    if first:
        params["embedding"] += _share_of(model.embedding, ranks)
    if last:
        own = [one for one in model.head if not (model.tied_embeddings and one.is_matrix)]
        params["head"] += _share_of(tuple(own), ranks)
        params["norm"] += model.final_norm_params
        if model.tied_embeddings and count > 1:  # the table is at the other end of the pipeline
            params["embedding"] += _share_of(tuple(one for one in model.head if one.is_matrix), ranks)
    for mixer in model.attention:
        here = _within(mixer.layers, layers)
        if here:
            one = sum(tensor.params * _attention_share(tensor, mixer.caches, ranks) for tensor in mixer.tensors)
            params["attention"] += len(here) * one
            params["norm"] += len(here) * mixer.norm_params
            mixers.append(_mixer_on_rank(mixer, here, ranks))
    experts = []
    for kind in model.feed_forward:
        here = _within(kind.layers, layers)
        if not here:
            continue
        networks.append(kind)
        params["dense"] += len(here) * _share_of(kind.dense, ranks)
        params["shared"] += len(here) * _share_of(kind.shared, ranks)
        params["router"] += len(here) * params_of(kind.router)
        params["norm"] += len(here) * kind.norm_params
        if kind.experts is not None:
            size = kind.experts.params * model.storage.expert.bits / 8 / parallel.expert_parts
            experts += [(layer, kind.experts.count, size) for layer in here]
    formats = model.storage.by_class()
    return Stage(
        weights={name: held * formats[name].bits / 8 for name, held in params.items()},
        experts=tuple(sorted(experts)),
        attention=tuple(mixers),
        feed_forward=tuple(networks),
        has_head=last,
    )
