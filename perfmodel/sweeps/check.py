"""What can be told about a sweep before it begins: does it fit into memory and on the disk, do its inputs fit?"""

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.errors import PerfModelError
from perfmodel.scenario.plans import INFEASIBLE, replans
from perfmodel.scenario.tables import groups
from perfmodel.sweeps.request import Request

#: Axes whose values must fit each other for a replay, or for a plan on it.
_CHOICES = ("policy", "model", "trace", "loss", "workload.batch")
#: Axes of which only the largest values can make a replay too long.
_LENGTHS = ("workload.prompt", "workload.output")


def check_memory(request: Request, copies: int) -> None:
    """Refuse a sweep that this machine cannot hold before anything is computed.

    copies : of the result that are in memory at once. The coordinates always are, as they are and as labels.
    """
    results = request.design.size * len(request.metrics) * np.dtype(request.dtype).itemsize
    labels = 2 * sum(values.nbytes for values in request.design.axes.values())
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not say
        return
    needed = copies * results + labels
    if needed > 0.7 * memory:
        advice = "; write it to a .zarr output, which is not held in memory" if copies else ""
        raise PerfModelError(
            f"sweep: {request.design.size:,} points x {len(request.metrics)} metrics need {needed / 1e9:.3g} GB, and"
            f" this machine has {memory / 1e9:.3g} GB{advice}"
        )


#: How many times smaller than its numbers a compressed result may become; typical results reach less.
_COMPRESSION = 10


def check_disk(request: Request, path: Path) -> None:
    """Refuse a streamed sweep that cannot possibly fit on its disk before anything is computed."""
    results = request.design.size * len(request.metrics) * np.dtype(request.dtype).itemsize
    nearest = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
    free = shutil.disk_usage(nearest).free
    if results > _COMPRESSION * free:
        raise PerfModelError(
            f"sweep: {request.design.size:,} points x {len(request.metrics)} metrics are {results / 1e9:.3g} GB before"
            f" compression, and {nearest} has {free / 1e9:.3g} GB free"
        )


def check_inputs(request: Request) -> None:
    """Make the replay and a plan of every combination of policies, files and lengths that could be refused.

    They are remembered, so nearly all of this is done only once. A plan that does not fit is no bad input: its points
    have no values.

    Raises
    ------
    PerfModelError : a model, trace, loss table or workload that do not fit together.
    """
    scenario, dims = request.scenario, request.design.dims
    tables = [list(_to_try(dim.axes)) for dim in dims]
    for parts in itertools.product(*tables):
        point = {name: value for part in parts for name, value in part.items()}
        rule = scenario.policy(point.pop("policy", scenario.labels[0]))
        # The plan of this point, which is needed later anyhow.
        settings = {
            name: value
            for name, value in point.items()
            if scenario.axis(name).kind != "hardware" or replans(rule, name)
        }
        try:
            scenario.run(rule, settings)
        except INFEASIBLE:
            continue
        except PerfModelError as error:
            varied = [f"{name}={settings[name]}" for name in (*_CHOICES[1:], *_LENGTHS) if name in settings]
            raise PerfModelError(f"{', '.join(varied)}: {error}" if varied else str(error)) from None


def _to_try(axes: Mapping[str, NDArray[Any]]) -> Iterator[dict[str, Any]]:
    """Points of a dimension: for every choice of policy and files those with the largest lengths, else the first."""
    choices, lengths = ([name for name in names if name in axes] for names in (_CHOICES, _LENGTHS))
    for _, place in groups(axes, choices):
        part = {name: values[place] for name, values in axes.items()}
        # From the longest prompt down, those with a longer output than all before.
        longest = -1.0
        order = np.lexsort([-part[name] for name in reversed(lengths)]) if lengths else np.zeros(1, dtype=np.int64)
        for i in order.tolist():
            last = float(part[lengths[-1]][i]) if lengths else 0.0
            if last > longest:
                longest = last
                yield {name: values[[i]].tolist()[0] for name, values in part.items()}
