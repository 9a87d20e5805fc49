"""Figures of a ranking show its numbers, name what is not drawn, and say where the routing comes from."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text

import perfmodel
from perfmodel import plots
from perfmodel.answers.dominance import nondominated
from perfmodel.answers.ranking import Ranking
from perfmodel.evidence.explore import synthetic_trace
from perfmodel.plots.rank import MOST_POLICIES, alike, spread
from perfmodel.plots.style import PART_LOOKS

NAMES = ("mixtral-8x7b", "h100-cxl-ndp", "tiny-mixtral-32l-mini")
SHORT: dict[str, Any] = {"prompt": 16, "output": 16}


@pytest.fixture(scope="module")
def ranking() -> Ranking:
    return perfmodel.rank(*NAMES, **SHORT)


@pytest.fixture(scope="module")
def figures(ranking: Ranking) -> dict[str, Figure]:
    return plots.rank_figures(ranking)


def caption(figure: Figure) -> str:
    return " ".join(figure.get_supxlabel().split())


def bars(axes: Any) -> dict[str, np.ndarray]:
    found = [one for one in axes.containers if isinstance(one, BarContainer)]
    return {str(one.get_label()): np.array([p.get_width() for p in one]) for one in found}


def test_captions_say_what_was_ranked(figures: dict[str, Figure]) -> None:
    assert list(figures) == ["rank_times", "rank_pareto"]
    for figure in figures.values():
        words = caption(figure)
        for part in ("tiny-mixtral-32l (recorded)", "h100-cxl-ndp, every policy with 80.0 GB", "Mixtral 8x7B"):
            assert part in words
        assert "mean time per output token" in words


def test_routing_that_was_not_recorded_is_called_so() -> None:
    found = perfmodel.rank(*NAMES[:2], synthetic_trace(), ["expert-cache", "monde"], **SHORT)
    for figure in plots.rank_figures(found).values():
        assert "SYNTHETIC, not a recording" in caption(figure)


def test_points_are_the_times_and_parts_add_up(ranking: Ranking, figures: dict[str, Figure]) -> None:
    times, parts = figures["rank_times"].axes
    # No bars, as a logarithmic axis has no zero.
    assert not bars(times)
    (drawn,) = (line for line in times.lines if line.get_label() == "time per output token")
    expected = np.array([1e3 * one.evaluation.tpot_mean_s for one in ranking.rows])
    np.testing.assert_allclose(np.asarray(drawn.get_xdata()), expected, rtol=1e-12)
    low, high = times.get_xlim()
    assert low < 1e3 * min(one.evaluation.bandwidth_floor_s for one in ranking.rows)
    assert expected.max() < high < 1.5 * expected.max()
    widths = bars(parts)
    np.testing.assert_allclose(sum(widths.values()), 100.0, rtol=1e-9)
    for part, look in PART_LOOKS.items():
        shares = [100 * one.evaluation.breakdown_s[part] / one.evaluation.tpot_mean_s for one in ranking.rows]
        if any(shares):
            np.testing.assert_allclose(widths[look.label], shares, rtol=1e-9)
        else:
            assert look.label not in widths
    (floor,) = (line for line in times.lines if line.get_label() == "bandwidth floor")
    floors = [1e3 * one.evaluation.bandwidth_floor_s for one in ranking.rows]
    np.testing.assert_allclose(np.asarray(floor.get_xdata()), floors, rtol=1e-12)


def test_hit_rates_stand_between_the_panels(ranking: Ranking, figures: dict[str, Figure]) -> None:
    figure = figures["rank_times"]
    times, parts = figure.axes
    figure.canvas.draw()
    left, right = times.get_window_extent().x1, parts.get_window_extent().x0
    boxes = sorted((text.get_window_extent() for text in times.texts), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 + 1.0 for below, above in itertools.pairwise(boxes))
    for text, one in zip(times.texts, ranking.rows, strict=True):
        assert f"hit {one.evaluation.hit_rate.own:.2f}" in text.get_text()
        assert ("Belady" in text.get_text()) == (one.belady_hit_rate is not None)
        box = text.get_window_extent()
        assert left <= box.x0 < box.x1 <= right


def test_the_front_is_what_nobody_beats(ranking: Ranking, figures: dict[str, Figure]) -> None:
    axes = figures["rank_pareto"].axes[0]
    assert "noise" in axes.get_xlabel()
    drawn = [one.evaluation for one in ranking.rows if one.evaluation.quant_loss is not None]
    values = np.column_stack([alike([one.quant_noise or 0.0 for one in drawn]), [one.tpot_mean_s for one in drawn]])
    front = values[nondominated(values)]
    filled = axes.lines[-1]
    np.testing.assert_allclose(np.asarray(filled.get_xdata()), 100 * front[:, 0], rtol=2e-9)
    np.testing.assert_allclose(np.asarray(filled.get_ydata()), 1e3 * front[:, 1], rtol=2e-9)
    named = {text.get_text().partition(" ")[2] for text in axes.texts}
    known = {one.label for one in ranking.rows if one.evaluation.quant_loss is not None}
    assert named == known
    for one in ranking.rows:
        assert (one.label in caption(figures["rank_pareto"])) == (one.label not in known)


def test_names_beside_the_front_do_not_touch(figures: dict[str, Figure]) -> None:
    figure = figures["rank_pareto"]
    figure.canvas.draw()
    # Of the text alone: that of an annotation has its line, too.
    boxes = sorted((Text.get_window_extent(text) for text in figure.axes[0].texts), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 + 1.0 for below, above in itertools.pairwise(boxes))
    assert max(box.x1 for box in boxes) <= figure.bbox.x1


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12), st.floats(0.001, 0.05))
def test_places_are_kept_apart_and_inside(places: list[float], gap: float) -> None:
    falling = np.sort(places)[::-1]
    found = spread(falling, gap)
    assert (found[:-1] - found[1:] >= gap - 1e-12).all()
    assert found.min() >= -1e-12
    assert found.max() <= 1.0 + 1e-12
    if (falling[:-1] - falling[1:] >= gap).all():
        np.testing.assert_allclose(found, falling, rtol=0, atol=1e-12)


@given(st.lists(st.sampled_from([0.0, 1e-6, 0.25, 3.0]), max_size=9), st.randoms(use_true_random=False))
def test_rounding_decides_nothing(values: list[float], random: Any) -> None:
    noisy = [value * (1.0 + random.uniform(-1e-12, 1e-12)) for value in values]
    found = alike(noisy)
    np.testing.assert_allclose(found, values, rtol=1e-11)
    assert len(set(found.tolist())) == len(set(values))
    np.testing.assert_array_equal(alike(found.tolist()), found)


def with_losses(ranking: Ranking, losses: list[float]) -> Ranking:
    """The ranking with other losses, whose shares of the variance are ten times as large."""
    rows = [
        dataclasses.replace(one, evaluation=dataclasses.replace(one.evaluation, quant_loss=x, quant_noise=10 * x))
        for one, x in zip(ranking.rows, losses, strict=False)
    ]
    return dataclasses.replace(ranking, rows=tuple(rows))


def test_equal_losses_make_no_front(ranking: Ranking) -> None:
    equal = [0.0004408622428396446, 0.0004408622428396394]
    assert list(plots.rank_figures(with_losses(ranking, equal))) == ["rank_times"]
    axes = plots.rank_figures(with_losses(ranking, [*equal, 0.0005]))["rank_pareto"].axes[0]
    # The first is faster and no worse; the axis shows what differs, not how far all are from zero.
    assert len(np.asarray(axes.lines[-1].get_xdata())) == 1
    low, high = axes.get_xlim()
    assert 0.4 < low < 0.4409
    assert 0.5 < high < 0.51


def test_lines_begin_beside_the_labels(figures: dict[str, Figure]) -> None:
    figure = figures["rank_pareto"]
    figure.canvas.draw()
    for text in figure.axes[0].texts:
        arrow = text.arrow_patch
        assert arrow.get_window_extent().x1 <= Text.get_window_extent(text).x0 + 1.0


def test_without_losses_there_is_no_front(ranking: Ranking) -> None:
    unknown = [
        dataclasses.replace(one, evaluation=dataclasses.replace(one.evaluation, quant_loss=None, quant_noise=None))
        for one in ranking.rows
    ]
    assert list(plots.rank_figures(dataclasses.replace(ranking, rows=tuple(unknown)))) == ["rank_times"]
    some = dataclasses.replace(ranking, rows=(*unknown[:2], *ranking.rows[2:]))
    words = caption(plots.rank_figures(some)["rank_pareto"])
    assert f"no loss is known: {unknown[0].label}, {unknown[1].label}" in words


def test_one_policy_and_very_many(ranking: Ranking) -> None:
    plots.rank_figures(dataclasses.replace(ranking, rows=ranking.rows[:1]))
    rows = (ranking.rows[0],) * (MOST_POLICIES + 3)
    figure = plots.rank_figures(dataclasses.replace(ranking, rows=rows))["rank_times"]
    assert "3 more policies are not drawn" in caption(figure)
    assert len(figure.axes[0].texts) == MOST_POLICIES


def test_the_command_writes_every_format(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "figures"
    answer = run(
        "rank", "--model", NAMES[0], "--system", NAMES[1], "--policies", "hobbit;monde", "--prompt", 8, "--output", 8,
        "--plot", folder,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert re.search(r"wrote rank_times\.png/\.svg/\.pdf, rank_pareto\.png/\.svg/\.pdf to ", answer.err)
    names = [f"rank_{name}.{suffix}" for name in ("pareto", "times") for suffix in ("pdf", "png", "svg")]
    assert sorted(one.name for one in folder.iterdir()) == names
    assert all(one.stat().st_size > 1000 for one in folder.iterdir())


def test_without_a_front_the_command_says_so_and_an_interrupt_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("rank", "--model", NAMES[0], "--system", NAMES[1], "--policies", "expert-cache", "--prompt", 8)
    answer = run(*arguments, "--output", 8, "--plot", tmp_path / "one")
    assert answer.code == 0
    assert "no rank_pareto" in answer.err
    assert len(list((tmp_path / "one").iterdir())) == 3

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plots, "save", interrupted)
    assert run(*arguments, "--output", 8, "--plot", tmp_path / "two").code == 130
    assert not (tmp_path / "two").exists()
