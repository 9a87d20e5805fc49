"""How unevenly the experts of a frequency profile are used, as text for people and as plain values for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perfmodel import __version__
from perfmodel.cli.trace_reports import decimal
from perfmodel.reports import table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from perfmodel.routing.profile import FrequencyProfile

_NOTE = "a frequency profile holds no single tokens: of a layer's skew only, and nothing else, it can tell"


def profile_data(profile: FrequencyProfile) -> dict[str, Any]:
    """The skew of a frequency profile for JSON; None where only the order of experts is known."""
    skew = _skew(profile)
    values = {name: None if skew is None else skew[name].tolist() for name in ("top_half", "gini", "entropy")}
    shares = None if skew is None else profile.shares().tolist()
    return {
        "perfmodel": __version__,
        "kind": "profile",
        "model": profile.metadata["model"],
        "source": profile.metadata["source"],
        "scale": profile.scale,
        "layers": profile.num_layers,
        "num_experts": profile.num_experts,
        "top_k": profile.top_k,
        "layer_index": profile.layer_index.tolist(),
        "metadata": profile.metadata,
        "skew": {"shares": shares, **values},
        "notes": [_NOTE],
    }


def profile_text(profile: FrequencyProfile) -> str:
    """What ``trace stats`` prints of a frequency profile."""
    picks = "" if profile.top_k is None else f", top-{profile.top_k}"
    head = (
        f"{profile.metadata['model']} (frequency profile, {profile.scale}): {profile.num_layers} layers x"
        f" {profile.num_experts} experts{picks}"
    )
    skew = _skew(profile)
    half = profile.num_experts // 2
    if skew is None:
        order = profile.order()
        rows = [[str(layer), " ".join(map(str, order[i, :8]))] for i, layer in enumerate(profile.layer_index)]
        body = table(("layer", "most used experts, in order"), rows, left=0)
        return "\n".join([head, "", body, "", f"note: {_NOTE}; here, of the order only"])
    columns = {f"share of the top {half}": skew["top_half"], "Gini": skew["gini"], "entropy": skew["entropy"]}
    most = profile.shares().argmax(axis=1)
    rows = [
        [str(layer), *(decimal(values[i]) for values in columns.values()), str(most[i])]
        for i, layer in enumerate(profile.layer_index)
    ]
    rows.append(["mean", *(decimal(values.mean()) for values in columns.values()), ""])
    return "\n".join([head, "", table(("layer", *columns, "most used"), rows, left=0), "", f"note: {_NOTE}"])


def _skew(profile: FrequencyProfile) -> dict[str, NDArray[np.float64]] | None:
    """Measures of skew by layer [L]; None where only ranks are known."""
    from perfmodel.routing.statistics import entropy, gini, top_share

    if profile.scale == "ranks":
        return None
    shares = profile.shares()
    return {"top_half": top_share(shares), "gini": gini(shares), "entropy": entropy(shares)}
