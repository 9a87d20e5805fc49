"""Figures of sweeps show the numbers of the sweep, say what is held fixed, and refuse what cannot be drawn."""

import functools
import itertools
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from commands import check_refusal, run
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import QuadMesh
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from perfmodel import __version__, plots
from perfmodel.answers import break_even, sobol_indices, tornado
from perfmodel.cli.plot import read_at
from perfmodel.errors import PerfModelError
from perfmodel.evaluation import PARTS
from perfmodel.plots.style import PART_LOOKS
from perfmodel.plots.sweep.axes import log_spaced
from perfmodel.plots.sweep.kinds import KINDS
from perfmodel.plots.sweep.labels import axis_words, nice_ticks
from perfmodel.plots.words import policy_names
from perfmodel.scenario import Scenario
from perfmodel.sweeps.api import sweep
from perfmodel.sweeps.dataset import save

LINK, DRAM, ARRAYS = "link.bandwidth_gb_per_s", "ndp.dram_bandwidth_gb_per_s", "ndp.arrays"
POLICIES = ("monde", "hobbit", "context-aware:mean_bits=3", "context-aware:mean_bits=2")
NAMES = ("MoNDE", "HOBBIT", "context-aware 3-bit", "context-aware 2-bit")
WORKLOAD = {"prompt": 8, "output": 8}
PART_METRICS = tuple(f"{part}_s" for part in PARTS)


@pytest.fixture(scope="module")
def grid() -> xr.Dataset:
    """Every policy over link and memory rates, and over the number of arrays."""
    return sweep(
        policy=POLICIES,
        axes={LINK: [16, 32, 64, 128, 256], DRAM: [128, 256, 512, 1024], ARRAYS: [16, 64]},
        metrics=("tpot_mean_s", "decode_tok_per_s", "gpu_memory_bytes", *PART_METRICS),
        **WORKLOAD,
    )


@pytest.fixture(scope="module")
def plans() -> xr.Dataset:
    """Options of one policy beside the others."""
    return sweep(
        policy=("hobbit", "monde", "context-aware"),
        axes={"policy.mean_bits": [1, 2, 4], "policy.gpu_experts": ["auto", 2]},
        metrics=("tpot_mean_s", "gpu_memory_bytes"),
        **WORKLOAD,
    )


def caption(figure: Figure) -> str:
    return " ".join(figure.get_supxlabel().split())


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


def labels(figure: Figure) -> list[tuple[str, str]]:
    """Labels of the axes of every panel, in one line."""
    return [
        (axes.get_xlabel().replace("\n", " "), axes.get_ylabel().replace("\n", " "))
        for axes in figure.axes
        if axes.get_visible()
    ]


def drawn(figure: Figure, panel: int = 0) -> dict[str, Any]:
    return {str(line.get_label()): line for line in figure.axes[panel].lines}


def bars(figure: Figure, panel: int = 0) -> dict[str, tuple[Any, Any]]:
    """Horizontal bars by label, as (left, right)."""
    found = {}
    for container in figure.axes[panel].containers:
        assert isinstance(container, BarContainer)
        left = np.array([patch.get_x() for patch in container])
        found[container.get_label()] = (left, left + [patch.get_width() for patch in container])
    return found


def isolines(axes: Any) -> list[Any]:
    return [line for line in axes.lines if line.get_gid() == "isoline"]


def metric_of(dataset: xr.Dataset, policy: str, name: str = "tpot_mean_s", **at: float) -> Any:
    keys = {"link": LINK, "dram": DRAM, "arrays": ARRAYS}
    return dataset[name].sel({"policy": policy, **{keys[key]: value for key, value in at.items()}}).values


@functools.cache
def shares() -> xr.Dataset:
    ranges = {LINK: (16, 256, "log"), DRAM: (128, 1024), "ndp.dram.n_ccd_l": (2, 8)}
    return sobol_indices(Scenario.of(policy=("monde", "hobbit"), **WORKLOAD), ranges, n=64)


@functools.cache
def line() -> xr.Dataset:
    scenario = Scenario.of(policy=("context-aware:mean_bits=3", "hobbit"), **WORKLOAD)
    return break_even(scenario, (DRAM, 1, 1000), along=(LINK, [32, 64, 128]))


LONG = "context-aware:mean_bits=3,alpha=0.25,gpu_experts=2,overlap=sum"


def long_names(grid: xr.Dataset) -> dict[str, Figure]:
    """Figures whose metric, policies and units have more words than fit in a line."""
    meaning = "a product of energy and delay over the whole sequence with all its copies and the prefill"
    known = sweep(policy=("monde", LONG, LONG.replace("sum", "max")), axes={LINK: [16, 64, 256], DRAM: [128, 512]})
    known["edp"] = (known["tpot_mean_s"] ** 2).assign_attrs(long_name=meaning, units="kJ s per token")
    figure = plots.sweep_figure
    return {
        "heatmap": figure("heatmap", known, metric="edp"),
        "heatmap one": figure("heatmap", known, metric="edp", policy=LONG),
        "heatmap two": figure(
            "heatmap", known, metric="edp", policy=["monde", LONG], baseline=LONG.replace("sum", "max")
        ),
        "heatmap p99": figure("heatmap", grid.rename(tpot_mean_s="tpot_p99_s"), metric="tpot_p99_s", policy="monde"),
        "speedup": figure("speedup", known, metric="edp"),
        "speedup panels": figure("speedup", known, metric="edp", panels=DRAM, x=LINK),
        "pareto": figure("pareto", known, y="edp", x="tpot_mean_s"),
        "pareto one": figure("pareto", known, y="edp", x="tpot_mean_s", policy=LONG),
        "breakdown": figure("breakdown", known),
        "cdf": figure("cdf", known),
        "cdf one": figure("cdf", known, policy=LONG),
        "tornado": figure("tornado", known),
        "tornado one": figure("tornado", known, policy=LONG),
        "roofline": figure("roofline", known),
    }


def every_figure(grid: xr.Dataset, plans: xr.Dataset) -> dict[str, Figure]:
    figure = plots.sweep_figure
    return {
        "speedup": figure("speedup", grid),
        "speedup panels": figure("speedup", grid, panels=ARRAYS, x=LINK),
        "heatmap": figure("heatmap", grid),
        "heatmap metric": figure("heatmap", grid, policy="hobbit"),
        "pareto": figure("pareto", grid),
        "pareto plans": figure("pareto", with_accuracy(plans), policy="context-aware", x="accuracy", y="tpot_mean_s"),
        "roofline": figure("roofline", grid, at={LINK: 64}),
        "breakdown": figure("breakdown", grid),
        "breakdown axis": figure("breakdown", plans, x="mean_bits", policy="context-aware"),
        "cdf": figure("cdf", grid),
        "cdf together": figure("cdf", grid, policy=list(POLICIES[2:])),
        "tornado": figure("tornado", grid),
        "tornado one": figure("tornado", grid, policy="hobbit"),
        "sobol": figure("sobol", shares()),
        "sobol one": figure("sobol", shares(), policy="monde"),
        "break-even": figure("break-even", line()),
        **{f"{kind} of long names": one for kind, one in long_names(grid).items()},
    }


@pytest.fixture(scope="module")
def figures(grid: xr.Dataset, plans: xr.Dataset) -> dict[str, Figure]:
    return every_figure(grid, plans)


def test_every_kind_is_drawn(figures):
    assert {name.split()[0] for name in figures} == set(KINDS) == set(plots.KINDS)


def test_captions_say_what_was_priced_and_fonts_can_be_read(figures):
    for name, figure in figures.items():
        words = caption(figure)
        for part in ("Model: Mixtral 8x7B.", "System: h100-cxl2-ndp.", "Routing: tiny-mixtral-32l (recorded)."):
            assert part in words, name
        lengths = (
            "prompt and output as recorded: mean 112 and 224"
            if "long names" in name and "p99" not in name
            else "prompt 8, output 8"
        )
        assert f"Workload: {lengths} tokens." in words, name
        assert "Weakest source among the hardware constants: assumed." in words
        assert words.endswith(f"perfmodel {__version__}.")
        assert round(figure.get_figwidth(), 2) in {3.4, 7.0}
        assert all(text.get_fontsize() >= 7 for text in figure.findobj(Text) if text.get_text())


def test_every_axis_is_named_and_has_its_unit(figures):
    units = r"\((×|ms|s|GB|GB/s|TFLOP/s|FLOP/byte|%|kJ s per token)(, log)?\)$"
    for name, figure in figures.items():
        found = [label for pair in labels(figure) for label in pair if label]
        assert found, name
        for label in found:
            assert re.search(units, label) or label.startswith(("mean bits", "NDP arrays")), (name, label)


def outside_ticks(figure: Figure) -> set[int]:
    """Labels of ticks outside the limits, which matplotlib keeps but does not draw."""
    found = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    found |= {id(tick.label1), id(tick.label2)}
    return found


def test_nothing_overlaps_and_nothing_is_cut_off(figures):
    for name, figure in figures.items():
        figure.draw_without_rendering()
        width, height = figure.bbox.size
        boxes = []
        undrawn = outside_ticks(figure)
        for text in figure.findobj(Text):
            hidden = (text.axes is not None and not text.axes.get_visible()) or id(text) in undrawn
            if not text.get_text().strip() or not text.get_visible() or text.figure is None or hidden:
                continue
            box = Text.get_window_extent(text)
            assert box.x0 >= -1, (name, text.get_text())
            assert box.x1 <= width + 1, (name, text.get_text())
            assert box.y0 >= -1, (name, text.get_text())
            assert box.y1 <= height + 1, (name, text.get_text())
            boxes.append((text.get_text(), box.shrunk(0.9, 0.8)))
        for (one, box), (other, beside) in itertools.combinations(boxes, 2):
            if one != other:
                assert not box.overlaps(beside), (name, one, other)


def test_speedup_draws_the_ratio_of_every_policy(grid, figures):
    figure = figures["speedup"]
    assert legend(figure) == [*NAMES[1:], "MoNDE (baseline)"]
    assert labels(figure) == [("link bandwidth (GB/s, log)", "speed-up over MoNDE (×, log)")]
    lines = drawn(figure)
    at = {"dram": 512, "arrays": 64}
    for policy, name in zip(POLICIES[1:], NAMES[1:], strict=True):
        expected = metric_of(grid, "monde", **at) / metric_of(grid, policy, **at)
        np.testing.assert_allclose(lines[name].get_ydata(), expected, rtol=1e-12, atol=0)
        np.testing.assert_array_equal(lines[name].get_xdata(), grid[LINK].values)
    assert len({lines[name].get_marker() for name in NAMES[1:]}) == 3
    assert len({str(lines[name].get_linestyle()) for name in NAMES[1:]}) == 3
    assert (
        "Not drawn, held at the sweep's value nearest the system's own: NDP DRAM bandwidth 512 GB/s, NDP arrays 64."
        in caption(figure)
    )
    assert "mean time per output token of the baseline (MoNDE) over that of the policy." in caption(figure)


def test_speedup_of_a_rate_turns_the_ratio_around(grid):
    options: Mapping[str, Any] = {"metric": "decode_tok_per_s", "baseline": "hobbit", "at": {ARRAYS: 64, DRAM: 512}}
    figure = plots.sweep_figure("speedup", grid, x=LINK, policy="monde", **options)
    line = drawn(figure)["MoNDE"]
    at = {"dram": 512, "arrays": 64}
    rate = {policy: metric_of(grid, policy, "decode_tok_per_s", **at) for policy in ("monde", "hobbit")}
    np.testing.assert_allclose(line.get_ydata(), rate["monde"] / rate["hobbit"], rtol=1e-12, atol=0)
    assert "Held at: NDP DRAM bandwidth 512 GB/s, NDP arrays 64." in caption(figure)
    assert "Not drawn" not in caption(figure)
    assert "decode rate of the policy over that of the baseline (HOBBIT)." in caption(figure)
    memory = plots.sweep_figure("speedup", grid, metric="gpu_memory_bytes")
    assert labels(memory)[0][1].startswith("gain over MoNDE")


def test_speedup_has_one_panel_a_value(grid, figures):
    figure = figures["speedup panels"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["NDP arrays 16", "NDP arrays 64"]
    for panel, arrays in enumerate((16, 64)):
        at = {"dram": 512, "arrays": arrays}
        expected = metric_of(grid, "monde", **at) / metric_of(grid, "hobbit", **at)
        np.testing.assert_allclose(drawn(figure, panel)["HOBBIT"].get_ydata(), expected, rtol=1e-12, atol=0)


def test_speedup_by_default_is_over_the_published_baselines(plans):
    assert "MoNDE (baseline)" in legend(plots.sweep_figure("speedup", plans, x="mean_bits"))
    without = plans.sel(policy=["context-aware", "hobbit"])
    assert "HOBBIT (baseline)" in legend(plots.sweep_figure("speedup", without, x="mean_bits"))


def test_speedup_has_gaps_where_there_is_no_plan(grid):
    broken = grid.copy(deep=True)
    broken["tpot_mean_s"].loc[{"policy": "hobbit", LINK: 64}] = np.nan
    figure = plots.sweep_figure("speedup", broken, x=LINK)
    assert np.isnan(drawn(figure)["HOBBIT"].get_ydata()).tolist() == [False, False, True, False, False]
    assert "gaps where a plan is not feasible" in caption(figure)
    with pytest.raises(PerfModelError, match="no point has tpot_mean_s"):
        plots.sweep_figure("speedup", broken * np.nan, x=LINK)


def test_heatmap_colours_are_the_gains_and_break_even_is_marked(grid, figures):
    figure = figures["heatmap"]
    panels = figure.axes[:-1]
    assert [axes.get_title(loc="left") for axes in panels] == list(NAMES[1:])
    assert labels(figure)[-1][1] == "speed-up over MoNDE (×, log)"
    assert labels(figure)[0] == ("link bandwidth (GB/s, log)", "NDP DRAM bandwidth (GB/s, log)")
    for axes, policy in zip(panels, POLICIES[1:], strict=True):
        (mesh,) = (one for one in axes.collections if isinstance(one, QuadMesh))
        expected = (metric_of(grid, "monde", arrays=64) / metric_of(grid, policy, arrays=64)).T
        np.testing.assert_allclose(np.asarray(mesh.get_array()), expected, rtol=1e-12, atol=0)
    ratio = metric_of(grid, "monde", arrays=64) / metric_of(grid, "hobbit", arrays=64)
    assert (ratio < 1).any()
    assert (ratio > 1).any()
    assert legend(figure) == ["break-even (1×)"]
    assert "1×" in [text.get_text() for text in panels[0].texts]
    assert "Better everywhere: context-aware 3-bit, context-aware 2-bit." in caption(figure)


def test_break_even_line_follows_power_laws_on_coarse_grids(grid):
    # The gain is 16 / (link * dram) to a power, so the line of gain 1 is link * dram = 16 exactly.
    link, dram = np.array([1.0, 4.0, 16.0, 64.0]), np.array([0.5, 2.0, 8.0, 32.0])
    ours = (np.multiply.outer(link, dram) / 16.0) ** 1.5
    values = np.stack([np.ones_like(ours), ours])
    known = xr.Dataset(
        {"tpot_mean_s": (("policy", LINK, DRAM), values)},
        {"policy": ["monde", "hobbit"], LINK: link, DRAM: dram},
    )
    figure = plots.sweep_figure("heatmap", known)
    (even,) = (one for one in isolines(figure.axes[0]) if one.get_linewidth() == 2.0)
    x, y = even.get_xydata().T
    np.testing.assert_allclose(x * y, 16.0, rtol=2e-2, atol=0)
    assert x.min() < 1.0 * 1.01
    assert x.max() > 16.0


def test_heatmap_of_one_policy_shows_the_metric(grid, figures):
    figure = figures["heatmap metric"]
    axes = figure.axes[0]
    assert labels(figure)[-1][1] == "mean time per output token (s, log)"
    (mesh,) = (one for one in axes.collections if isinstance(one, QuadMesh))
    expected = metric_of(grid, "hobbit", arrays=64).T
    np.testing.assert_allclose(np.asarray(mesh.get_array()), expected, rtol=1e-12, atol=0)
    assert not figure.legends
    gains = plots.sweep_figure("heatmap", grid, policy="hobbit", baseline="monde", x=DRAM, y=LINK)
    assert gains.axes[0].get_xlabel().startswith("NDP DRAM bandwidth")


def with_accuracy(plans: xr.Dataset) -> xr.Dataset:
    """The sweep with a number that its reader computed, which rises with the bits."""
    bits = plans["policy.mean_bits"]
    return plans.assign(accuracy=np.sqrt(bits).assign_attrs(better="higher", long_name="accuracy", units="%"))


def test_pareto_front_is_what_no_point_beats(plans, figures):
    figure = figures["pareto plans"]
    times = plans["tpot_mean_s"].sel(policy="context-aware").values
    y = times.reshape(-1) * 1e3
    x = np.repeat(np.sqrt([1.0, 2.0, 4.0]), times.shape[1])
    beaten = [
        any((x[j] >= x[i]) and (y[j] <= y[i]) and (x[j] > x[i] or y[j] < y[i]) for j in range(len(x)))
        for i in range(len(x))
    ]
    expected = sorted({(a, b) for a, b, worse in zip(x, y, beaten, strict=True) if not worse})
    assert len(expected) > 1
    front = drawn(figure)["front"]
    np.testing.assert_allclose(front.get_xydata(), expected, rtol=1e-12, atol=0)
    assert front.get_drawstyle() == "steps-pre"
    assert labels(figure)[0][0] == "accuracy (%)"
    assert labels(figure)[0][1].startswith("mean time per output token (ms")
    assert f"higher accuracy, lower mean time per output token. {len(expected)} of {len(x)} points" in caption(figure)
    assert legend(figure) == ["context-aware", "front"]
    assert "(a)" in caption(figure)


def test_a_front_of_one_point_is_no_line(plans):
    figure = plots.sweep_figure("pareto", plans, policy="context-aware")
    assert "1 of 6 points is on the front. (a)" in caption(figure)
    assert legend(figure) == ["context-aware"]
    assert "front" not in drawn(figure)


def test_many_points_are_thinned_out_and_hide_no_policy():
    count = 40_000
    values = np.stack([np.linspace(1, 2, count), np.linspace(1, 2, count)])
    known = xr.Dataset(
        {"tpot_mean_s": (("policy", LINK), values), "ttft_s": (("policy", LINK), values[:, ::-1])},
        {"policy": ["monde", "hobbit"], LINK: np.linspace(1, 9, count)},
    )
    figure = plots.sweep_figure("pareto", known)
    assert "Behind it, 3000 points drawn at random stand for all." in caption(figure)
    behind = [line for line in figure.axes[0].lines if line.get_alpha() is not None]
    assert sum(len(line.get_xdata()) for line in behind) == 3000
    shares = {
        colour: sum(len(b.get_xdata()) for b in behind if b.get_color() == colour) for colour in ("#0072B2", "#E69F00")
    }
    assert all(1300 < share < 1700 for share in shares.values())
    colours = [line.get_color() for line in behind]
    turns = sum(one != other for one, other in itertools.pairwise(colours))
    assert turns > 100  # neither lies over the other as a whole
    assert max(line.get_zorder() for line in behind) < min(
        line.get_zorder() for line in figure.axes[0].lines if line.get_alpha() is None and len(line.get_xdata())
    )


def test_pareto_takes_axes_samples_and_tables(grid):
    cheap = plots.sweep_figure("pareto", grid, x="arrays", at={LINK: 64})
    assert cheap.axes[0].get_xlabel() == "NDP arrays"
    assert "Only points at: link bandwidth 64 GB/s." in caption(cheap)
    drawn_points = sum(len(line.get_xdata()) for line in cheap.axes[0].lines if line.get_alpha() is not None)
    assert drawn_points == 4 * 4 * 2
    samples = sweep(axes={LINK: "16:64", DRAM: "128:512"}, sample="lhs:5", policy="monde", **WORKLOAD)
    figure = plots.sweep_figure("pareto", samples)
    assert legend(figure)[0] == "MoNDE"
    table = {"policy": ["monde", "hobbit", "hobbit"], LINK: [16, 32, 64]}
    cases = sweep(cases=table, metrics=("tpot_mean_s", "gpu_memory_bytes"), **WORKLOAD)
    figure = plots.sweep_figure("pareto", cases)
    assert "1 of 3 points is on the front" in caption(figure)
    with pytest.raises(PerfModelError, match=r"table of cases.*kinds pareto"):
        plots.sweep_figure("speedup", cases, x=LINK)


def test_roofline_marks_lie_below_their_roofs(figures):
    figure = figures["roofline"]
    # 64 arrays of 4 x 4 at 1 GHz; fewer bits go through that much faster
    rates = [(bits, f"{64 * 16 * 2e-3 * 16 / bits:.3g}") for bits in (1, 2, 3, 16)]
    assert legend(figure) == [
        "decode",
        "prefill",
        "GPU: 1072 GB/s, 693 TFLOP/s",
        "link: 64.0 GB/s",
        *(f"near data, {bits}-bit: 207 GB/s, {rate} TFLOP/s" for bits, rate in rates),
    ]
    gpu, ndp = figure.axes
    assert gpu.get_title(loc="left") == "GPU: h100-sxm"
    assert [axes.get_xlabel() for axes in (gpu, ndp)] == ["arithmetic intensity (FLOP/byte, log)"] * 2
    for axes, roofs in ((gpu, 2), (ndp, 4)):
        lines = [line for line in axes.lines if len(line.get_xdata()) > 1]
        marks = [line for line in axes.lines if len(line.get_xdata()) == 1]
        assert len(lines) == roofs
        for mark in marks:
            x, y = mark.get_xdata()[0], mark.get_ydata()[0]
            highest = max(np.interp(np.log(x), np.log(line.get_xdata()), line.get_ydata()) for line in lines)
            assert 0 < y <= highest * 1.001


def test_roofline_places_an_expert_by_hand_computed_numbers(grid):
    figure = plots.sweep_figure("roofline", grid, at={LINK: 64, DRAM: 512, ARRAYS: 64})
    params = 3 * 4096 * 14336
    marks = [(line.get_xdata()[0], line.get_ydata()[0]) for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    moved = 2 * params + 2 * 4096 * 2
    intensity = 2 * params / moved
    rate = 2 * params / (moved / (3350e9 * 0.32)) / 1e12
    assert min(abs(np.log(x / intensity)) + abs(np.log(y / rate)) for x, y in marks) < 1e-9
    copied = 2 * params / (2 * params / 64e9 + 0.25e-6 + moved / (3350e9 * 0.32)) / 1e12
    assert min(abs(np.log(x)) + abs(np.log(y / copied)) for x, y in marks) < 1e-9


def test_breakdown_stacks_to_the_mean_token(grid, figures):
    figure = figures["breakdown"]
    at = {"link": 64, "dram": 512, "arrays": 64}
    time = bars(figure, 0)
    for part, name in zip(PARTS, PART_METRICS, strict=True):
        expected = np.array([1e3 * metric_of(grid, policy, name, **at) for policy in POLICIES])
        label = PART_LOOKS[part].label
        assert (label in time) == bool(expected.any())
        if label in time:
            left, right = time[label]
            np.testing.assert_allclose(right - left, expected, rtol=1e-9, atol=1e-9)
    ends = np.max([right for _, right in time.values()], axis=0)
    np.testing.assert_allclose(ends, [1e3 * metric_of(grid, p, **at) for p in POLICIES], rtol=1e-9, atol=0)
    shares = np.max([right for _, right in bars(figure, 1).values()], axis=0)
    np.testing.assert_allclose(shares, 100.0, rtol=1e-9, atol=0)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == list(NAMES)


def test_breakdown_recomputes_what_the_sweep_does_not_hold(grid, figures):
    again = plots.sweep_figure("breakdown", grid[["tpot_mean_s"]])
    for (label, one), (other, two) in zip(bars(figures["breakdown"]).items(), bars(again).items(), strict=True):
        assert label == other
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=0)
    rows = [text.get_text() for text in figures["breakdown axis"].axes[0].get_yticklabels()]
    assert rows == ["1\xa0bit", "2\xa0bit", "4\xa0bit"]
    with pytest.raises(PerfModelError, match=r"found 4 policies along the axis.*--policy"):
        plots.sweep_figure("breakdown", grid, x=LINK)


def test_cdf_steps_over_every_token_and_marks_percentiles(grid, figures):
    figure = figures["cdf"]
    scenario = Scenario.of(policy=POLICIES, **WORKLOAD)
    settings = {LINK: 64, DRAM: 512, ARRAYS: 64}
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    for i, policy in enumerate(POLICIES):
        run_ = scenario.run(policy, settings)
        metrics = scenario.prices(policy, settings, {}, ("tpot_p50_s", "tpot_p99_s", "tpot_max_s"))
        step, median, tail = [line for line in axes.lines if line.get_linestyle() != ":" or len(line.get_xdata()) > 2][
            3 * i : 3 * i + 3
        ]
        assert step.get_ydata()[[0, -1]].tolist() == [0.0, 100.0]
        assert (np.diff(step.get_xdata()) >= 0).all()
        np.testing.assert_allclose(step.get_xdata()[-1], 1e3 * metrics["tpot_max_s"], rtol=1e-12, atol=0)
        np.testing.assert_allclose(median.get_xdata()[0], 1e3 * metrics["tpot_p50_s"], rtol=1e-12, atol=0)
        np.testing.assert_allclose(tail.get_xdata()[0], 1e3 * metrics["tpot_p99_s"], rtol=1e-12, atol=0)
        assert f"All {len(run_.contexts)} decode steps." in caption(figure)
    assert figures["cdf together"].axes[0].get_xscale() == "linear"
    slow = sweep(policy=("hobbit", POLICIES[2]), axes={LINK: [1, 2]}, **WORKLOAD)  # the medians are 400 times apart
    apart = plots.sweep_figure("cdf", slow, at={LINK: 1})
    assert [axes.get_xscale() for axes in apart.axes] == ["linear", "linear"]
    assert "Every panel has its own time axis." in caption(apart)
    assert any("P50" in text and "context-aware 3-bit" in text for text in legend(figures["cdf together"]))


def test_tornado_moves_one_axis_at_a_time(grid, figures):
    figure = figures["tornado one"]
    (axes,) = figure.axes
    scenario = Scenario.of(policy="hobbit", **WORKLOAD)
    base = float(scenario.prices("hobbit", {}, {}, ("tpot_mean_s",))["tpot_mean_s"])
    assert [text.get_text() for text in axes.get_yticklabels()] == [f"{LINK}\n16 to 256 GB/s"]
    size = 1e-3 if "(ms)" in axes.get_xlabel() else 1.0
    for label, value in (("low end of the range", 16.0), ("high end of the range", 256.0)):
        moved = float(scenario.prices("hobbit", {LINK: value}, {}, ("tpot_mean_s",))["tpot_mean_s"])
        np.testing.assert_allclose(
            sorted(np.ravel(bars(figure)[label])), sorted([base / size, moved / size]), rtol=1e-9, atol=0
        )
    assert len(figures["tornado"].axes) == 4
    with pytest.raises(PerfModelError, match="no hardware axis"):
        plots.sweep_figure("tornado", sweep(axes={"mean_bits": [1, 2]}, policy="context-aware", **WORKLOAD))


def test_a_tornado_of_its_own_is_drawn_and_nothing_else_from_it():
    found = tornado(Scenario.of(policy="monde", **WORKLOAD), [LINK, "gpu.memory_efficiency"])
    figure = plots.sweep_figure("tornado", found)
    assert figure.axes[0].get_yticklabels()[0].get_text().startswith(LINK)
    assert len(bars(figure)["low end of the range"][0]) == 2
    with pytest.raises(
        PerfModelError, match="found a 'tornado', allowed a sweep; a tornado is drawn by the kind tornado"
    ):
        plots.sweep_figure("speedup", found)
    with pytest.raises(PerfModelError, match="has no axes to hold"):
        plots.sweep_figure("tornado", found, at={LINK: 1})


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("speedupp", {}, "did you mean 'speedup'"),
        ("speedup", {"y": LINK}, "option of plot speedup: found '--y' (did you mean '--x'?), allowed --x"),
        ("speedup", {"x": "link.bandwidth"}, f"did you mean '{LINK}'"),
        ("speedup", {"x": "policy"}, "numeric axes of this sweep"),
        ("speedup", {"metric": "tpot_p99_s"}, "metrics of this sweep"),
        ("speedup", {"metric": "tpot_men_s"}, "did you mean 'tpot_mean_s'"),
        ("speedup", {"baseline": "hobit"}, "did you mean 'hobbit'"),
        ("speedup", {"baseline": "context-aware"}, "plot --baseline"),
        ("speedup", {"policy": "monde"}, "only the baseline"),
        ("speedup", {"at": {ARRAYS: 32}}, "ndp.arrays: found 32, allowed 16, 64"),
        ("speedup", {"x": LINK, "at": {LINK: 32}}, "is drawn"),
        ("speedup", {"at": "ndp.arrays=16"}, "allowed a table"),
        ("speedup", {"x": 5}, "allowed a name"),
        ("speedup", {"x": LINK, "panels": LINK}, "same dimension"),
        ("heatmap", {"x": LINK, "y": LINK}, "same dimension"),
        ("heatmap", {"policy": "nothing"}, "policies of this sweep"),
        ("pareto", {"x": "memory"}, "metrics and axes of this sweep"),
        ("pareto", {"x": LINK, "y": LINK}, "on both sides"),
        ("cdf", {"at": {"ndp.arays": 16}}, "did you mean 'ndp.arrays'"),
        ("tornado", {"metric": "ttft_s"}, "metrics of this sweep"),
        ("roofline", {"policy": "monde"}, "option of plot roofline"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_close_matches(grid, kind, options, words):
    with pytest.raises(PerfModelError) as refusal:
        plots.sweep_figure(kind, grid, **options)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_other_datasets_and_too_small_sweeps_are_refused(grid):
    for dataset in (5, xr.Dataset(), xr.Dataset({"a": ("b", [1.0])})):
        with pytest.raises(PerfModelError, match=r"^dataset"):
            plots.sweep_figure("speedup", dataset)
    one = grid.sel(policy=["monde"])
    with pytest.raises(PerfModelError, match="a gain needs two"):
        plots.sweep_figure("speedup", one)
    with pytest.raises(PerfModelError, match="no further numeric axis"):
        plots.sweep_figure("heatmap", grid.isel({DRAM: [0], ARRAYS: [0]}))
    bare = grid.copy()
    bare.attrs = {}
    assert "perfmodel" in caption(plots.sweep_figure("speedup", bare))
    with pytest.raises(PerfModelError, match="holds no scenario"):
        plots.sweep_figure("cdf", bare)
    other = grid.assign_attrs(hashes=json.dumps({**json.loads(grid.attrs["hashes"]), "trace": "0" * 64}))
    with pytest.raises(PerfModelError, match="changed since"):
        plots.sweep_figure("cdf", other)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_command_writes_every_format(tmp_path, grid, suffix):
    save(grid, tmp_path / "grid.nc")
    answer = run("plot", "speedup", tmp_path / "grid.nc", "-o", tmp_path / f"a{suffix}", "--at", f"{ARRAYS}=64")
    assert answer.code == 0, answer.err
    assert f"wrote {tmp_path / f'a{suffix}'}" in answer.err
    assert (tmp_path / f"a{suffix}").stat().st_size > 1000


def test_the_command_reads_zarr_and_names_its_output(tmp_path, grid):
    save(grid, tmp_path / "grid.zarr")
    assert run("plot", "heatmap", tmp_path / "grid.zarr", "--policy", "hobbit").code == 0
    assert (tmp_path / "grid-heatmap.svg").exists()


def test_the_command_refuses_in_one_line_and_writes_nothing(tmp_path, grid):
    source = tmp_path / "grid.nc"
    save(grid, source)
    before = sorted(tmp_path.iterdir())
    check_refusal(run("plot", "speedupp", source), "plot kind", "did you mean 'speedup'")
    check_refusal(run("plot", "speedup", tmp_path / "no.nc"), "no such dataset")
    check_refusal(run("plot", "speedup", source, "-o", tmp_path / "a.jpg"), "allowed: .png, .svg, .pdf")
    check_refusal(run("plot", "speedup", source, "--y", LINK), "option of plot speedup")
    check_refusal(run("plot", "speedup", source, "--at", "16"), "--at", "NAME=VALUE")
    check_refusal(run("plot", "speedup", source, "--at", f"{ARRAYS}=16,{ARRAYS}=64"), "given twice")
    check_refusal(run("plot", "speedup", source, "--at", f"{ARRAYS}=many"), "ndp.arrays", "many")
    check_refusal(run("plot", "speedup", source, "-o", source / "a.svg"), "is not a folder")
    assert sorted(tmp_path.iterdir()) == before


def test_help_lists_every_kind_without_loading_matplotlib():
    code = (
        "from perfmodel.cli import main; import sys\n"
        "try: main(['plot', '--help'])\n"
        "except SystemExit: print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    for name, kind in KINDS.items():
        assert name in done.stdout
        assert kind.text in done.stdout
    assert not {"matplotlib", "numpy", "xarray", "pydantic"} & set(done.stdout.split("\n")[-2].split())


def test_values_of_at_may_hold_commas():
    assert read_at(["a=1,b=x:y=2,c"]) == {"a": "1", "b": "x:y=2,c"}
    assert read_at(["a=1", "b=2"]) == {"a": "1", "b": "2"}
    assert read_at(None) is None


def test_words_for_axes_and_policies():
    assert axis_words(LINK) == "link bandwidth"
    assert axis_words("gpu.peak_tflop_per_s.fp16") == "GPU peak fp16"
    assert axis_words("policy.mean_bits") == "mean bits"
    assert axis_words("workload.output") == "output"
    assert policy_names(["monde", "context-aware:mean_bits=2.5,alpha=1", "context-aware:mean_bits=3,alpha=0"]) == [
        "MoNDE",
        "context-aware 2.5-bit: alpha=1",
        "context-aware 3-bit: alpha=0",
    ]


@given(st.floats(1e-6, 1e6), st.floats(1.5, 1e9))
def test_ticks_are_few_and_inside(low, factor):
    ticks = nice_ticks(low, low * factor)
    assert len(ticks) <= 7
    assert all(low * 0.999 <= tick <= low * factor * 1.001 for tick in ticks)
    assert ticks or factor < 11


@given(st.integers(3, 20), st.floats(1e-3, 1e3), st.floats(1.5, 3.0))
def test_spacing_decides_the_scale_of_an_axis(count, first, step):
    geometric = first * step ** np.arange(count)
    assert log_spaced(geometric) == (geometric[-1] >= 4 * geometric[0])
    assert not log_spaced(first + step * np.arange(count))
    assert not log_spaced(np.array([0.0, *geometric]))


def known_sweep(**values: Any) -> xr.Dataset:
    """Two policies over axes given by their names here; HOBBIT takes the given times, MoNDE one second."""
    keys = {"link": LINK, "dram": DRAM, "arrays": ARRAYS}
    axes = {keys[name]: np.asarray(one) for name, one in values.items() if name in keys}
    times = np.asarray(values["times"], dtype=np.float64)
    both = np.stack([np.ones_like(times), times])
    return xr.Dataset({"tpot_mean_s": (("policy", *axes), both)}, {"policy": ["monde", "hobbit"], **axes})


@pytest.mark.parametrize("digits", ["{!r}", "{:.4g}", "{:.6g}", "{:.5f}"])
def test_values_can_be_typed_as_they_are_printed(digits):
    link = np.geomspace(16, 450, 40)
    known = known_sweep(link=link, arrays=[1, 2], times=np.outer(link, [1.0, 2.0]))
    for i, value in enumerate(link.tolist()):
        figure = plots.sweep_figure("speedup", known, x=ARRAYS, at={LINK: digits.format(value)})
        np.testing.assert_allclose(drawn(figure)["HOBBIT"].get_ydata()[0], 1 / link[i], rtol=1e-12, atol=0)
        assert f"Held at: link bandwidth {value:.4g}" in caption(figure)


def test_other_values_are_refused_with_the_nearest():
    link = np.geomspace(16, 450, 40)
    known = known_sweep(link=link, arrays=[1, 2], times=np.outer(link, [1.0, 2.0]))
    nearest = np.sort(link[np.argsort(np.abs(link - 100))[:3]])
    words = "found '100', allowed 40 values from 16 to 450, the nearest " + ", ".join(f"{one:.9g}" for one in nearest)
    with pytest.raises(PerfModelError) as refusal:
        plots.sweep_figure("speedup", known, x=ARRAYS, at={LINK: "100"})
    assert words in str(refusal.value)
    dense = 100 * (1 + 1e-4 * np.arange(20))
    known = known_sweep(link=dense, arrays=[1, 2], times=np.outer(dense, [1.0, 2.0]))
    with pytest.raises(PerfModelError, match=r"may be 100\.04 and 100\.05; give more digits"):
        plots.sweep_figure("speedup", known, x=ARRAYS, at={LINK: "100.045"})
    assert "Held at" in caption(plots.sweep_figure("speedup", known, x=ARRAYS, at={LINK: "100.05"}))


def test_axes_that_are_not_drawn_are_held_near_the_scenario(grid):
    # The bundled system has a link of 59.29 GB/s, 512 GB/s near data and 64 arrays.
    figure = plots.sweep_figure("breakdown", grid)
    assert "nearest the system's own: link bandwidth 64 GB/s (own: 59.29 GB/s), NDP DRAM" in caption(figure)
    bare = grid.copy()
    bare.attrs = {}
    assert "middle value of the sweep: NDP DRAM bandwidth 256 GB/s, NDP arrays 16." in caption(
        plots.sweep_figure("speedup", bare)
    )
    options = sweep(policy="context-aware", axes={"mean_bits": [1, 3, 4], "output": [4, 9, 200]}, prompt=8)
    words = caption(plots.sweep_figure("breakdown", options))
    assert "nearest the policy's own: mean bits 3." in words
    assert "nearest the workload's own: output 200\xa0tokens (own: 224".replace("\xa0", " ") in words


def test_samples_say_which_kinds_draw_them():
    samples = sweep(
        axes={LINK: "16:450:log", DRAM: "128:1024"}, sample="lhs:30", policy=("monde", "hobbit"), **WORKLOAD
    )
    for kind in ("speedup", "heatmap"):
        with pytest.raises(PerfModelError) as refusal:
            plots.sweep_figure(kind, samples)
        words = "kinds pareto, tornado, breakdown, cdf and roofline"
        assert f"found {LINK}, {DRAM} of a sample" in str(refusal.value)
        assert words in str(refusal.value)
    for kind in ("pareto", "tornado", "breakdown", "cdf", "roofline"):
        assert plots.sweep_figure(kind, samples).axes
    words = caption(plots.sweep_figure("tornado", samples))
    assert "sample" not in words
    assert "The line: system, policies and workload as they stand." in words
    link, dram = samples[LINK].values, samples[DRAM].values
    away = (np.log(link / 59.29) / np.ptp(np.log(link))) ** 2 + (np.log(dram / 512) / np.ptp(np.log(dram))) ** 2
    assert f"point nearest the system's own: sample {away.argmin()}," in caption(plots.sweep_figure("cdf", samples))


def test_every_line_of_equal_value_carries_it(figures):
    panels = [axes for name, figure in figures.items() if name.startswith("heatmap") for axes in figure.axes[:-1]]
    assert sum(len(isolines(axes)) for axes in panels) > 20
    for axes in panels:
        lines = isolines(axes)
        assert len(lines) == len(axes.texts)
        diagonal = np.hypot(*axes.get_window_extent().size)
        for line in lines:
            pixels = axes.transData.transform(line.get_xydata())
            steps = np.linspace(0, len(pixels) - 1, 5000)
            pixels = np.column_stack([np.interp(steps, np.arange(len(pixels)), one) for one in pixels.T])
            assert np.hypot(*np.diff(pixels, axis=0).T).sum() > 0.05 * diagonal
            near = [
                text
                for text in axes.texts
                if np.hypot(*(pixels - axes.transData.transform(text.get_position())).T).min() < 3
            ]
            assert near
        for one, other in itertools.combinations(axes.texts, 2):
            assert not one.get_window_extent().overlaps(other.get_window_extent())


def test_crumbs_of_lines_in_corners_are_not_drawn():
    x = np.geomspace(1, 100, 40)
    times = 1 / np.multiply.outer(x, x) ** 0.5  # gains from 1 to 100; the line of 80 would be a crumb
    times[:2, :2] = 1 / 60
    known = known_sweep(link=x, dram=x, times=times)
    figure = plots.sweep_figure("heatmap", known)
    lines = isolines(figure.axes[0])
    assert [text.get_text() for text in figure.axes[0].texts]
    assert len(lines) == len(figure.axes[0].texts)
    corner = [line for line in lines if (line.get_xydata().max(axis=0) < x[3]).all()]
    assert not corner


def test_every_panel_names_its_axes():
    times = np.multiply.outer(np.array([1.0, 2.0, 3.0]), np.arange(1.0, 7.0))
    for count in range(1, 7):
        known = known_sweep(link=[16, 32, 64], arrays=np.arange(count) + 1, times=times[:, :count])
        figure = plots.sweep_figure("speedup", known, x=LINK, panels=ARRAYS)
        shown = [axes for axes in figure.axes if axes.get_visible()]
        assert len(shown) == count
        assert all(axes.get_xlabel() for axes in shown)


def test_every_mark_of_a_roofline_has_its_own_number(figures):
    for name in ("roofline", "roofline of long names"):
        figure = figures[name]
        numbers = []
        for axes in figure.axes:
            texts = [text for text in axes.texts if text.get_text()]
            marks = [line for line in axes.lines if len(line.get_xdata()) == 1]
            roofs = [line for line in axes.lines if len(line.get_xdata()) > 1]
            assert len(texts) == len(marks)
            numbers += [int(text.get_text()) for text in texts]
            panel, dot = axes.get_window_extent(), figure.dpi / 72
            boxes = [Text.get_window_extent(text) for text in texts]
            for box, text in zip(boxes, texts, strict=True):
                assert panel.x0 <= box.x0 <= box.x1 <= panel.x1
                assert panel.y0 <= box.y0 <= box.y1 <= panel.y1
                assert not any(box is not other and box.overlaps(other) for other in boxes)
                assert np.hypot(*(axes.transData.transform(text.xy) - (box.p0 + box.p1) / 2)) < 40 * dot
                for roof in roofs:
                    x = np.geomspace(*axes.get_xlim(), 2000)
                    y = np.exp(np.interp(np.log(x), np.log(roof.get_xdata()), np.log(roof.get_ydata())))
                    path = axes.transData.transform(np.column_stack([x, y]))
                    inside = box.shrunk(0.9, 0.6)
                    assert not ((path > inside.p0) & (path < inside.p1)).all(axis=1).any(), (name, text.get_text())
        assert numbers == list(range(1, len(numbers) + 1))
        key = caption(figure)
        assert all(re.search(rf"[:,] {number} [a-zL]", key) for number in numbers)


def test_a_tornado_has_one_unit(figures):
    names = {label for label, _ in labels(figures["tornado of long names"])}
    assert names == {"mean time per output token (ms)"}
    keys = {text.get_text().split("\n")[0] for text in figures["tornado"].axes[0].get_yticklabels()}
    assert keys <= {LINK, DRAM, ARRAYS}


def test_numbers_that_a_reader_computed_can_be_drawn(grid):
    squared = grid["tpot_mean_s"] ** 2
    # Some versions of xarray hand the words of the time on to its square, which would be wrong.
    known = grid.assign(
        edp=squared.assign_attrs(grid["tpot_mean_s"].attrs), label=(("policy",), np.array(list("abcd")))
    )
    figure = plots.sweep_figure("speedup", known, metric="edp", x=LINK)
    expected = (metric_of(grid, "monde", dram=512, arrays=64) / metric_of(grid, "hobbit", dram=512, arrays=64)) ** 2
    np.testing.assert_allclose(drawn(figure)["HOBBIT"].get_ydata(), expected, rtol=1e-12, atol=0)
    assert "Gain: edp of the baseline (MoNDE) over that of the policy." in caption(figure)
    assert labels(plots.sweep_figure("heatmap", known, metric="edp", policy="monde"))[-1][1] == "edp (log)"
    with pytest.raises(PerfModelError, match=r"did you mean 'edp'.*tpot_mean_s, .* and 1 more") as refusal:
        plots.sweep_figure("speedup", known, metric="ed")
    assert "label" not in str(refusal.value)
    with pytest.raises(PerfModelError, match="metrics of this sweep that perfmodel computes"):
        plots.sweep_figure("tornado", known, metric="edp")


def test_captions_say_what_was_cycled():
    longer = sweep(axes={LINK: [16, 64]}, policy=("monde", "hobbit"), model="mixtral-8x22b", layers="cycle", prompt=8)
    words = caption(plots.sweep_figure("speedup", longer))
    assert "Workload: prompt 8 tokens; output as recorded: mean 224 tokens." in words
    assert "Model layers 0-55 replay recorded layers 0-31 cycled." in words
    assert "Prompts set to 8 tokens" in words


def test_sobol_bars_are_the_shares(figures):
    found = shares()
    for panel, policy in enumerate(("monde", "hobbit")):
        rows = [text.get_text().split("\n")[0] for text in figures["sobol"].axes[0].get_yticklabels()]
        containers = [one for one in figures["sobol"].axes[panel].containers if isinstance(one, BarContainer)]
        for name, container in zip(("first", "total"), containers, strict=True):
            expected = 100 * found[name].sel(policy=policy, key=rows).values
            np.testing.assert_allclose([patch.get_width() for patch in container], expected, rtol=1e-12, atol=0)
            (segments,) = container.errorbar.lines[2]
            ends = np.array([path.vertices[:, 0] for path in segments.get_paths()])
            for i, end in enumerate(("low", "high")):
                limit = 100 * found[f"{name}_{end}"].sel(policy=policy, key=rows).values
                np.testing.assert_allclose(ends[:, i], limit, rtol=1e-9, atol=1e-9)
    assert legend(figures["sobol"]) == ["alone (first order)", "with interactions (total)"]


def test_a_break_even_line_is_drawn_over_the_further_axis(figures):
    (drawn_line,) = figures["break-even"].axes[0].lines
    np.testing.assert_array_equal(drawn_line.get_xdata(), [32, 64, 128])
    np.testing.assert_array_equal(drawn_line.get_ydata(), line()["break_even"].values[:, 0])
    assert " ".join(legend(figures["break-even"])[0].split()) == "HOBBIT better below, context-aware 3-bit better above"
    scenario = Scenario.of(policy=("context-aware:mean_bits=3", "hobbit"), **WORKLOAD)
    with pytest.raises(PerfModelError, match=r"found a single search.*--along"):
        plots.sweep_figure("break-even", break_even(scenario, (DRAM, 1, 1000)))
    with pytest.raises(PerfModelError, match="does not change anywhere; it is"):
        plots.sweep_figure("break-even", break_even(scenario, (DRAM, 500, 1000), along=(LINK, [32, 64])))


def test_messages_spell_options_as_on_the_command_line(grid):
    many = [f"context-aware:alpha={one / 100}" for one in range(10)]
    with pytest.raises(PerfModelError, match="choose with --policy"):
        plots.sweep_figure("cdf", sweep(policy=many, axes={LINK: [16, 32]}, **WORKLOAD))
    with pytest.raises(PerfModelError, match="choose with --policy"):
        plots.sweep_figure("breakdown", grid, x=LINK)
    with pytest.raises(PerfModelError, match="choose with --policy"):
        plots.sweep_figure("heatmap", sweep(policy=many[:6], axes={LINK: [16, 32], DRAM: [128, 256]}, **WORKLOAD))
    folder = Path(plots.__file__).parent
    for path in [*folder.rglob("*.py")]:
        assert not re.search(r"choose with [a-z]|of the plot: ", path.read_text(encoding="utf-8")), path.name


def test_the_figure_of_the_readme_is_what_its_commands_draw(tmp_path, monkeypatch):
    root = Path(__file__).parent.parent
    text = (root / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    one, two = (
        next(found for found in re.findall(rf"^perfmodel ({command} .*)$", text, re.MULTILINE) if "map.nc" in found)
        for command in ("sweep", "plot")
    )
    monkeypatch.chdir(tmp_path)
    assert run(*shlex.split(one)).code == 0
    assert run(*shlex.split(two.replace(".svg", ".png"))).code == 0
    now, kept = (imread(path) for path in (tmp_path / "break-even.png", root / "docs" / "break-even.png"))
    assert now.shape == kept.shape, "draw docs/break-even.png again with the commands of the README"
    # Not bit by bit: the version in the caption and the renderer may differ.
    assert np.abs(now - kept).mean() < 0.01, "draw docs/break-even.png again with the commands of the README"
