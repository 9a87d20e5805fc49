"""Whether integers without a telling name look like a recording of picks, or like any other array of integers."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Fewest tokens and layers, and most layers, picks and experts, of an array that is taken for a recording.
TOKENS, LAYERS, MOST_LAYERS, MOST_PICKS, MOST_EXPERTS = 8, 4, 256, 32, 1024
#: How far the use of experts differs between layers: deviations of chi-square from what one use for all would give.
DIFFERENT = 2.5
#: Share of the experts that occur anywhere, and on average in a layer, of what as many even draws would reach.
SOME, SOME_IN_LAYER = 0.75, 0.4
#: Most picks that are looked at.
_SAMPLE = 2**20


def why_not_picks(ids: NDArray[Any]) -> str | None:
    """What recordings have and integers [tokens, layers, k] lack, or None of what looks like a recording.

    Looked at are traits that lists of neighbours, of faces, of ranks, of labels and images do not have all at once:

    * at least 8 tokens, 4 to 256 layers, 2 to 32 picks, and ids below 1,024, of which nearly all below the largest
      occur, and many in every layer;
    * a token picks at most half of the experts, and not in ascending order throughout;
    * every place of the list of picks is taken by many of the experts, and tokens differ in every layer;
    * layers differ in how often they use each expert, which evenly drawn numbers do not;
    * there are not just as many experts as layers, as in lists of indices into the array itself.

    Layers of fillers alone, -1 or 0, are left out first, and two others must be left. Recordings that lack a
    trait have to be named.
    """
    if ids.shape[0] < TOKENS or not LAYERS <= ids.shape[1] <= MOST_LAYERS or not 2 <= ids.shape[2] <= MOST_PICKS:
        return (
            f"has {ids.shape[0]} x {ids.shape[1]} x {ids.shape[2]} numbers; recordings have at least {TOKENS} tokens, "
            f"{LAYERS} to {MOST_LAYERS} layers and 2 to {MOST_PICKS} picks"
        )
    ids = ids[: max(TOKENS, _SAMPLE // (ids.shape[1] * ids.shape[2]))]
    filler = (ids < 0).all(axis=2) | (ids == 0).all(axis=2)
    ids = ids[:, ~filler.all(axis=0)][~filler.all(axis=1)].astype(np.int64)
    if ids.shape[0] < TOKENS or ids.shape[1] < 2:
        return f"has picks of {ids.shape[0]} tokens in {ids.shape[1]} layers"
    experts, picks = int(ids.max()) + 1, ids.shape[2]
    if experts > MOST_EXPERTS or 2 * picks > experts:
        return f"lists {picks} of {experts} numbers; recordings have at most half of at most {MOST_EXPERTS} experts"
    if experts == ids.shape[1]:
        return f"holds numbers below {experts}, just as many as it has columns"
    if (ids[..., 1:] > ids[..., :-1]).mean() > 0.99:
        return "lists numbers in ascending order"
    return _why_not_used(ids, experts)


def _why_not_used(ids: NDArray[np.int64], experts: int) -> str | None:
    """What shows that numbers are not experts, by how often each is used in each layer and place."""
    tokens, layers, picks = ids.shape
    place = np.zeros((layers, picks, experts), np.int64)
    known = ids >= 0
    at = np.broadcast_to(np.arange(layers)[:, None], ids.shape), np.broadcast_to(np.arange(picks), ids.shape)
    np.add.at(place, (at[0][known], at[1][known], ids[known]), 1)
    layer = place.sum(axis=1)
    even = experts * (1 - (1 - 1 / experts) ** (tokens * picks))
    if (layer.sum(axis=0) > 0).sum() < SOME * min(experts, even * layers):
        return "uses few of the numbers below its largest"
    if (layer > 0).sum(axis=1).mean() < SOME_IN_LAYER * even:
        return "uses few of its numbers in each column"
    if (place > 0).sum(axis=2).min() < 2:
        return "holds one number only in some place of a list"
    if _disjoint(place.sum(axis=0)):
        return "holds other numbers in each place of a list"
    changes = (ids[1:] != ids[:-1]).any(axis=2).mean(axis=0)
    if changes.min() == 0:
        return "has a column that never changes"
    if (ids == ids[:, :1]).all():
        return "has columns that are all alike"
    return (
        None if _spread(layer) > DIFFERENT else "uses its numbers alike in all columns, as numbers drawn at random do"
    )


def _disjoint(place: NDArray[np.int64]) -> bool:
    """Whether two places of the lists [places, experts] share little of their use."""
    shares = place / np.maximum(place.sum(axis=1, keepdims=True), 1)
    shared = np.minimum(shares[1:], shares[:1]).sum(axis=1)
    return bool(shared.min() < 0.02)


def _spread(layer: NDArray[np.int64]) -> float:
    """How far layers [layers, experts] differ in use: (chi-square - freedom) / sqrt(2 freedom)."""
    used = layer[:, layer.sum(axis=0) > 0]
    expected = used.sum(axis=1, keepdims=True) * used.sum(axis=0) / used.sum()
    freedom = (used.shape[0] - 1) * (used.shape[1] - 1)
    return float((((used - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))
