"""Axis values as texts, designs and their blocks, samples, and tables of cases."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import PerfModelError
from perfmodel.scenario.axis import AxisInfo
from perfmodel.scenario.tables import groups
from perfmodel.sweeps.axes import Range, count_of, parse_values
from perfmodel.sweeps.cases import read_cases
from perfmodel.sweeps.design import HARDWARE, MOST_DIMS, MOST_POINTS, PLAN, POLICY, Design, Dim
from perfmodel.sweeps.layout import zip_groups
from perfmodel.sweeps.samples import MOST_NUMBERS, Sample, draw

RATE = AxisInfo("link.bandwidth_gb_per_s", "hardware", "GB/s", 0.01, 5000, False, True, (), "link bandwidth")
COUNT = AxisInfo("ndp.arrays", "hardware", "1", 1, 1e6, True, True, (), "arrays")
EXPERTS = AxisInfo("policy.gpu_experts", "option", "1", None, None, True, True, (), "experts")
POLICIES = AxisInfo("policy", "policy", "", None, None, False, False, (), "policy")
TRACES = AxisInfo("trace", "trace", "", None, None, False, False, (), "trace")


@pytest.mark.parametrize(
    ("text", "axis", "values"),
    [
        ("16,32.5, 64", RATE, [16, 32.5, 64]),
        ("1e3", RATE, [1000.0]),
        ("16:64:4", RATE, [16, 32, 48, 64]),
        ("0.1:0.5:5", RATE, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ("64:16:4", RATE, [64, 48, 32, 16]),
        ("1:1000:4:log", RATE, [1, 10, 100, 1000]),
        ("1:64:7:log", COUNT, [1, 2, 4, 8, 16, 32, 64]),
        ("0:4:5", EXPERTS, [0, 1, 2, 3, 4]),
        ("auto,4", EXPERTS, ["auto", 4]),
        ("monde,hobbit", POLICIES, ["monde", "hobbit"]),
        (
            "monde,context-aware:mean_bits=3,alpha=0.4,hobbit:t1=0.2",
            POLICIES,
            ["monde", "context-aware:mean_bits=3,alpha=0.4", "hobbit:t1=0.2"],
        ),
        ("monde; static:alpha=1,mean_bits=2", POLICIES, ["monde", "static:alpha=1,mean_bits=2"]),
        ("monde,hobbt", POLICIES, ["monde", "hobbt"]),
        ("a.npz,b.npz", TRACES, ["a.npz", "b.npz"]),
        ("a,b.npz;c.npz", TRACES, ["a,b.npz", "c.npz"]),
        ("c:1:2:3", TRACES, ["c:1:2:3"]),
        ("a,b.npz;", TRACES, ["a,b.npz"]),
        ("static:alpha=1,mean_bits=2;", POLICIES, ["static:alpha=1,mean_bits=2"]),
    ],
)
def test_values_of_a_text(text: str, axis: AxisInfo, values: list[Any]) -> None:
    found = np.asarray(parse_values(text, axis), dtype=object).tolist()
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values] or axis is RATE


@pytest.mark.parametrize(
    ("text", "span"),
    [("1:8", Range(1, 8)), ("0.5:8:log", Range(0.5, 8, True)), (" 1 : 8 ", Range(1, 8)), ("8:1", Range(1, 8))],
)
def test_ranges_to_sample_from(text: str, span: Range) -> None:
    assert parse_values(text, RATE) == span
    assert parse_values(span.text, RATE) == span


@pytest.mark.parametrize(
    ("text", "axis", "words"),
    [
        ("", RATE, ["no values"]),
        ("1,,2", RATE, ["found ''"]),
        ("1,x", RATE, ["found 'x'", "GB/s"]),
        ("auto", RATE, ["found 'auto'"]),
        ("nan", RATE, ["found 'nan'"]),
        ("nan", EXPERTS, ["found 'nan'"]),
        ("1_000", RATE, ["found '1_000'"]),
        ("1:8:", RATE, ["start:stop:count"]),
        ("1:8:4:lin", RATE, ["start:stop:count"]),
        ("1:8:4:log:2", RATE, ["start:stop:count"]),
        ("1:8:1", RATE, ["count"]),
        ("1:8:2.5", RATE, ["count"]),
        ("1:8:99999999", RATE, ["count"]),
        ("0:8:4:log", RATE, ["above 0"]),
        ("8:8:4", RATE, ["equal"]),
        ("8:8", RATE, ["equal"]),
        ("1:8:5", COUNT, ["2.75", "1:8:8"]),
        ("1:8:3:log", COUNT, ["2.82843", "list the values"]),
        ("monde;;hobbit", POLICIES, ["empty"]),
        (";", TRACES, ["empty"]),
        ("a;;", TRACES, ["empty"]),
    ],
)
def test_refused_texts(text: str, axis: AxisInfo, words: list[str]) -> None:
    with pytest.raises(PerfModelError) as error:
        parse_values(text, axis)
    for word in (axis.name, *words):
        assert word in str(error.value)


@given(st.floats(1e-30, 1e30), st.floats(1.1, 1e6), st.integers(2, 50), st.booleans())
def test_values_of_ranges_have_thirteen_digits(start: float, factor: float, count: int, log: bool) -> None:
    found = parse_values(f"{start!r}:{start * factor!r}:{count}{':log' if log else ''}", RATE)
    assert isinstance(found, np.ndarray)
    for value in found[1:-1].tolist():
        assert value == float(f"{value:.12e}")


@pytest.mark.parametrize(
    "text",
    ["1:1.000000000001:100", "1:1.0000000000001:3:log", "1e-300:1.0000000000001e-300:50", "9:9.0000000000001:99"],
)
def test_ranges_that_are_too_narrow(text: str) -> None:
    with pytest.raises(PerfModelError, match=r"link\.bandwidth_gb_per_s.*too narrow for"):
        parse_values(text, RATE)


def test_ranges_beyond_all_numbers() -> None:
    with pytest.raises(PerfModelError, match="beyond all limits"):
        parse_values("-1.7e308:1.7e308:5", RATE)


@pytest.mark.parametrize(
    ("text", "axis", "count"),
    [
        ("1:2:7", RATE, 7), ("1:2:7:log", RATE, 7), ("1,2,3", RATE, 3), ("5", RATE, 1), ("1:2", RATE, 1),
        ("1:2:x", RATE, 1), ("a;b", TRACES, 2), ("c:1:2:3", TRACES, 1),
    ],
)  # fmt: skip
def test_values_are_counted_without_making_them(text: str, axis: AxisInfo, count: int) -> None:
    assert count_of(text, axis) == count


@given(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6), st.integers(2, 200), st.booleans())
def test_ranges_hold_both_ends_and_even_steps(start: float, stop: float, count: int, log: bool) -> None:
    if abs(stop - start) < 1e-6 * start:
        stop = 2 * start
    found = np.array(parse_values(f"{start!r}:{stop!r}:{count}{':log' if log else ''}", RATE))
    assert len(found) == count
    assert found[0] == start
    assert found[-1] == stop
    steps = np.diff(np.log(found)) if log else np.diff(found)
    expected = (np.log(stop / start) if log else stop - start) / (count - 1)
    # Values are rounded to thirteen digits, which shows in short steps.
    tolerance = 1.1e-12 * (1 if log else max(start, stop))
    assert (np.abs(steps - expected) <= tolerance + 1e-13 * max(start, stop)).all()


# ---- designs ----


def _design(sizes: list[int]) -> Design:
    return Design.of(Dim(f"d{i}", {f"a{i}": np.arange(size) + 10 * i}, PLAN) for i, size in enumerate(sizes))


@given(st.lists(st.integers(1, 6), max_size=4), st.integers(1, 300))
def test_blocks_are_a_regular_grid_of_contiguous_pieces(sizes: list[int], points: int) -> None:
    design = _design(sizes)
    flat = np.arange(design.size).reshape(design.shape)
    seen: list[int] = []
    chunks = design.chunks(points)
    blocks = design.blocks(points)
    assert np.prod(chunks, dtype=int) <= points
    for i, block in enumerate(blocks):
        numbers = flat[block.slices].ravel().tolist()
        assert block.index == i
        assert numbers == list(range(numbers[0], numbers[0] + block.size)), "contiguous in C order"
        for cut, size in zip(block.slices, chunks, strict=True):
            assert cut.start % size == 0
        seen += numbers
    assert seen == list(range(design.size))
    assert [block.slices for block in blocks[1:3]] == [blocks[i].slices for i in range(1, min(3, len(blocks)))]
    with pytest.raises(IndexError):
        blocks[len(blocks)]


@pytest.mark.parametrize(
    ("sizes", "points", "chunks"),
    [
        ([4, 5, 6], 30, (1, 5, 6)),
        ([4, 5, 6], 120, (4, 5, 6)),
        ([4, 5, 6], 12, (1, 2, 6)),
        ([100], 99, (50,)),
        ([], 7, ()),
    ],
)
def test_chunks_fill_inner_dimensions_first(sizes: list[int], points: int, chunks: tuple[int, ...]) -> None:
    assert _design(sizes).chunks(points) == chunks


def test_a_billion_points_are_not_made() -> None:
    design = _design([1000, 1000, 1000])
    blocks = design.blocks(100_000)
    assert design.size == 10**9
    assert blocks[-1].slices[0] == slice(999, 1000)
    assert blocks[-1].index == len(blocks) - 1


def test_dimensions_and_points_have_limits() -> None:
    assert len(_design([1] * MOST_DIMS).shape) == MOST_DIMS
    with pytest.raises(PerfModelError, match=r"33 dimensions; allowed at most 32: zip .* cases, .* fewer axes"):
        _design([1] * (MOST_DIMS + 1))
    assert _design([10**6, 10**6]).size == MOST_POINTS
    with pytest.raises(PerfModelError, match=r"1\.1e\+12 points; allowed at most 1e\+12"):
        _design([10**6, 11, 10**5])


def test_dimensions_are_sorted_by_what_they_change() -> None:
    names = [("h1", HARDWARE), ("p1", PLAN), ("policy", POLICY), ("h2", HARDWARE), ("p2", PLAN)]
    design = Design.of(Dim(name, {name: np.arange(2)}, group) for name, group in names)
    assert [dim.name for dim in design.dims] == ["policy", "p1", "p2", "h1", "h2"]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "b"])), min_size=1, max_size=30))
def test_groups_hold_every_position_once(rows: list[tuple[int, str]]) -> None:
    table = {
        "x": np.array([row[0] for row in rows]),
        "y": np.array([row[1] for row in rows], dtype=object),
        "z": np.arange(len(rows)),
    }
    found: dict[int, tuple[int, str]] = {}
    for values, place in groups(table, ["x", "y"]):
        for i in table["z"][place].tolist():
            assert i not in found
            found[i] = (values["x"], values["y"])
    assert [found[i] for i in range(len(rows))] == rows
    assert len(list(groups(table, ["x", "y"]))) == len(set(rows))
    assert [place for _, place in groups(table, [])] == [slice(None)]


# ---- zipped axes, samples, cases ----


@pytest.mark.parametrize(
    ("given_", "found"),
    [
        ((), []),
        ("a,b", [("a", "b")]),
        (["a", "b"], [("a", "b")]),
        (["a,b", "c, d"], [("a", "b"), ("c", "d")]),
        ([["a", "b"], ("c", "d", "e")], [("a", "b"), ("c", "d", "e")]),
    ],
)
def test_zipped_groups(given_: Any, found: list[tuple[str, ...]]) -> None:
    assert zip_groups(given_) == found


@pytest.mark.parametrize("bad", ["a", 3, [["a"]], [["a", 3]], ["a,"], [5], {"a": "b"}])
def test_refused_zips(bad: Any) -> None:
    with pytest.raises(PerfModelError, match="zip"):
        zip_groups(bad)


@pytest.mark.parametrize(
    ("text", "sample"),
    [
        ("sobol:1024", Sample("sobol", 1024, 0)),
        ("lhs:10:7", Sample("lhs", 10, 7)),
        ({"n": 8}, Sample("sobol", 8, 0)),
        ({"method": "lhs", "n": 8, "seed": 3}, Sample("lhs", 8, 3)),
        ({"n": np.int64(8), "seed": np.uint8(3)}, Sample("sobol", 8, 3)),
    ],
)
def test_samples_as_text_and_table(text: Any, sample: Sample) -> None:
    assert Sample.of(text) == sample
    assert Sample.of(sample._asdict()) == sample


@pytest.mark.parametrize(
    "bad",
    [
        "sobol", "sobol:x", "sobol:0", "sobol:8:-1", "sobl:8", "sobol:8:1:2", "sobol:99999999999999999999999",
        {"n": True}, {"n": 8, "sed": 1}, {"method": "lhs"}, {"n": 8.0}, {"n": 8, "seed": -1}, 7, None,
    ],
)  # fmt: skip
def test_refused_samples(bad: Any) -> None:
    with pytest.raises(PerfModelError, match="sample"):
        Sample.of(bad)


def test_more_samples_than_memory_holds_are_refused_before_they_are_drawn() -> None:
    with pytest.raises(PerfModelError, match=r"n: found 300000000, allowed .* grid"):
        Sample.of("lhs:300000000")
    ranges = {name: (Range(0, 1), False) for name in "abcd"}
    with pytest.raises(PerfModelError, match=f"allowed at most {MOST_NUMBERS // 4:,} points .* draw fewer"):
        draw(Sample("lhs", MOST_NUMBERS // 4 + 1), ranges)


@pytest.mark.parametrize("method", ["sobol", "lhs"])
def test_samples_fill_their_ranges_evenly(method: Any) -> None:
    ranges = {"a": (Range(2, 10), False), "b": (Range(1, 1000, True), False), "c": (Range(1, 4), True)}
    table, notes = draw(Sample(method, 1024, 5), ranges)
    a, b, c = table["a"], table["b"], table["c"]
    assert a.min() >= 2
    assert a.max() <= 10
    # Both methods put one point in every one of n equal cells of each axis (Sobol: for powers of two).
    assert len(np.unique(np.floor((a - 2) / 8 * 1024))) == 1024
    assert len(np.unique(np.floor(np.log(b) / np.log(1000) * 1024))) >= 1023
    assert c.dtype == np.int64
    assert np.bincount(c).tolist() == [0, 256, 256, 256, 256]
    assert "seed 5" in notes[0]
    assert len(notes) == 1
    again, _ = draw(Sample(method, 1024, 5), ranges)
    other, _ = draw(Sample(method, 1024, 6), ranges)
    assert np.array_equal(a, again["a"])
    assert not np.array_equal(a, other["a"])


def test_whole_numbers_of_a_log_range_have_their_share() -> None:
    table, _ = draw(Sample("lhs", 20_000, 1), {"a": (Range(1, 7, True), True)})
    share = np.bincount(table["a"], minlength=8)[1:] / 20_000
    expected = np.log(np.arange(2, 9) / np.arange(1, 8)) / np.log(8)
    np.testing.assert_allclose(share, expected, rtol=2e-3, atol=0)


def test_a_sobol_sequence_of_another_length_is_noted() -> None:
    _, notes = draw(Sample("sobol", 1000), {"a": (Range(0, 1), False)})
    assert "powers of two" in notes[1]


def test_cases_from_files_frames_and_columns(tmp_path: Path) -> None:
    columns = {"link.bandwidth_gb_per_s": [16.0, 32.5], "policy": ["monde", "hobbit"], "ndp.arrays": [4, 8]}
    frame = pd.DataFrame(columns)
    frame.to_csv(tmp_path / "cases.csv", index=False)
    frame.to_parquet(tmp_path / "cases.parquet")
    for source in (columns, frame, tmp_path / "cases.csv", str(tmp_path / "cases.parquet")):
        assert read_cases(source) == columns


def test_spaces_around_headers_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_text("link.latency_us, ndp.arrays ,policy\n1, 8,monde\n")
    assert read_cases(tmp_path / "cases.csv") == {"link.latency_us": [1], "ndp.arrays": [8], "policy": ["monde"]}
    with pytest.raises(PerfModelError, match="same name"):
        read_cases(pd.DataFrame([[1, 2]], columns=["a", " a"]))


def test_paths_in_a_file_of_cases_start_at_its_folder(tmp_path: Path) -> None:
    columns = {
        "trace": ["one.npz", "tiny-mixtral-32l-mini"], "policy": ["static:profile=p.npz,alpha=1", "monde"],
        "policy.profile": ["others", "sub/p.npz"], "ndp.arrays": [1, 2],
    }  # fmt: skip
    pd.DataFrame(columns).to_csv(tmp_path / "cases.csv", index=False)
    assert read_cases(tmp_path / "cases.csv") == {
        "trace": [str(tmp_path / "one.npz"), "tiny-mixtral-32l-mini"],
        "policy": [f"static:profile={tmp_path / 'p.npz'},alpha=1", "monde"],
        "policy.profile": ["others", str(tmp_path / "sub/p.npz")],
        "ndp.arrays": [1, 2],
    }
    assert read_cases(columns) == columns, "what is in memory is taken as it is"


@pytest.mark.parametrize("empty", ["", " "])
def test_no_path_of_cases(empty: str) -> None:
    with pytest.raises(PerfModelError, match=r"cases: found '.*', allowed the path"):
        read_cases(empty)


def test_a_csv_column_may_mix_numbers_and_words(tmp_path: Path) -> None:
    (tmp_path / "cases.csv").write_text("policy.gpu_experts\nauto\n4\n")
    assert read_cases(tmp_path / "cases.csv") == {"policy.gpu_experts": ["auto", 4]}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.csv", None, ["no such file"]),
        ("cases.txt", "a\n1\n", [".csv"]),
        ("empty.csv", "", ["cannot be read"]),
        ("header.csv", "a,b\n", ["holds no cases"]),
        ("gap.csv", "a,b\n1,2\n3,\n", ["column b", "case 2"]),
        ("ragged.csv", "a,b\n1,2\n3,4,5\n", ["cannot be read"]),
        ("binary.csv", b"\xff\xfe\x00a", ["cannot be read"]),
        ("text.parquet", "a,b\n1,2\n", ["cannot be read"]),
    ],
)
def test_refused_case_files(tmp_path: Path, name: str, content: Any, words: list[str]) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PerfModelError) as error:
        read_cases(path)
    assert "\n" not in str(error.value)
    for word in (name, *words):
        assert word in str(error.value)


@pytest.mark.parametrize(
    "bad",
    [{}, {"a": []}, {"a": [1], "b": [1, 2]}, {"a": 3}, {"a": "text"}, {3: [1]}, {"a": [None]}, {"a": [" "]}, 7, [1, 2]],
)
def test_refused_columns_of_cases(bad: Any) -> None:
    with pytest.raises(PerfModelError, match="cases"):
        read_cases(bad)


def test_two_columns_of_one_name_are_refused() -> None:
    frame = pd.DataFrame([[1, 2]], columns=["a", "a"])
    with pytest.raises(PerfModelError, match="same name"):
        read_cases(frame)


@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=20))
def test_numbers_of_a_csv_are_read_to_the_last_bit(values: list[float]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cases.csv"
        path.write_text("a\n" + "".join(f"{value!r}\n" for value in values))
        assert read_cases(path) == {"a": values}
