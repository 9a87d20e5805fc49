"""Figures show the numbers they were given, say where these come from, and are written whole."""

import dataclasses
import hashlib
import itertools
import re
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.container import BarContainer
from matplotlib.text import Text

from perfmodel import __version__, plots
from perfmodel.errors import PerfModelError
from perfmodel.evidence.bench import MODELS
from perfmodel.evidence.explore import synthetic_trace
from perfmodel.evidence.reproduce import COLUMNS, reproduce
from perfmodel.plots.reproduction import HIT_RATES
from perfmodel.plots.style import COLUMN_LOOKS, PART_LOOKS
from perfmodel.plots.words import number
from perfmodel.run import PARTS

CAPACITY = 80e9


@pytest.fixture(scope="module")
def result():
    """The real thing, explored, on the bundled recording."""
    return reproduce()


@pytest.fixture(scope="module")
def figures(result):
    return plots.reproduction_figures(result)


@pytest.fixture(scope="module")
def evaluations(result):
    """MoNDE first, on the larger model."""
    priced = result.evaluations["calibrated"]
    return [priced["mixtral-8x22b", name] for name in ("MoNDE", "HOBBIT", "context-aware 3-bit", "context-aware 2-bit")]


def bars(axes):
    """Bar series by label, as (start, end) along the value axis."""
    found = {}
    for container in axes.containers:
        if isinstance(container, BarContainer):
            across = container.orientation == "horizontal"
            starts = [p.get_x() if across else p.get_y() for p in container]
            lengths = [p.get_width() if across else p.get_height() for p in container]
            found[container.get_label()] = (np.array(starts), np.array(starts) + np.array(lengths))
    return found


def texts(figure):
    return [t.get_text() for t in figure.findobj(Text) if t.get_text() and t.get_visible()]


def caption(figure):
    return " ".join(figure.get_supxlabel().split())


def legend(figure):
    return [t.get_text() for one in figure.legends for t in one.get_texts()]


def test_all_figures_are_there_and_say_where_they_come_from(result, figures):
    assert list(figures) == ["speedups", "throughput", "breakdown", "hit_rate", "quality", "error_by_reading"]
    for figure in figures.values():
        words = caption(figure)
        assert "tiny-mixtral-32l (recorded)" in words
        assert words.endswith(f"perfmodel {__version__}.")
        assert round(figure.get_figwidth(), 2) in {3.4, 7.0}
        assert all(t.get_fontsize() >= 7 for t in figure.findobj(Text) if t.get_text())
    for name in ("speedups", "throughput", "breakdown", "error_by_reading"):
        assert "h100-cxl2-ndp" in caption(figures[name])
        for fitted in result.fitted():
            assert fitted["name"] in caption(figures[name])
        assert "fitted to 7 published figures" in caption(figures[name])
    assert "Datasheet: h100-cxl-ndp at its peaks" in caption(figures["speedups"])


def test_every_axis_has_a_unit(figures, evaluations):
    shown = {**figures, "comparison": plots.comparison_figure(evaluations)}
    value_axis = {"speedups": "y"}
    for name, figure in shown.items():
        labels = [getattr(a, f"get_{value_axis.get(name, 'x')}label")() for a in figure.axes]
        labels = [label for label in labels if label]
        assert labels, name
        assert all(re.search(r"\((×, log|%, log|tok/s|ms|s|GB|%)\)", label) for label in labels), labels


def test_nothing_reaches_over_the_edge_and_no_labels_overlap(figures, evaluations):
    wide = [*evaluations, dataclasses.replace(evaluations[2], policy=f"context-aware:{'long_option=1,' * 12}")]
    for figure in [*figures.values(), plots.comparison_figure(wide, gpu_capacity_bytes={"h100-cxl2-ndp": CAPACITY})]:
        figure.draw_without_rendering()
        boxes = [
            (t.get_text(), t.get_window_extent())
            for t in figure.findobj(Text)
            if t.get_text().strip() and t.get_visible() and t.figure is not None
        ]
        width, height = figure.bbox.size
        placed = []
        for text, box in boxes:
            # Ticks outside the limits are kept by matplotlib but not drawn.
            if 0 <= (box.x0 + box.x1) / 2 <= width and 0 <= (box.y0 + box.y1) / 2 <= height:
                assert box.x0 >= -1, text
                assert box.x1 <= width + 1, text
                assert box.y0 >= -1, text
                assert box.y1 <= height + 1, text
            placed.append((text, box))
        captioned = [box for text, box in placed if "perfmodel" in text]
        others = [(text, box) for text, box in placed if "perfmodel" not in text]
        assert all(not box.overlaps(captioned[0]) for _, box in others)
        for axes in figure.axes:
            rows = [t.get_window_extent() for t in axes.get_yticklabels() if t.get_text() and t.get_visible()]
            rows.sort(key=lambda box: box.y0)
            assert all(low.y1 <= high.y0 + 1 for low, high in itertools.pairwise(rows))
            values = [(t.get_text(), t.get_window_extent().shrunk(0.95, 0.95)) for t in axes.texts]
            for (one, box), (other, beside) in itertools.combinations(values, 2):
                assert not box.overlaps(beside), (one, other)


def test_speedups_show_every_column_of_every_published_gain(result, figures):
    figure = figures["speedups"]
    assert figure.axes[0].get_yscale() == "log"
    for axes, model in zip(figure.axes, MODELS, strict=True):
        rows = [r for r in result.rows if r.figure.model == model and r.figure.baseline]
        series = bars(axes)
        assert len(series) == len(COLUMNS)
        assert tuple(COLUMN_LOOKS) == COLUMNS
        for column, label in zip(COLUMNS, ("datasheet peaks", "evidence, nothing fitted", "calibrated"), strict=True):
            start, end = series[label]
            np.testing.assert_allclose(sorted(end), sorted(r.columns[column].high for r in rows), rtol=1e-12, atol=0)
            lows = sorted(r.columns[column].low for r in rows if r.figure.kind == "range")
            np.testing.assert_allclose(sorted(start)[-len(lows) :], lows, rtol=1e-12, atol=0)
            assert sorted(start)[: -len(lows)] == [1.0] * (len(rows) - len(lows))
        low, high = axes.get_ylim()
        assert low <= 1 < max(r.columns["datasheet"].high for r in rows) < high
        points = [line for line in axes.lines if line.get_label() == "published"]
        assert sorted(points[0].get_ydata()) == sorted(r.figure.value[0] for r in rows if r.figure.kind == "gain")
        ticks = [t.get_text() for t in axes.get_xticklabels()]
        assert sum(t.endswith("*") for t in ticks) == sum(r.figure.fit for r in rows)
    assert {"published", "published range", "datasheet peaks", "evidence, nothing fitted", "calibrated"} == set(
        legend(figure)
    )


def test_throughput_puts_published_rates_beside_the_computed_ones(result, figures):
    figure = figures["throughput"]
    for axes, model in zip(figure.axes, MODELS, strict=True):
        for column, label in (("evidence", "evidence, nothing fitted"), ("calibrated", "calibrated")):
            rates = [e.decode_tok_per_s for (m, _), e in result.evaluations[column].items() if m == model]
            np.testing.assert_allclose(bars(axes)[label][1], rates, rtol=1e-12, atol=0)
    first, second = figure.axes
    assert not first.lines
    assert "no rate published" in first.get_title(loc="left")
    names = [t.get_text() for t in first.get_yticklabels()]
    marks = second.lines[0]
    found = {names[round(y)]: x for x, y in zip(marks.get_xdata(), marks.get_ydata(), strict=True)}
    assert found == {"MoNDE": 1.714, "context-aware 3-bit": 15.321, "context-aware 2-bit": 19.795}


def test_breakdown_stacks_to_the_time_of_a_token(result, figures):
    assert tuple(PART_LOOKS) == PARTS
    figure = figures["breakdown"]
    for i, axes in enumerate(figure.axes):
        names = [t.get_text() for t in axes.get_yticklabels()]
        chosen = [result.evaluations["calibrated"][MODELS[i // 2], name] for name in names]
        series = bars(axes)
        for part in PARTS:
            expected = np.array([1e3 * e.breakdown_s[part] for e in chosen])
            label = PART_LOOKS[part].label
            assert (label in series) == bool(expected.any())
            if label in series:
                start, end = series[label]
                np.testing.assert_allclose(end - start, expected, rtol=1e-9, atol=1e-12)
        ends = np.max([end for _, end in series.values()], axis=0)
        np.testing.assert_allclose(ends, [1e3 * e.tpot_mean_s for e in chosen], rtol=1e-9, atol=0)
    assert "Too small to see: router" in caption(figure)


def test_hit_rate_stands_beside_its_controls(result, figures):
    (axes,) = figures["hit_rate"].axes
    series = bars(axes)
    assert list(series) == ["Mixtral 8x7B", "Mixtral 8x22B"]
    for model, (_, end) in zip(MODELS, series.values(), strict=True):
        rates = result.hit_rates[model]
        expected = [getattr(rates, name) for name in HIT_RATES]
        assert sorted(expected) == sorted(rates)
        np.testing.assert_allclose(end, 100 * np.array(expected), rtol=1e-12, atol=0)


def test_quality_stands_beside_published_accuracies(result, figures):
    computed, published = figures["quality"].axes
    rows = result.quality.rows
    ((_, end),) = bars(computed).values()
    np.testing.assert_allclose(end, [100 * row.quant_noise for row in rows], rtol=1e-12, atol=0)
    (line,) = published.lines
    assert line.get_label() == "published (from a summary)"
    assert list(line.get_xdata()) == [row.published_accuracy_percent for row in rows]
    assert "context" in published.get_xlabel()
    assert result.quality.sentence in caption(figures["quality"])


def test_error_by_reading_has_a_row_for_everything_tried(result, figures):
    (axes,) = figures["error_by_reading"].axes
    outcomes = (*result.readings, *result.traces, *result.machines)
    assert len(axes.get_yticklabels()) == len(outcomes)
    lines = {line.get_label(): line for line in axes.lines}
    for label, key in (("evidence alone", "evidence_geomean_error"), ("refitted", "geomean_error")):
        expected = sorted(100 * getattr(o, key) for o in outcomes)
        np.testing.assert_allclose(sorted(lines[label].get_xdata()), expected, rtol=1e-12, atol=0)
    shown = list(lines["refitted"].get_xdata())[: len(result.readings)]
    assert shown == sorted(shown)
    np.testing.assert_allclose(
        lines["refitted as reported"].get_xdata(), 100 * result.geomean_error, rtol=1e-12, atol=0
    )
    words = texts(figures["error_by_reading"])
    assert any("SYNTHETIC" in w for w in words)
    for outcome in outcomes:
        rates = [100 * outcome.hit_rate[m] for m in MODELS]
        assert f"{rates[0]:.1f} / {rates[1]:.1f}" in words


def test_a_generated_trace_is_said_to_be_synthetic_in_every_caption():
    alone = reproduce(trace=synthetic_trace().sequences([0]), explore=False)
    figures = plots.reproduction_figures(alone)
    for figure in figures.values():
        assert "SYNTHETIC, not a recording" in caption(figure)
    # One sequence has no other sequences to compare with.
    assert texts(figures["hit_rate"]).count("not available") == 4
    assert len(figures["error_by_reading"].axes[0].get_yticklabels()) == 1


def test_comparison_shows_rates_parts_stages_and_memory(evaluations):
    figure = plots.comparison_figure(evaluations, gpu_capacity_bytes={"h100-cxl2-ndp": CAPACITY})
    rate, token, whole, memory = figure.axes
    rates = np.array([e.decode_tok_per_s for e in evaluations])
    np.testing.assert_allclose(next(iter(bars(rate).values()))[1], rates, rtol=1e-12, atol=0)
    words = [t.get_text() for t in rate.texts]
    assert "baseline" in words[0]
    for word, gain in zip(words[1:], rates[1:] / rates[0], strict=True):
        assert float(re.search(r"\((.*)×\)", word)[1]) == pytest.approx(gain, rel=5e-3)
    for axes, totals in (
        (token, [1e3 * e.tpot_mean_s for e in evaluations]),
        (whole, [e.end_to_end_s for e in evaluations]),
        (memory, [e.memory_bytes["gpu"]["total"] / 1e9 for e in evaluations]),
    ):
        ends = np.max([end for _, end in bars(axes).values()], axis=0)
        np.testing.assert_allclose(ends, totals, rtol=1e-9, atol=0)
    assert list(memory.lines[0].get_xdata()) == [CAPACITY / 1e9] * len(evaluations)
    labels = [t.get_text().replace("\n", "") for t in rate.get_yticklabels()]
    assert labels == ["monde", "hobbit", "context-aware:mean_bits=3", "context-aware:mean_bits=2"]
    words = caption(figure)
    assert "Mixtral 8x22B" in words
    assert "tiny-mixtral-32l (recorded)" in words
    assert "128 + 2048 tokens" in words


def test_comparison_without_prefill_says_so_and_draws_no_time(evaluations):
    without = [dataclasses.replace(e, ttft_s=None, end_to_end_s=None) for e in evaluations]
    mixed = plots.comparison_figure([evaluations[0], *without[1:]]).axes[2]
    starts, ends = bars(mixed)["decode"]
    assert ends[0] > starts[0]
    assert (ends[1:] == 0).all()
    assert [t.get_text() for t in mixed.texts].count("no prefill in the trace") == 3
    none = plots.comparison_figure(without).axes[2]
    assert not bars(none)
    assert [t.get_text() for t in none.texts] == ["no prefill in the trace"]


def test_comparison_names_what_differs_and_takes_any_text(evaluations):
    odd = dataclasses.replace(
        evaluations[1], system="other $x_{$ \n", trace="名前$\\frac$", trace_source="synthetic", model="mixtral-8x7b"
    )
    figure = plots.comparison_figure([evaluations[0], odd], labels=["first", "second $"])
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels[0].split("\n") == ["first", "Mixtral 8x22B", "h100-cxl2-ndp"]
    assert labels[1].split("\n") == ["second $", "Mixtral 8x7B", "other $x_{$ ?"]
    assert "SYNTHETIC" in caption(figure)
    assert "??$\\frac$" in caption(figure)


def test_comparison_refuses_what_cannot_be_read(evaluations):
    with pytest.raises(PerfModelError, match="1 to 40 evaluations, and 0"):
        plots.comparison_figure([])
    with pytest.raises(PerfModelError, match="1 to 40 evaluations, and 41"):
        plots.comparison_figure([evaluations[0]] * 41)
    with pytest.raises(PerfModelError, match="4 evaluations got 1 labels"):
        plots.comparison_figure(evaluations, labels=["one"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.0123, "0.0123"),
        (0.0998, "0.0998"),
        (1.7, "1.70"),
        (15.32, "15.3"),
        (870.4, "870"),
        (1206.0, "1206"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_save_writes_the_format_of_the_suffix(tmp_path, figures, suffix, start):
    path = tmp_path / "new" / f"figure{suffix}"
    plots.save(figures["hit_rate"], path)
    data = path.read_bytes()
    assert data.startswith(start)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    if suffix == ".png":
        size = figures["hit_rate"].get_size_inches() * 200
        assert [int.from_bytes(data[i : i + 4], "big") for i in (16, 20)] == [round(s) for s in size]


@pytest.mark.parametrize("name", ["figure.jpg", "figure", "figure.svg.gz", ".png"])
def test_other_suffixes_are_refused_with_the_allowed_ones(tmp_path, figures, name):
    with pytest.raises(PerfModelError, match=r"allowed: \.png, \.svg, \.pdf"):
        plots.save(figures["hit_rate"], tmp_path / name)
    assert not list(tmp_path.iterdir())
    for path in (name, tmp_path / name):
        with pytest.raises(PerfModelError, match=r"^figure .* names no format; allowed: \.png, \.svg, \.pdf$"):
            plots.check_suffix(path)


@pytest.mark.parametrize("suffix", plots.SUFFIXES)
def test_a_suffix_of_a_format_is_returned_in_lower_case(tmp_path, suffix):
    assert plots.check_suffix(f"some.folder/figure{suffix}") == suffix
    assert plots.check_suffix(tmp_path / f"figure{suffix.upper()}") == suffix


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, figures, monkeypatch):
    path = tmp_path / "figure.svg"
    path.write_text("old")

    def full(name, **_):
        name.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figures["hit_rate"], "savefig", full)
    with pytest.raises(PerfModelError, match="No space left"):
        plots.save(figures["hit_rate"], path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["figure.svg"]


def test_places_that_cannot_be_written_are_refused(tmp_path, figures):
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "folder.png", tmp_path / "file" / "figure.png"):
        with pytest.raises(PerfModelError, match="cannot be written"):
            plots.save(figures["hit_rate"], path)


def test_equal_figures_give_equal_files_without_a_date(tmp_path, evaluations):
    digests: dict[str, set[str]] = {}
    for i in range(2):
        figure = plots.comparison_figure(evaluations)
        for suffix in plots.SUFFIXES:
            path = tmp_path / f"{i}{suffix}"
            plots.save(figure, path)
            digests.setdefault(suffix, set()).add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert {suffix: len(found) for suffix, found in digests.items()} == {".png": 1, ".svg": 1, ".pdf": 1}
    assert "dc:date" not in (tmp_path / "0.svg").read_text(encoding="utf-8")


def test_drawing_changes_no_setting_of_matplotlib_and_needs_no_pyplot(tmp_path, evaluations):
    before = dict(matplotlib.rcParams)
    plots.save(plots.comparison_figure(evaluations), tmp_path / "figure.png")
    assert dict(matplotlib.rcParams) == before
    code = "import sys; from perfmodel.plots import *; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_checking_a_suffix_needs_no_matplotlib():
    code = "import sys; from perfmodel.plots import check_suffix; check_suffix('a.svg'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "perfmodel.plots" in done.stdout.split()
    assert not {"matplotlib", "numpy"} & set(done.stdout.split())


def test_the_package_offers_its_public_names_and_no_others():
    known = ["KINDS", "SUFFIXES", "check_suffix", "rank_figures", "read_steps", "reproduction_figures", "save"]
    known += ["survey_figures", "validation_figures"]
    known += [f"{one}_figure" for one in ("assignments", "comparison", "control", "losses", "profile", "sweep")]
    assert plots.__all__ == sorted(known)
    assert {*plots.__all__} <= {*dir(plots)}
    assert all(hasattr(plots, name) for name in plots.__all__)
    with pytest.raises(AttributeError, match=r"'perfmodel\.plots' has no attribute 'figure'"):
        plots.figure  # noqa: B018
