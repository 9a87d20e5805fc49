"""Figures of routing show the numbers of the survey, say what they are of, and stay within their page."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text
from routings import SHAPES, drawn_trace, surveyed

from perfmodel import __version__, plots
from perfmodel.errors import TraceError
from perfmodel.plots.routing.curves import reuse_figure
from perfmodel.plots.routing.steps import MOST_ROWS, Steps
from perfmodel.routing import RoutingTrace
from perfmodel.routing.blocks import open_trace
from perfmodel.routing.profile import FrequencyProfile
from perfmodel.routing.statistics import Survey, survey

MINI = "tiny-mixtral-32l-mini"


@pytest.fixture(scope="module")
def found() -> Survey:
    return survey(MINI)


@pytest.fixture(scope="module")
def figures(found: Survey) -> dict[str, Figure]:
    return plots.survey_figures(found, plots.read_steps(open_trace(MINI)))


def caption(figure: Figure) -> str:
    return " ".join(figure.get_supxlabel().split())


def lines(axes: Axes) -> dict[str, np.ndarray]:
    """Values of every named line."""
    return {str(one.get_label()): np.asarray(one.get_ydata()) for one in axes.lines if one.get_label()[0] != "_"}


def meshes(figure: Figure) -> list[np.ma.MaskedArray]:
    """Cells of the heat maps, without the scales of colours."""
    panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    return [one.get_array() for axes in panels for one in axes.collections if isinstance(one, QuadMesh)]


def beyond(axes: Axes) -> set[Text]:
    """Labels of ticks outside the limits, which matplotlib keeps but does not draw."""
    hidden = set()
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        room = 1e-9 * (high - low)
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
            if not low - room <= tick.get_loc() <= high + room:
                hidden |= {tick.label1, tick.label2}
    return hidden


def check_page(figure: Figure) -> None:
    """Nothing reaches over the edge, the caption is free, and ticks do not touch."""
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    hidden = {text for axes in figure.axes for text in beyond(axes)}
    hidden |= {text for axes in figure.axes if not axes.get_visible() for text in axes.findobj(Text)}
    texts = [one for one in figure.findobj(Text) if one.get_text().strip() and one.get_visible() and one not in hidden]
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= -1, text
        assert box.x1 <= width + 1, text
        assert box.y0 >= -1, text
        assert box.y1 <= height + 1, text
    (below,) = [text for text in texts if f"perfmodel {__version__}" in " ".join(text.get_text().split())]
    free = below.get_window_extent()
    assert not [text for text in texts if text is not below and text.get_window_extent().overlaps(free)]
    for axes in figure.axes:
        for labels, way in ((axes.get_xticklabels(), "x"), (axes.get_yticklabels(), "y")):
            boxes = [one.get_window_extent() for one in labels if one in texts]
            ends = sorted((getattr(box, f"{way}0"), getattr(box, f"{way}1")) for box in boxes)
            assert all(one[1] <= other[0] + 1 for one, other in itertools.pairwise(ends))


def test_every_figure_is_there_and_says_what_it_is_of(figures: dict[str, Figure]) -> None:
    assert list(figures) == ["experts", "steps", "layers", "reuse", "distinct", "hit_rate", "cache", "drift"]
    for figure in figures.values():
        words = caption(figure)
        assert "tiny-mixtral-32l (recorded), 6 sequences with 672 prefill and 1,344 decode tokens" in words
        assert "32 layers of 8 experts, top-2" in words
        assert words.endswith(f"perfmodel {__version__}.")
        assert all(text.get_fontsize() >= 7 for text in figure.findobj(Text) if text.get_text())
        assert round(figure.get_figwidth(), 2) in {3.4, 7.0}
        for axes in figure.axes:
            if axes.get_visible() and axes.get_label() != "<colorbar>":
                assert axes.get_xlabel() or axes.get_ylabel() or axes.get_title(loc="left")
    for name in ("layers", "reuse", "hit_rate", "cache", "drift"):
        assert "95 % intervals from 1,000 resamples of the sequences" in caption(figures[name])


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_stays_within_its_page(name: str) -> None:
    trace = SHAPES[name]
    drawn = plots.survey_figures(surveyed(name), plots.read_steps(open_trace(trace)))
    assert {"experts", "steps", "layers"} <= set(drawn)
    for figure in drawn.values():
        check_page(figure)
        assert "SYNTHETIC, not a recording" in caption(figure)
    if trace.num_sequences == 1:
        assert "One sequence, so no intervals." in caption(drawn["layers"])
    if not trace.prompt_len.any() and "hit_rate" in drawn:
        assert "the first half of each sequence stands in for it" in caption(drawn["hit_rate"])


def test_the_recording_stays_within_its_pages(figures: dict[str, Figure]) -> None:
    for figure in figures.values():
        check_page(figure)


def test_experts_in_colour_by_phase(found: Survey, figures: dict[str, Figure]) -> None:
    prefill, decode, shift = meshes(figures["experts"])
    np.testing.assert_allclose(prefill, 8 * found.skew["prefill"].shares, rtol=1e-12, atol=0)
    np.testing.assert_allclose(decode, 8 * found.skew["decode"].shares, rtol=1e-12, atol=0)
    np.testing.assert_allclose(shift, decode - prefill, rtol=1e-12, atol=0)
    titles = [axes.get_title(loc="left") for axes in figures["experts"].axes]
    assert titles[:3] == ["prefill", "decode", "decode − prefill"]
    image = figures["experts"].axes[2].collections[0]
    low, high = image.get_clim()
    assert low == -high  # white is no difference


def test_layers_without_picks_are_grey() -> None:
    ids = np.zeros((40, 2, 1), np.int64)
    ids[:, 1] = -1
    ids[::2, 0] = 1
    trace = RoutingTrace(
        ids, None, np.array([0, 20, 40]), np.array([10, 10]), np.arange(2), 3, {"model": "m", "source": "synthetic"}
    )
    figure = plots.survey_figures(survey(trace))["experts"]
    assert "Grey: no picks." in caption(figure)
    assert meshes(figure)[0].mask.tolist() == [[False] * 3, [True] * 3]


def test_reuse_by_lag_and_by_layer(found: Survey, figures: dict[str, Figure]) -> None:
    left, right = figures["reuse"].axes
    for scope in ("prefill", "decode"):
        one = found.reuse[scope]
        np.testing.assert_array_equal(lines(left)[scope], one.measured.overall.value)
        np.testing.assert_array_equal(lines(right)[scope], one.measured.layers.value[:, 0])
        levels = [line.get_ydata()[0] for line in left.lines if len(line.get_ydata()) == 2]
        assert float(one.chance.overall.value) in levels
    assert [text.get_text() for text in left.get_xticklabels()] == ["1", "2", "4", "8", "16", "32"]


def test_distinct_experts_beside_even_picks(found: Survey, figures: dict[str, Figure]) -> None:
    left, right = figures["distinct"].axes
    np.testing.assert_array_equal(lines(left)["decode"], found.distinct["decode"].overall.value)
    assert found.batches is not None
    np.testing.assert_array_equal(lines(right)["any positions"], found.batches.distinct)
    np.testing.assert_array_equal(lines(right)["same position"], found.batches.aligned)
    legend = [text.get_text() for text in figures["distinct"].legends[0].get_texts()]
    assert legend == ["prefill", "decode", "even", "any positions", "same position"]
    looks = {(line.get_color(), line.get_marker()) for axes in (left, right) for line in axes.lines}
    assert len(looks) == len(legend)  # no two series look alike
    even = lines(right)["even"]
    np.testing.assert_allclose(even[[0, -1]], [2.0, 8 * (1 - 0.75**4)], rtol=1e-12, atol=0)


def test_hit_rates_and_caches_are_those_of_the_survey(found: Survey, figures: dict[str, Figure]) -> None:
    rates, cache = found.hit_rates, found.cache
    assert rates is not None
    assert cache is not None
    left, right = figures["hit_rate"].axes
    names = {
        "own prefill": "own", "another's prefill": "other_sequence", "static": "static", "oracle": "oracle",
    }  # fmt: skip
    assert set(lines(left)) == {*names, "K / E"}
    for label, name in names.items():
        np.testing.assert_array_equal(lines(left)[label], getattr(rates, name).value)
        np.testing.assert_array_equal(lines(right)[label], rates.layers[name].value)
    left, right = figures["cache"].axes
    np.testing.assert_array_equal(lines(left)["LRU"], cache.lru.value)
    np.testing.assert_array_equal(lines(left)["Belady"], cache.belady.value)
    np.testing.assert_array_equal(lines(left)["placed by own prefill"], rates.own.value)
    np.testing.assert_array_equal(lines(right)["LRU"], cache.lru_layers[:, 3])
    assert (lines(left)["Belady"] >= lines(left)["LRU"]).all()
    legend = [text.get_text() for text in figures["cache"].legends[0].get_texts()]
    assert legend == ["Belady", "LRU", "placed by own prefill", "C / E"]


def test_bands_are_the_intervals(found: Survey, figures: dict[str, Figure]) -> None:
    rates = found.hit_rates
    assert rates is not None
    (left, _), count = figures["hit_rate"].axes, len(rates.gpu_experts)
    band = left.collections[0].get_paths()[0].vertices
    for k in range(count):
        at = band[np.isclose(band[:, 0], k + 1)][:, 1]
        assert at.min() == rates.own.low[k]
        assert at.max() == rates.own.high[k]


def test_drift_stands_over_its_number_of_sequences(found: Survey, figures: dict[str, Figure]) -> None:
    drift = found.drift
    assert drift is not None
    cosine, below, hits, _ = figures["drift"].axes
    np.testing.assert_array_equal(lines(cosine)["cosine"], drift.cosine.value)
    np.testing.assert_array_equal(lines(hits)["hit rate"], drift.hit_rate.value)
    (bars,) = (one for one in below.containers if isinstance(one, BarContainer))
    assert [bar.get_height() for bar in bars] == drift.sequences.tolist()


def test_drift_has_no_band_over_two_sequences() -> None:
    found = survey(drawn_trace([240, 240, 136, 104], [40] * 4))
    figure = plots.survey_figures(found)["drift"]
    assert found.drift is not None
    assert found.drift.sequences.tolist() == [4, 4, 3, 2, 2, 2]
    reach = figure.axes[0].collections[0].get_paths()[0].vertices[:, 0].max()
    assert reach == found.drift.first_row[2] + (found.drift.rows - 1) / 2
    low, high = figure.axes[2].get_ylim()
    assert low < 0.5 < high  # any half of the experts, if all were alike
    assert "No band over fewer than 3 sequences." in caption(figure)


def test_what_differs_by_layer(found: Survey, figures: dict[str, Figure]) -> None:
    skew, similarity, following, weights = figures["layers"].axes
    np.testing.assert_array_equal(lines(skew)["decode"], found.skew["decode"].top_half.layers.value)
    assert found.similarity is not None
    assert found.next_layer is not None
    assert found.weights is not None
    np.testing.assert_array_equal(lines(similarity)["own prefill"], found.similarity.cosine.layers.value)
    np.testing.assert_array_equal(lines(following)["table of pairs"], found.next_layer.recall.layers.value)
    (bars,) = (one for one in weights.containers if isinstance(one, BarContainer))
    np.testing.assert_array_equal([bar.get_height() for bar in bars], found.weights.overall.value)
    fewer = plots.survey_figures(surveyed("no weights"))["layers"]
    assert "Gate weight" not in caption(fewer)
    assert len([axes for axes in fewer.axes if axes.get_visible()]) == 3


def check_steps(steps: Steps, trace: RoutingTrace, sequence: int, rows: slice) -> None:
    base = trace.sequence_offsets[sequence]
    ids = trace.topk_ids[base + rows.start : base + rows.stop].astype(int)
    ids[ids == trace.unassigned] = -1
    np.testing.assert_array_equal(steps.ids, ids)
    assert (steps.first, steps.prompt) == (rows.start, trace.prompt_len[sequence])
    if trace.topk_weights is None:
        assert steps.weights is None
    else:
        np.testing.assert_array_equal(steps.weights, trace.topk_weights[base + rows.start : base + rows.stop])


def test_steps_are_rows_of_the_sequence(tmp_path: Path) -> None:
    trace = drawn_trace([30, 40, 900, 20], [0, 10, 500, 20], holes=True)
    path = tmp_path / "trace.npz"
    trace.save(path)
    for source in (trace, path):
        opened = open_trace(source)
        check_steps(plots.read_steps(opened), trace, 1, slice(0, 40))  # the first that has both phases
        check_steps(plots.read_steps(opened, 2), trace, 2, slice(436, 436 + MOST_ROWS))  # 64 of the prefill
        check_steps(plots.read_steps(opened, 3), trace, 3, slice(0, 20))
        with pytest.raises(TraceError, match="sequence is 4"):
            plots.read_steps(opened, 4)
    for lengths, prompts, rows in (
        ([700], [0], slice(0, 256)),
        ([700], [700], slice(444, 700)),  # the end of a prefill without decode
        ([700], [600], slice(444, 700)),  # as much of the prefill as there is room for
        ([700], [20], slice(0, 256)),
    ):
        one = drawn_trace(lengths, prompts, weights=False)
        check_steps(plots.read_steps(open_trace(one)), one, 0, rows)


def test_steps_of_a_sequence_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = drawn_trace([30, 300], [0, 200])
    monkeypatch.setattr("perfmodel.routing.blocks.BLOCK_ROWS", 16)
    opened = open_trace(trace)
    assert len(list(opened.blocks())) > 10
    check_steps(plots.read_steps(opened), trace, 1, slice(300 - MOST_ROWS, 300))


def test_a_mark_is_a_pick() -> None:
    trace = drawn_trace([50], [20], layers=5, holes=True, first_layer=3)
    figure = plots.survey_figures(survey(trace), plots.read_steps(open_trace(trace)))["steps"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["layer 3", "layer 5", "layer 7"]
    for cells, layer in zip(meshes(figure), (0, 2, 4), strict=True):
        marked = ~np.ma.getmaskarray(cells)
        assert marked.shape == (6, 50)
        expected = np.zeros((6, 50), bool)
        for token in range(50):
            for expert in trace.topk_ids[token, layer]:
                if expert != trace.unassigned:
                    expected[expert, token] = True
        np.testing.assert_array_equal(marked, expected)
    (boundary,) = [line.get_xdata()[0] for line in figure.axes[0].lines]
    assert boundary == 19.5
    assert "tokens 0 to 49" in caption(figure)


def test_a_profile_in_colour() -> None:
    counts = np.array([[4.0, 1.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    metadata = {"model": "counted", "source": "from-counts"}
    figure = plots.profile_figure(FrequencyProfile(counts, np.array([1, 5]), metadata, 1))
    check_page(figure)
    np.testing.assert_allclose(meshes(figure)[0], [[2.0, 0.5, 1.0, 0.5], [1.0] * 4], rtol=1e-12, atol=0)
    assert "Frequency profile (counts) of counted: 2 layers of 4 experts, top-1." in caption(figure)
    order = plots.profile_figure(FrequencyProfile(counts, np.array([1, 5]), metadata, None, "ranks"))
    check_page(order)
    assert meshes(order)[0].tolist() == [[1, 3, 2, 4], [1, 2, 3, 4]]
    assert "only the order is known" in caption(order)


def test_equal_surveys_give_equal_files(found: Survey, tmp_path: Path) -> None:
    for name in ("one", "two"):
        for kind in ("png", "svg", "pdf"):
            plots.save(reuse_figure(found), tmp_path / f"{name}.{kind}")
    for kind in ("png", "svg", "pdf"):
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()


def test_no_name_is_read_as_a_formula() -> None:
    words = caption(reuse_figure(surveyed("odd name")))
    assert "$x_1$" in words
    assert "long" in words
    assert "…" in words
