"""All figures of a survey, or of a frequency profile, by name."""

from __future__ import annotations

from matplotlib.figure import Figure

from perfmodel.plots.routing.curves import cache_figure, distinct_figure, drift_figure, hit_rate_figure, reuse_figure
from perfmodel.plots.routing.experts import Floats, experts_figure, order_figure
from perfmodel.plots.routing.frame import contents_words, drawn_scopes
from perfmodel.plots.routing.layers import layers_figure
from perfmodel.plots.routing.steps import Steps, steps_figure
from perfmodel.plots.words import plain
from perfmodel.routing.profile import FrequencyProfile
from perfmodel.routing.statistics import Survey


def survey_figures(survey: Survey, steps: Steps | None = None) -> dict[str, Figure]:
    """Figures of everything that a survey could tell, by name.

    ``experts`` (layer x expert, by phase), ``layers``, ``reuse``, ``distinct``, ``hit_rate``, ``cache``, ``drift``, and
    with ``steps`` also ``steps`` (step x expert of one sequence). What the recording cannot tell has no figure.
    """
    about = contents_words(survey.contents)
    shares: dict[str, Floats] = {scope: survey.skew[scope].shares for scope in drawn_scopes(survey.skew)}
    found = {"experts": experts_figure(shares, survey.contents.layer_index, about)}
    if steps is not None:
        found["steps"] = steps_figure(steps, about)
    found["layers"] = layers_figure(survey)
    if survey.reuse and len(survey.lags):
        found["reuse"] = reuse_figure(survey)
    if survey.distinct and len(survey.windows):
        found["distinct"] = distinct_figure(survey)
    if survey.hit_rates is not None:
        found["hit_rate"] = hit_rate_figure(survey, survey.hit_rates)
    if survey.cache is not None:
        found["cache"] = cache_figure(survey, survey.cache)
    if survey.drift is not None and len(survey.drift.first_row):
        found["drift"] = drift_figure(survey, survey.drift)
    return found


def profile_figure(profile: FrequencyProfile) -> Figure:
    """Shares of the uses of every layer in colour; the places in the order of use where only the order is known."""
    picks = "" if profile.top_k is None else f", top-{profile.top_k}"
    about = [
        f"Frequency profile ({profile.scale}) of {plain(profile.metadata['model'])}: {profile.num_layers} layers"
        f" of {profile.num_experts} experts{picks}."
    ]
    if profile.scale == "ranks":
        return order_figure(profile.order(), profile.layer_index, about)
    return experts_figure({"uses": profile.shares()}, profile.layer_index, about)
