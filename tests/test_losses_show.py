"""What `losses show` says of a table: against plain loops, against known numbers, in text, JSON and the figure."""

import doctest
import itertools
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import check_refusal, run
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.text import Text

from perfmodel import plots
from perfmodel.bitwidth import LossTable
from perfmodel.errors import TraceError
from perfmodel.losses import summary as module
from perfmodel.losses.summary import FEW_ROWS, Extras, load_extras, summarise

BUNDLED = "tiny-mixtral-32l-losses"


@st.composite
def tables(draw: st.DrawFn) -> tuple[LossTable, Extras]:
    """Small tables with zeros, ties and losses that rise, and what their files may hold beside."""
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    bits = sorted(draw(st.sets(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (layers, experts, len(bits))
    scale = draw(st.sampled_from([1.0, 1e-200, 1e200]))

    def losses() -> np.ndarray:
        return rng.integers(0 if draw(st.booleans()) else 1, 6, shape) * scale

    table = LossTable(
        losses(),
        name="small",
        bits=tuple(bits),
        output_variance=rng.integers(0, 3, shape[:2]) * scale if draw(st.booleans()) else None,
        n_tokens=rng.integers(0, 2 * FEW_ROWS, shape[:2]) if draw(st.booleans()) else None,
    )
    rtn = losses() if draw(st.booleans()) else None
    borrowed = rng.random(shape[:2]) < 0.3 if draw(st.booleans()) else None
    return table, Extras(rtn, borrowed)


def ratio(above: float, below: float) -> float | None:
    return above / below if above > 0 and below > 0 else None


def known(values: Any) -> list[float]:
    return [value for value in values if value is not None]


def geometric(values: Any, power: float = 1.0) -> float | None:
    logs = [math.log(value) for value in known(values)]
    return math.exp(power * sum(logs) / len(logs)) if logs else None


def same(found: float | None, expected: float | None, near: float = 0.0) -> None:
    assert (found is None) == (expected is None), (found, expected)
    if found is not None:
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=near)


@given(tables())
def test_every_number_equals_a_plain_loop(given: tuple[LossTable, Extras]) -> None:
    table, extras = given
    found = summarise(table, extras)
    layers, experts = range(table.num_layers), range(table.num_experts)
    cells = list(itertools.product(layers, experts))
    losses = table.losses.tolist()
    assert [one.bits for one in found.widths] == list(table.bits)
    for i, one in enumerate(found.widths):
        column = [losses[la][e][i] for la, e in cells]
        mean = sum(column) / len(column)
        same(one.mean_loss, mean)
        rows = [[losses[la][e][i] for e in experts] for la in layers]
        means = [sum(row) / len(row) for row in rows]
        spread = [ratio(max(row), min(row)) for row in rows]
        same(one.worst_over_best, geometric(spread))
        same(one.worst_over_best_mean, statistics.fmean(known(spread)) if known(spread) else None)
        same(one.worst_over_best_max, max(known(spread), default=None))
        if one.worst_layer is not None:
            assert spread[one.worst_layer] == pytest.approx(one.worst_over_best_max, rel=1e-12)
        same(one.layers_ratio, max(means) / min(means) if min(means) > 0 else None)
        same(one.cv_layers, statistics.pstdev([m / mean for m in means]) if mean > 0 else None, 1e-14)  # may be 0
        varied = [statistics.pstdev([x / m for x in row]) for row, m in zip(rows, means, strict=True) if m > 0]
        same(one.cv_experts, statistics.fmean(varied) if varied else None, 1e-14)
        if table.output_variance is not None:
            variance = table.output_variance.mean()
            same(one.noise, mean / variance if variance > 0 else None)
        if extras.rtn is not None:
            nearest = [extras.rtn[la, e, i] for la, e in cells]
            same(one.over_rtn_geometric, geometric(map(ratio, column, nearest)))
            same(one.over_rtn_of_means, sum(column) / sum(nearest) if sum(nearest) > 0 else None)
        if i:
            step = table.bits[i] - table.bits[i - 1]
            before = [losses[la][e][i - 1] for la, e in cells]
            same(one.fall_geometric, geometric(map(ratio, before, column), 1 / step))
            same(one.fall_of_means, (sum(before) / sum(column)) ** (1 / step) if sum(column) > 0 else None)
    rising = [
        (la, e, table.bits[i], table.bits[i + 1])
        for la, e in cells
        for i in range(len(table.bits) - 1)
        if losses[la][e][i + 1] > losses[la][e][i]
    ]
    assert [tuple(one[:4]) for one in found.breakers] == rising
    assert found.monotone == len(cells) - len({one[:2] for one in rising})
    for one in found.breakers:
        i = table.bits.index(one.from_bits)
        before, after = losses[one.layer][one.expert][i : i + 2]
        same(one.factor, after / before if before > 0 else None)
    scarce = [
        (la, e)
        for la, e in cells
        if (table.n_tokens is not None and table.n_tokens[la, e] < FEW_ROWS)
        or (extras.borrowed is not None and extras.borrowed[la, e])
    ]
    assert [(one.layer, one.expert) for one in found.scarce] == scarce
    json.dumps(found.to_dict(), allow_nan=False)


@given(tables())
def test_diminishing_gains(given: tuple[LossTable, Extras]) -> None:
    table, extras = given
    found = summarise(table, extras)
    if len(table.bits) < 3:
        assert found.diminishing is None
        return
    steps = np.diff(table.bits)
    # Small whole numbers times a scale, so that gains can be compared as fractions of whole numbers.
    whole = np.round(table.losses / max(table.losses.max() / 5, 5e-324)).astype(int) if table.losses.any() else None
    if whole is not None and table.losses.max() == 5 * table.losses[table.losses > 0].min():
        count = 0
        for row in whole.reshape(-1, len(table.bits)).tolist():
            gains = [row[i] - row[i + 1] for i in range(len(steps))]
            count += all(gains[i + 1] * steps[i] <= gains[i] * steps[i + 1] for i in range(len(steps) - 1))
        assert found.diminishing == count
    assert 0 <= found.diminishing <= found.num_experts
    assert (found.rtn_diminishing is None) == (extras.rtn is None)


def test_known_numbers_of_the_bundled_table() -> None:
    """Falls a bit, order, spread and the gain over rounding to nearest, as this table is known to have them."""
    table = LossTable.load(BUNDLED)
    found = summarise(table, load_extras(BUNDLED, table))
    falls = [one.fall_geometric for one in found.widths[1:]]
    np.testing.assert_allclose(falls, [2.18, 6.10, 4.70], rtol=0.005, atol=0)
    np.testing.assert_allclose([one.fall_of_means for one in found.widths[1:]], [2.01, 6.11, 4.72], rtol=0.005, atol=0)
    assert (found.monotone, found.num_experts, found.breakers) == (256, 256, ())
    assert found.diminishing is not None
    assert found.rtn_diminishing is not None
    assert (round(found.diminishing / 256, 2), round(found.rtn_diminishing / 256, 2)) == (0.70, 0.37)
    for one in found.widths[1:]:
        assert one.worst_over_best == pytest.approx(1.84, abs=0.02)
    assert max(one.worst_over_best_max or 0 for one in found.widths) == pytest.approx(5.41, abs=0.005)
    between = [one.layers_ratio for one in found.widths]
    assert (round(min(known(between)), 1), round(max(known(between)), 1)) == (24.5, 28.9)
    over = [one.over_rtn_geometric for one in found.widths]
    np.testing.assert_allclose(over, [0.92, 0.74, 0.76, 0.77], rtol=0, atol=0.005)
    assert found.scarce == ()


def test_bundled_table_is_the_reference(shared: Path) -> None:
    path = shared / "tiny-mixtral" / "loss_table.npz"
    table = LossTable.load(path)
    found = summarise(table, load_extras(path, table))
    bundled = LossTable.load(BUNDLED)
    assert found.widths == summarise(bundled, load_extras(BUNDLED, bundled)).widths


def test_examples_in_the_docstrings() -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


# --- the command ---


def write(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def falling(layers: int = 3, experts: int = 4, widths: int = 4) -> np.ndarray:
    rng = np.random.default_rng(7)
    return -np.sort(-rng.uniform(0.1, 1.0, (layers, experts, widths)), axis=2)


def test_text_of_the_bundled_table() -> None:
    answer = run("losses", "show", BUNDLED)
    assert answer.code == 0
    assert "32 layers x 8 experts at 1, 2, 3, 4 bits (" in answer.out
    assert "rows an expert was measured on: 93 to 173, median 127" in answer.out
    assert "monotone: the loss of 256 of 256 experts never rises with bits" in answer.out
    assert "diminishing gains: 178 of 256 experts, 69.5 % (RTN 37.1 %)" in answer.out
    (row,) = [line.split() for line in answer.out.splitlines() if line.strip().startswith("3 ")][:1]
    assert row[:8] == ["3", "0.002093", "4.56", "%", "6.11", "x", "6.1", "x"]


def test_experts_that_break_the_order_are_named_up_to_a_number_and_all_in_json(tmp_path: Path) -> None:
    losses = falling(layers=4, experts=4)
    losses[:, :3, 2] = losses[:, :3, 1] * 1.5
    losses[0, 0, 1] = losses[0, 0, 0]  # a tie breaks nothing
    losses[1, 3] = [0.0, 0.0, 0.0, 1e-9]  # rises from nothing
    file = write(tmp_path / "a.npz", losses=losses)
    text = run("losses", "show", file).out
    assert "monotone: the loss of 3 of 16 experts never rises with bits" in text
    assert "layer 0 expert 1: 1.5 x from 2 to 3 bits" in text
    assert text.count(" expert ") - text.count("CV expert") <= 12
    assert "and 3 more (all with --json)" in text
    assert "note: " not in text
    found = run("losses", "show", file, "--json").document
    assert len(found["breakers"]) == 13
    assert {"layer": 1, "expert": 3, "from_bits": 3, "to_bits": 4, "factor": None} in found["breakers"]
    assert found["monotone"] == 3


def test_few_and_borrowed_rows_are_named(tmp_path: Path) -> None:
    rows = np.full((3, 4), 100)
    rows[1, 2] = 5
    borrowed = np.zeros((3, 4), bool)
    borrowed[2, 0] = True
    file = write(tmp_path / "a.npz", losses=falling(), n_tokens=rows, borrowed=borrowed)
    text = run("losses", "show", file).out
    assert "measured on fewer than 32 rows, or on borrowed ones: 2 of 12 experts" in text
    assert "layer 1 expert 2: 5 rows" in text
    assert "layer 2 expert 0: 100 borrowed rows" in text


def test_how_the_table_was_made_is_shown(tmp_path: Path) -> None:
    info = '{"method": "gptq", "long": "%s", "lines": "a\\nb", "bad": NaN, "most": 1e999, "deep": %s}'
    file = write(tmp_path / "a.npz", losses=falling(), metadata=np.array(info % ("x" * 500, "[" * 60 + "1" + "]" * 60)))
    text = run("losses", "show", file).out
    lines = text.splitlines()
    assert lines[1:4] == ["made by: gptq", "metadata: lines a b", "more metadata with --json"]
    found = run("losses", "show", file, "--json").document
    assert found["info"]["method"] == "gptq"
    assert found["info"]["bad"] is None
    assert found["info"]["most"] is None


def test_a_built_table_is_described_in_two_lines(tmp_path: Path) -> None:
    info = {
        "perfmodel_version": "9", "method": "gptq", "group_size": None, "damping": "auto", "order": "natural",
        "folds": 4, "scale_bits_per_weight": [0.205, 0.232, 0.2454, 0.2588], "least_rows": 8, "checkpoint": "toy",
        "hidden_size": 64, "calibration": "rows.npz", "sha256": {"checkpoint": "0" * 64},
    }  # fmt: skip
    file = write(tmp_path / "a.npz", losses=falling(), metadata=np.array(json.dumps(info)))
    lines = run("losses", "show", file).out.splitlines()
    assert lines[1:3] == [
        "made by: gptq, one scale a row, damping auto, natural order, 4 folds; scales add 0.2, 0.23, 0.25, 0.26 bits a"
        " weight",
        "of: model toy, hidden size 64; calibration rows.npz",
    ]
    assert "[" not in "".join(lines[:5])
    grouped = {**info, "method": "rtn", "group_size": 16, "held_out": "other.npz"}
    file = write(tmp_path / "a.npz", losses=falling(), metadata=np.array(json.dumps(grouped)))
    lines = run("losses", "show", file).out.splitlines()
    assert lines[1].startswith("made by: rtn, one scale a group of 16 columns; scales")
    assert lines[2].endswith("calibration rows.npz, measured on other.npz")
    assert run("losses", "show", file, "--json").document["info"] == grouped


def test_small_noise_keeps_its_digits(tmp_path: Path) -> None:
    losses = np.full((2, 3, 2), 1e-7) * [4, 1]
    file = write(tmp_path / "a.npz", losses=losses, bits=[7, 8], output_variance=np.full((2, 3), 0.3))
    text = run("losses", "show", file).out
    assert re.search(r"^ +8 +1e-07 +3\.33e-05 % +4 x +4 x", text, flags=re.MULTILINE)
    assert "noise: mean loss over the mean variance of the unquantised output" in text
    assert "falls per bit: of the mean  geometric mean" in text


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2), (1, 3, 4), (3, 64, 4)])
def test_any_shape_can_be_shown(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    bits = np.array([2, 3, 8, 16])[: shape[2]]
    file = write(tmp_path / "a.npz", losses=falling(*shape), bits=bits, losses_rtn=falling(*shape))
    assert run("losses", "show", file).code == 0
    answer = run("losses", "show", file, "--json", "--plot", tmp_path / "a.png")
    assert answer.document["bits"] == bits.tolist()
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize("value", [0.0, 1e308, 5e-324])
def test_extreme_losses(tmp_path: Path, value: float) -> None:
    file = write(tmp_path / "a.npz", losses=np.full((2, 3, 4), value), losses_rtn=np.full((2, 3, 4), 1e300))
    found = run("losses", "show", file, "--json", "--plot", tmp_path / "a.svg").document
    assert found["widths"][0]["mean_loss"] == pytest.approx(value, rel=1e-12)
    assert found["monotone"] == 6


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    good = falling()
    check_refusal(run("losses", "show"), "FILE|NAME")
    check_refusal(run("losses", "show", "tiny-losses"), "tiny-losses", BUNDLED)
    check_refusal(run("losses", "show", tmp_path / "none.npz"), "none.npz", "no such file")
    check_refusal(run("losses", "show", BUNDLED, "--plot", tmp_path / "a.jpg"), ".jpg", ".svg")
    check_refusal(run("losses", "show", BUNDLED, "--plot", Path(__file__) / "a.png"), "--plot", "is not a folder")
    check_refusal(run("losses", "show", write(tmp_path / "a.npz", other=good)), "no array 'losses'", "other")
    wrong: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "shape": ({"losses_rtn": good[:2]}, ("losses_rtn", "[2, 4, 4]", "[3, 4, 4]")),
        "nan": ({"losses_rtn": good * np.nan}, ("losses_rtn", "nan")),
        "negative": ({"losses_rtn": -good}, ("losses_rtn", "0 or more")),
        "text": ({"losses_rtn": np.full(good.shape, "a")}, ("losses_rtn",)),
        "count": ({"borrowed": np.ones((3, 4), int)}, ("borrowed", "int64", "true or false")),
        "place": ({"borrowed": np.ones((4, 3), bool)}, ("borrowed", "[4, 3]", "[3, 4]")),
    }
    for arrays, words in wrong.values():
        check_refusal(run("losses", "show", write(tmp_path / "b.npz", losses=good, **arrays)), *words)
    truncated = tmp_path / "c.npz"
    truncated.write_bytes((tmp_path / "b.npz").read_bytes()[:300])
    check_refusal(run("losses", "show", truncated), "c.npz")
    assert not (tmp_path / "a.jpg").exists()
    with pytest.raises(TraceError, match="losses_rtn has shape"):
        load_extras(write(tmp_path / "d.npz", losses=good, losses_rtn=good[:1]), LossTable(good, name="good"))


# --- the figure ---


def marked_table() -> tuple[LossTable, Extras]:
    losses = falling(5, 6)
    losses[3, 2, 1] = 2 * losses[3, 2, 0]
    losses[0, 5, 3] = 0.0
    return LossTable(losses, name="marked"), Extras()


def test_figure_shows_every_loss_and_marks_what_breaks_the_order() -> None:
    table, extras = marked_table()
    found = summarise(table, extras)
    figure = plots.losses_figure(found)
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert [axes.get_title(loc="left").split(",")[0] for axes in panels] == ["1 bit", "2 bits", "3 bits", "4 bits"]
    for i, axes in enumerate(panels):
        (mesh,) = axes.collections
        shown = mesh.get_array().reshape(5, 6)
        np.testing.assert_allclose(
            shown.filled(0.0), table.losses[..., i] / table.losses[..., i].mean(), rtol=1e-12, atol=0
        )
        crosses = {(x, y) for line in axes.lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)}
        expected = {(one.expert, one.layer) for one in found.breakers if one.to_bits == table.bits[i]}
        assert crosses == expected
    assert any(one.to_bits == 2 for one in found.breakers)
    curves, spread = [axes for axes in figure.axes if axes.get_legend() is not None]
    means = {tuple(line.get_ydata()) for line in curves.lines if len(line.get_ydata())}
    assert {tuple(row) for row in table.losses.mean(axis=1)} == means
    for i, line in enumerate(spread.lines):
        worst = table.losses[..., i].max(axis=1) / np.where((low := table.losses[..., i].min(axis=1)) > 0, low, np.nan)
        np.testing.assert_allclose(line.get_ydata(), worst, rtol=1e-12, atol=0)
    words = " ".join(figure.get_supxlabel().split())
    assert "the loss of 2 of 30 experts rises" in words or "the loss of 1 of 30 experts rises" in words
    assert "Grey: a loss of 0." in words


def test_figure_of_the_bundled_table_fits_on_the_page() -> None:
    table = LossTable.load(BUNDLED)
    figure = plots.losses_figure(summarise(table, load_extras(BUNDLED, table)))
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    for text in figure.findobj(Text):
        if text.get_text().strip() and text.get_visible():
            box = text.get_window_extent()
            if 0 <= (box.x0 + box.x1) / 2 <= width and 0 <= (box.y0 + box.y1) / 2 <= height:
                assert box.x0 >= -1, text
                assert box.x1 <= width + 1, text
                assert text.get_fontsize() >= 7
    assert round(figure.get_figwidth(), 2) == 7.0


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3, 3.0])
def test_the_scale_of_colours_has_ticks_to_read_by(spread: float) -> None:
    losses = np.exp(spread * np.linspace(-1, 1, 32)).reshape(4, 8, 1) * [1.0, 0.25]
    figure = plots.losses_figure(summarise(LossTable(losses, name="narrow", bits=(2, 3))))
    (bar,) = [axes for axes in figure.axes if axes.get_ylabel().startswith("loss over")]
    low, high = bar.get_ylim()
    ticks = [tick for tick in bar.get_yticks() if low <= tick <= high]
    assert len(ticks) >= 3
    assert min(ticks) < 1 < max(ticks)


def test_more_widths_than_panels(tmp_path: Path) -> None:
    table = LossTable(falling(2, 3, 6), name="six", bits=(1, 2, 3, 4, 6, 8))
    figure = plots.losses_figure(summarise(table))
    titles = [axes.get_title(loc="left").split(",")[0] for axes in figure.axes if axes.get_title(loc="left")]
    assert titles == ["1 bit", "3 bits", "4 bits", "8 bits"]
    assert "Drawn at 1, 3, 4, 8 of 1, 2, 3, 4, 6, 8 bits." in " ".join(figure.get_supxlabel().split())
