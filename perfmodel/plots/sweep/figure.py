"""Any figure of a sweep, by the name of its kind."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from perfmodel.errors import PerfModelError
from perfmodel.plots.sweep.kinds import check_kind, not_among

if TYPE_CHECKING:
    import xarray


def sweep_figure(kind: str, dataset: xarray.Dataset, **options: Any) -> Figure:
    """A figure of a sweep, ready for a paper.

    Parameters
    ----------
    kind : one of ``KINDS``.
    dataset : from ``perfmodel.sweep`` or a file that it wrote; for ``tornado`` also from ``perfmodel.tornado``.
    options : those of the kind (see ``KINDS``); each is explained in its module, as in ``plots/sweep/speedup.py``.
        Options that are None count as not given.

    Raises
    ------
    PerfModelError : an unknown kind, option, axis, metric or policy (with close matches), or nothing to draw.
    """
    import xarray as xr

    given = check_kind(kind, options)
    if not isinstance(dataset, xr.Dataset):
        raise not_among("dataset of the plot", dataset, ["an xarray.Dataset of a sweep"])
    answer = dataset.attrs.get("kind", "sweep")
    if answer != "sweep" and not answer == kind == "tornado":
        raise PerfModelError(
            f"dataset of the plot: found the answer {str(answer)[:40]!r}, allowed a sweep; only a tornado can be drawn"
            " itself, as the kind tornado"
        )
    module = importlib.import_module(f"perfmodel.plots.sweep.{kind}")
    figure: Figure = getattr(module, f"{kind}_figure")(dataset, **given)
    return figure
