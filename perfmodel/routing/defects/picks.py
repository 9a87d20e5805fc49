"""Defects of single picks: whose ids they are, their order and their weights."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from perfmodel.routing.defects import Seen
from perfmodel.routing.defects.rows import chunks, counted
from perfmodel.routing.trace import RoutingTrace

#: How far from one the weights of a token may sum: 16-bit weights round by up to 2 ** -9 each.
ROUNDING = 0.01


def physical_ids(trace: RoutingTrace) -> Seen | None:
    """The metadata call the ids physical, or there are more of them than the named model has experts.

    Only a map from slots to experts can mend this, which a trace does not hold.
    """
    model = trace.metadata["model"]
    how = (
        "; a trace does not say what each slot holds: import what the server wrote, not this trace, with a map of the "
        "slots (--expert-map, of the formats sglang and sglang-stat)"
    )
    if trace.metadata.get("id_space") == "physical":
        return Seen(f"ids are of the slots of the {trace.num_experts} that the server filled, not of experts{how}")
    known = _experts_of(model)
    if known is None:
        named = trace.metadata.get("num_experts")
        known = named if type(named) is int and named > 0 else None
    if known is not None and trace.num_experts > known:
        return Seen(f"{trace.num_experts} experts a layer, {model} has {known}{how}")
    return None


def _experts_of(name: str) -> int | None:
    """Experts a layer of a model whose shape comes with the package."""
    from perfmodel.model import MoEModel, bundled_models

    return MoEModel.from_config(name).num_experts if name in bundled_models() else None


def weight_order(trace: RoutingTrace) -> Seen | None:
    """Some token has a pick with a larger weight than the pick before it. Mended by sorting each token's picks."""
    if trace.topk_weights is None or trace.top_k == 1:
        return None
    wrong = 0
    for rows in chunks(trace):
        part = trace.topk_weights[rows]
        wrong += int((part[..., 1:] > part[..., :-1]).any(-1).sum())
    if not wrong:
        return None
    every = trace.num_tokens * trace.num_layers
    return Seen(
        f"{_share(wrong, every)} of the lists of picks are not in order of their weights; "
        "the first pick is not the strongest",
        "sort the picks of every token and layer by weight, the largest first",
        lambda: _sorted(trace),
    )


def _sorted(trace: RoutingTrace) -> RoutingTrace:
    assert trace.topk_weights is not None
    ids, weights = np.empty_like(trace.topk_ids), np.empty_like(trace.topk_weights)
    for rows in chunks(trace):
        part = trace.topk_ids[rows]
        # Unassigned picks go last; picks of equal weight keep their order.
        order = np.argsort(np.where(part == trace.unassigned, 1.0, -trace.topk_weights[rows]), axis=-1, kind="stable")
        ids[rows] = np.take_along_axis(part, order, -1)
        weights[rows] = np.take_along_axis(trace.topk_weights[rows], order, -1)
    return replace(trace, topk_ids=ids, topk_weights=weights)


def unnormalised_weights(trace: RoutingTrace) -> Seen | None:
    """The weights of some token do not sum to one within 1 %. Mended by dividing them by their sum.

    Right for models that renormalise and for statistics of shares; a model that does not renormalise really
    computes with the recorded weights.
    """
    if trace.topk_weights is None:
        return None
    wrong = none = every = 0
    lowest, highest = np.inf, 0.0
    for rows in chunks(trace):
        sums = _sums(trace, rows)[(trace.topk_ids[rows] != trace.unassigned).any(-1)]
        off = sums[np.abs(sums - 1) > ROUNDING]
        every, wrong, none = every + sums.size, wrong + off.size, none + int((sums == 0).sum())
        if off.size:
            lowest, highest = min(lowest, float(off.min())), max(highest, float(off.max()))
    if not wrong:
        return None
    sum_text = f"{lowest:.3g}" if highest - lowest <= ROUNDING * highest else f"{lowest:.3g} to {highest:.3g}"
    zeros = f"; {counted(none, 'list')} of zeros stay as they are" if none else ""
    return Seen(
        f"weights of {_share(wrong, every)} of the lists of picks sum to {sum_text} and not to one",
        f"divide the weights of every token and layer by their sum{zeros}",
        lambda: _normalised(trace),
    )


def _sums(trace: RoutingTrace, rows: slice) -> NDArray[np.float64]:
    assert trace.topk_weights is not None
    return trace.topk_weights[rows].sum(-1, dtype=np.float64)  # type: ignore[no-any-return]


def _normalised(trace: RoutingTrace) -> RoutingTrace:
    assert trace.topk_weights is not None
    weights = np.empty_like(trace.topk_weights)
    for rows in chunks(trace):
        sums = _sums(trace, rows)[..., None]
        weights[rows] = trace.topk_weights[rows] / np.where(sums > 0, sums, 1)
    rule = trace.metadata.get("weight_rule")
    known = f"{rule}, then divided by their sum" if isinstance(rule, str) else "divided by their sum"
    return replace(trace, topk_weights=weights).with_metadata(weight_rule=known)


def _share(part: int, whole: int) -> str:
    percent = 100 * part / whole
    return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.2g} % ({part:,})"
