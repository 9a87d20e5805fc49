"""Figures of a reproduction, a comparison, a ranking, a sweep, a loss table and a trace, for a two-column paper.

The names below are the public interface; those that draw are imported when first used, so that a suffix can be
checked without loading matplotlib.
"""

from typing import TYPE_CHECKING

from perfmodel.plots.formats import SUFFIXES, check_suffix

__all__ = [
    "KINDS",
    "SUFFIXES",
    "assignments_figure",
    "check_suffix",
    "comparison_figure",
    "control_figure",
    "losses_figure",
    "profile_figure",
    "rank_figures",
    "read_steps",
    "reproduction_figures",
    "save",
    "survey_figures",
    "sweep_figure",
    "validation_figures",
]

if TYPE_CHECKING:
    from perfmodel.plots.assignments import assignments_figure
    from perfmodel.plots.canvas import save
    from perfmodel.plots.comparison import comparison_figure
    from perfmodel.plots.control import control_figure
    from perfmodel.plots.losses import losses_figure
    from perfmodel.plots.rank import rank_figures
    from perfmodel.plots.reproduction import reproduction_figures
    from perfmodel.plots.routing.figures import profile_figure, survey_figures
    from perfmodel.plots.routing.steps import read_steps
    from perfmodel.plots.sweep.figure import sweep_figure
    from perfmodel.plots.sweep.kinds import KINDS
    from perfmodel.plots.validation import validation_figures
else:
    _HOMES = {
        "KINDS": "sweep.kinds",
        "assignments_figure": "assignments",
        "comparison_figure": "comparison",
        "control_figure": "control",
        "losses_figure": "losses",
        "profile_figure": "routing.figures",
        "rank_figures": "rank",
        "read_steps": "routing.steps",
        "reproduction_figures": "reproduction",
        "save": "canvas",
        "survey_figures": "routing.figures",
        "sweep_figure": "sweep.figure",
        "validation_figures": "validation",
    }

    def __getattr__(name):
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
