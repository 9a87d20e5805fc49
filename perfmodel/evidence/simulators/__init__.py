"""What two simulators printed, beside what the closed forms of the kernels say.

The figures come from SCALE-Sim (cycles of matrix products on systolic arrays) and Ramulator 2 (read streams on one
DRAM channel). No code of theirs is here, and nothing is fitted to them; the
README of the folder describes its files.
"""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from perfmodel.errors import SpecError
from perfmodel.kernels import dram, systolic

_FOLDER = Path(__file__).resolve().parent

#: Forms of Ramulator rows that read whole rows one after another, as weights are read; the others pick lines.
STREAMS = ("interleaved", "row-by-row", "bank-group-limited")
_FORMS = (*STREAMS, "random", "one-bank")


class Comparison(NamedTuple):
    """One simulated run beside its closed form.

    kind : the dataflow, or the form that covers the row. case : the run in a few words.
    predicted, simulated : cycles, or the share of the peak rate [1].
    """

    kind: str
    case: str
    predicted: float
    simulated: float

    @property
    def error(self) -> float:
        """``predicted / simulated - 1`` [1]."""
        return self.predicted / self.simulated - 1.0


def compare_scalesim() -> tuple[Comparison, ...]:
    """Compute cycles of 858 matrix products on one array; SCALE-Sim counts from 0, so one is added to its figure."""
    runs = _rows("scalesim_cycles.csv")
    sizes = [np.array([float(run[key]) for run in runs]) for key in ("M", "K", "N", "rows", "cols")]
    codes = np.array([systolic.DATAFLOWS[run["dataflow"]] for run in runs])
    cycles = systolic.gemm_cycles(*sizes, codes)
    return tuple(
        Comparison(
            kind=run["dataflow"],
            case=f"[{run['M']}, {run['K']}] x [{run['K']}, {run['N']}] on {run['rows']} x {run['cols']}",
            predicted=float(predicted),
            simulated=float(run["compute_cycles"]) + 1.0,
        )
        for run, predicted in zip(runs, cycles, strict=True)
    )


def compare_ramulator() -> tuple[Comparison, ...]:
    """Share of the pin peak that 156 read streams reach on one channel."""
    timings = dram_timings()
    return tuple(
        Comparison(
            kind=run["form"],
            case=f"{run['memory']}, {run['mapping']}, {run['scheduler']}, {run['read_buffer']} reads buffered, "
            f"refresh {'off' if run['refresh'] == 'NoRefresh' else 'on'}",
            predicted=share_of_peak(
                run["form"], timings[run["memory"]], float(run["read_buffer"]), run["refresh"] != "NoRefresh"
            ),
            simulated=float(run["frac_peak"]),
        )
        for run in _rows("ramulator2_closed_form.csv")
    )


def dram_timings() -> dict[str, dict[str, float]]:
    """Timing numbers of the simulated memories by name [clock cycle]."""
    return {
        row["memory"]: {key: float(value) for key, value in row.items() if key != "memory"}
        for row in _rows("dram_timings.csv")
    }


def share_of_peak(form: str, timing: dict[str, float], read_buffer: float, refresh: bool) -> float:
    """Share of the pin peak by the closed form that covers an access pattern [1].

    form : "interleaved", "row-by-row", "bank-group-limited", "random" or "one-bank". timing : as in `dram_timings`.
    read_buffer : reads that the controller holds. refresh : whether it refreshes.

    Raises
    ------
    SpecError : there is no such form.
    """

    def numbers(names: str) -> Iterable[float]:
        return (timing[name] for name in names.split())

    if form == "row-by-row":
        share = dram.row_by_row_fraction(*numbers("lines_per_row n_bl n_ccd_l n_rtp n_rp n_rcd pseudo_channels"))
    elif form == "bank-group-limited":
        share = dram.bank_group_limited_fraction(*numbers("lines_per_row n_bl n_ccd_l n_rp n_rcd"), read_buffer)
    elif form == "random":
        share = dram.random_fraction(*numbers("n_bl n_faw n_rrd_s pseudo_channels command_cycles"))
    elif form == "one-bank":
        share = dram.one_bank_fraction(*numbers("n_bl n_rc pseudo_channels"))
    elif form == "interleaved":
        share = 1.0
    else:
        raise SpecError(f"form is {form!r}; allowed: {', '.join(_FORMS)}")
    return float(share * dram.refresh_fraction(*numbers("n_rtp n_rp n_rfc n_rcd n_refi")) if refresh else share)


def _rows(name: str) -> list[dict[str, str]]:
    with (_FOLDER / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
