"""Any figure of a sweep, by the name of its kind."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from perfmodel.plots.sweep.kinds import check_dataset, check_kind, not_among

if TYPE_CHECKING:
    import xarray


def sweep_figure(kind: str, dataset: xarray.Dataset, **options: Any) -> Figure:
    """A figure of a sweep, ready for a paper.

    Parameters
    ----------
    kind : one of ``KINDS``.
    dataset : from ``perfmodel.sweep`` or a file that it wrote; for ``tornado``, ``sobol``, ``break-even`` and
        ``pareto`` the answer of that name.
    options : those of the kind (see ``KINDS``); each is explained in its module, as in ``plots/sweep/speedup.py``.
        Options that are None count as not given.

    Raises
    ------
    PerfModelError : an unknown kind, option, axis, metric or policy (with close matches), or nothing to draw.
    """
    import xarray as xr

    given = check_kind(kind, options)
    if not isinstance(dataset, xr.Dataset):
        raise not_among("dataset of plot", dataset, ["an xarray.Dataset of a sweep"])
    check_dataset(kind, str(dataset.attrs.get("kind", "sweep")))
    name = kind.replace("-", "_")
    module = importlib.import_module(f"perfmodel.plots.sweep.{name}")
    figure: Figure = getattr(module, f"{name}_figure")(dataset, **given)
    return figure
