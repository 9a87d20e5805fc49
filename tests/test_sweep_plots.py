"""Figures of sweeps show the numbers of the sweep, say what is held fixed, and refuse what cannot be drawn."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Mapping
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
from matplotlib.text import Text

from perfmodel import __version__, plots
from perfmodel.answers import tornado
from perfmodel.cli.plot import read_at
from perfmodel.errors import PerfModelError
from perfmodel.evaluation import PARTS
from perfmodel.plots.style import PART_LOOKS
from perfmodel.plots.sweep.kinds import KINDS
from perfmodel.plots.sweep.labels import axis_words, nice_ticks
from perfmodel.plots.sweep.selection import log_spaced
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
    return [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes if axes.get_visible()]


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


def metric_of(dataset: xr.Dataset, policy: str, name: str = "tpot_mean_s", **at: float) -> Any:
    keys = {"link": LINK, "dram": DRAM, "arrays": ARRAYS}
    return dataset[name].sel({"policy": policy, **{keys[key]: value for key, value in at.items()}}).values


def every_figure(grid: xr.Dataset, plans: xr.Dataset) -> dict[str, Figure]:
    figure = plots.sweep_figure
    return {
        "speedup": figure("speedup", grid),
        "speedup panels": figure("speedup", grid, panels=ARRAYS, x=LINK),
        "heatmap": figure("heatmap", grid),
        "heatmap metric": figure("heatmap", grid, policy="hobbit"),
        "pareto": figure("pareto", grid),
        "pareto plans": figure("pareto", plans, policy="context-aware"),
        "roofline": figure("roofline", grid, at={LINK: 64}),
        "breakdown": figure("breakdown", grid),
        "breakdown axis": figure("breakdown", plans, x="mean_bits", policy="context-aware"),
        "cdf": figure("cdf", grid),
        "cdf together": figure("cdf", grid, policy=list(POLICIES[2:])),
        "tornado": figure("tornado", grid),
        "tornado one": figure("tornado", grid, policy="hobbit"),
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
        assert "prompt 8, output 8" in words
        assert "Weakest source among the hardware constants: assumed." in words
        assert words.endswith(f"perfmodel {__version__}.")
        assert round(figure.get_figwidth(), 2) in {3.4, 7.0}
        assert all(text.get_fontsize() >= 7 for text in figure.findobj(Text) if text.get_text())


def test_every_axis_is_named_and_has_its_unit(figures):
    units = r"\((×|ms|s|GB|GB/s|TFLOP/s|FLOP/byte|%)(, log)?\)$"
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
    at = {"dram": 128, "arrays": 16}
    for policy, name in zip(POLICIES[1:], NAMES[1:], strict=True):
        expected = metric_of(grid, "monde", **at) / metric_of(grid, policy, **at)
        np.testing.assert_allclose(lines[name].get_ydata(), expected, rtol=1e-12, atol=0)
        np.testing.assert_array_equal(lines[name].get_xdata(), grid[LINK].values)
    assert len({lines[name].get_marker() for name in NAMES[1:]}) == 3
    assert len({str(lines[name].get_linestyle()) for name in NAMES[1:]}) == 3
    assert "held at the first value of the sweep: NDP DRAM bandwidth 128 GB/s, NDP arrays 16." in caption(figure)
    assert "MoNDE over ours" in caption(figure)


def test_speedup_of_a_rate_turns_the_ratio_around(grid):
    options: Mapping[str, Any] = {"metric": "decode_tok_per_s", "baseline": "hobbit", "at": {ARRAYS: 64, DRAM: 512}}
    figure = plots.sweep_figure("speedup", grid, x=LINK, policy="monde", **options)
    line = drawn(figure)["MoNDE"]
    at = {"dram": 512, "arrays": 64}
    rate = {policy: metric_of(grid, policy, "decode_tok_per_s", **at) for policy in ("monde", "hobbit")}
    np.testing.assert_allclose(line.get_ydata(), rate["monde"] / rate["hobbit"], rtol=1e-12, atol=0)
    assert "Held at: NDP DRAM bandwidth 512 GB/s, NDP arrays 64." in caption(figure)
    assert "first value" not in caption(figure)
    memory = plots.sweep_figure("speedup", grid, metric="gpu_memory_bytes")
    assert labels(memory)[0][1].startswith("gain over MoNDE")


def test_speedup_has_one_panel_a_value(grid, figures):
    figure = figures["speedup panels"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["NDP arrays 16", "NDP arrays 64"]
    for panel, arrays in enumerate((16, 64)):
        expected = metric_of(grid, "monde", dram=128, arrays=arrays) / metric_of(
            grid, "hobbit", dram=128, arrays=arrays
        )
        np.testing.assert_allclose(drawn(figure, panel)["HOBBIT"].get_ydata(), expected, rtol=1e-12, atol=0)


def test_speedup_by_default_is_over_the_published_baselines(plans):
    assert "MoNDE (baseline)" in legend(plots.sweep_figure("speedup", plans, x="mean_bits"))
    without = plans.sel(policy=["context-aware", "hobbit"])
    assert "HOBBIT (baseline)" in legend(plots.sweep_figure("speedup", without, x="mean_bits"))


def test_speedup_has_gaps_where_there_is_no_plan(grid):
    broken = grid.copy(deep=True)
    broken["tpot_mean_s"][1, 2] = np.nan
    figure = plots.sweep_figure("speedup", broken, x=LINK)
    assert np.isnan(drawn(figure)["HOBBIT"].get_ydata()).tolist() == [False, False, True, False, False]
    assert "gaps where a plan is not feasible" in caption(figure)
    with pytest.raises(PerfModelError, match="no point has tpot_mean_s"):
        plots.sweep_figure("speedup", broken * np.nan, x=LINK)


def test_heatmap_colours_are_the_gains_and_break_even_is_marked(grid, figures):
    figure = figures["heatmap"]
    *panels, bar = figure.axes
    assert [axes.get_title(loc="left") for axes in panels] == list(NAMES[1:])
    assert bar.get_ylabel() == "speed-up over MoNDE (×, log)"
    assert labels(figure)[0] == ("link bandwidth (GB/s, log)", "NDP DRAM bandwidth (GB/s, log)")
    for axes, policy in zip(panels, POLICIES[1:], strict=True):
        (mesh,) = (one for one in axes.collections if isinstance(one, QuadMesh))
        expected = (metric_of(grid, "monde", arrays=16) / metric_of(grid, policy, arrays=16)).T
        np.testing.assert_allclose(np.asarray(mesh.get_array()), expected, rtol=1e-12, atol=0)
    ratio = metric_of(grid, "monde", arrays=16) / metric_of(grid, "hobbit", arrays=16)
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
    lines = [one for one in figure.axes[0].collections if not isinstance(one, QuadMesh)]
    even = next(one for one in lines if one.get_linewidths()[0] == 2.0)
    (x, y) = np.concatenate([path.vertices for path in even.get_paths()]).T
    np.testing.assert_allclose(x * y, 16.0, rtol=2e-2, atol=0)
    assert x.min() < 1.0 * 1.01
    assert x.max() > 16.0


def test_heatmap_of_one_policy_shows_the_metric(grid, figures):
    figure = figures["heatmap metric"]
    axes, bar = figure.axes
    assert bar.get_ylabel() == "mean time per output token (s, log)"
    (mesh,) = (one for one in axes.collections if isinstance(one, QuadMesh))
    expected = metric_of(grid, "hobbit", arrays=16).T
    np.testing.assert_allclose(np.asarray(mesh.get_array()), expected, rtol=1e-12, atol=0)
    assert not figure.legends
    gains = plots.sweep_figure("heatmap", grid, policy="hobbit", baseline="monde", x=DRAM, y=LINK)
    assert gains.axes[0].get_xlabel().startswith("NDP DRAM bandwidth")


def test_pareto_front_is_what_no_point_beats(plans, figures):
    figure = figures["pareto plans"]
    values = {name: plans[name].sel(policy="context-aware").values.reshape(-1) for name in plans.data_vars}
    x, y = values["gpu_memory_bytes"] / 1e9, values["tpot_mean_s"] * 1e3
    beaten = [
        any((x[j] <= x[i]) and (y[j] <= y[i]) and (x[j] < x[i] or y[j] < y[i]) for j in range(len(x)))
        for i in range(len(x))
    ]
    expected = sorted({(a, b) for a, b, worse in zip(x, y, beaten, strict=True) if not worse})
    front = drawn(figure)["front"]
    np.testing.assert_allclose(front.get_xydata(), expected, rtol=1e-12, atol=0)
    assert front.get_drawstyle() == "steps-post"
    assert labels(figure)[0][0].startswith("GPU memory in use (GB")
    assert labels(figure)[0][1].startswith("mean time per output token (ms")
    assert f"{len(expected)} of {len(x)} points are on the front" in caption(figure)
    assert legend(figure) == ["context-aware", "front"]
    assert "(a)" in caption(figure)


def test_pareto_takes_axes_samples_and_tables(grid):
    cheap = plots.sweep_figure("pareto", grid, x="arrays", at={LINK: 64})
    assert cheap.axes[0].get_xlabel() == "NDP arrays"
    assert "Only points at: link bandwidth 64 GB/s." in caption(cheap)
    drawn_points = sum(len(line.get_xdata()) for line in cheap.axes[0].lines if line.get_alpha() is not None)
    assert drawn_points == 4 * 4 * 2
    samples = sweep(axes={LINK: "16:64", DRAM: "128:512"}, sample="lhs:5", policy="monde", **WORKLOAD)
    figure = plots.sweep_figure("pareto", samples)
    assert legend(figure) == ["MoNDE", "front"]
    table = {"policy": ["monde", "hobbit", "hobbit"], LINK: [16, 32, 64]}
    cases = sweep(cases=table, metrics=("tpot_mean_s", "gpu_memory_bytes"), **WORKLOAD)
    figure = plots.sweep_figure("pareto", cases)
    assert "of 3 points are on the front" in caption(figure)
    with pytest.raises(PerfModelError, match=r"case table.*pareto and tornado"):
        plots.sweep_figure("speedup", cases, x=LINK)


def test_roofline_marks_lie_below_their_roofs(figures):
    figure = figures["roofline"]
    assert legend(figure) == ["decode", "prefill", "GPU memory 1072 GB/s", "link 64.0 GB/s", "NDP memory 51.8 GB/s"]
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
    words = {text.get_text() for text in figure.findobj(Text)}
    named = {name for text in words for name in text.split("\n")}
    assert {"attention", "router", "LM head", "expert 16-bit", "expert 16-bit, copied", "expert 2-bit"} <= named
    assert {"693 TFLOP/s", "2.73 TFLOP/s\xa0at 3 bit"} <= words


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
    at = {"link": 16, "dram": 128, "arrays": 16}
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
    with pytest.raises(PerfModelError, match="found 4 along the axis"):
        plots.sweep_figure("breakdown", grid, x=LINK)


def test_cdf_steps_over_every_token_and_marks_percentiles(grid, figures):
    figure = figures["cdf"]
    scenario = Scenario.of(policy=POLICIES, **WORKLOAD)
    settings = {LINK: 16, DRAM: 128, ARRAYS: 16}
    for panel, policy in enumerate(POLICIES):
        run_ = scenario.run(policy, settings)
        metrics = scenario.prices(policy, settings, {}, ("tpot_p50_s", "tpot_p99_s", "tpot_max_s"))
        step, median, tail = figure.axes[panel].lines[:3]
        assert step.get_ydata()[[0, -1]].tolist() == [0.0, 100.0]
        assert (np.diff(step.get_xdata()) >= 0).all()
        np.testing.assert_allclose(step.get_xdata()[-1], 1e3 * metrics["tpot_max_s"], rtol=1e-12, atol=0)
        np.testing.assert_allclose(median.get_xdata()[0], 1e3 * metrics["tpot_p50_s"], rtol=1e-12, atol=0)
        np.testing.assert_allclose(tail.get_xdata()[0], 1e3 * metrics["tpot_p99_s"], rtol=1e-12, atol=0)
        assert f"All {len(run_.contexts)} decode steps." in caption(figure)
    assert "own time axis" in caption(figure)
    assert len(figures["cdf together"].axes) == 1
    assert any("P50" in text and "context-aware 3-bit" in text for text in legend(figures["cdf together"]))


def test_tornado_moves_one_axis_at_a_time(grid, figures):
    figure = figures["tornado one"]
    (axes,) = figure.axes
    scenario = Scenario.of(policy="hobbit", **WORKLOAD)
    base = float(scenario.prices("hobbit", {}, {}, ("tpot_mean_s",))["tpot_mean_s"])
    assert [text.get_text() for text in axes.get_yticklabels()] == ["link bandwidth\n16 to 256 GB/s"]
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
    assert figure.axes[0].get_yticklabels()[0].get_text().startswith("link bandwidth")
    assert len(bars(figure)["low end of the range"][0]) == 2
    with pytest.raises(PerfModelError, match="found the answer 'tornado'"):
        plots.sweep_figure("speedup", found)
    with pytest.raises(PerfModelError, match="has no axes to hold"):
        plots.sweep_figure("tornado", found, at={LINK: 1})


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("speedupp", {}, "did you mean 'speedup'"),
        ("speedup", {"y": LINK}, "option of a speedup plot: found 'y'"),
        ("speedup", {"x": "link.bandwidth"}, f"did you mean '{LINK}'"),
        ("speedup", {"x": "policy"}, "numeric axes of this sweep"),
        ("speedup", {"metric": "tpot_p99_s"}, "metrics of this sweep"),
        ("speedup", {"metric": "tpot_men_s"}, "did you mean 'tpot_mean_s'"),
        ("speedup", {"baseline": "hobit"}, "did you mean 'hobbit'"),
        ("speedup", {"baseline": "context-aware"}, "baseline of the plot"),
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
        ("roofline", {"policy": "monde"}, "option of a roofline plot"),
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
    check_refusal(run("plot", "speedup", source, "--y", LINK), "option of a speedup plot")
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
