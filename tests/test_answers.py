"""Answers against brute force, closed forms and single evaluations."""

import contextlib
import itertools
import json
import math
import re
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import mixtral, recording

from perfmodel.answers import best, break_even, grid, pareto, sobol_indices, solve, tornado
from perfmodel.answers.conditions import Condition
from perfmodel.answers.dominance import nondominated
from perfmodel.answers.roots import Domain, Stretch, stretches
from perfmodel.answers.targets import parse_target
from perfmodel.errors import NoAnswerError, PerfModelError
from perfmodel.hardware import load_system
from perfmodel.run import evaluate
from perfmodel.scenario import Scenario

NEAR, GPU_ONLY = "context-aware:mean_bits=3,gpu_experts=2", "hobbit"
#: The same, free to vary in what the other text sets.
FREE_BITS, FREE_EXPERTS = "context-aware:gpu_experts=2", "context-aware:mean_bits=3"
SYSTEM = load_system("h100-cxl2-ndp")


def scenario(*policies: str, **changes: Any) -> Scenario:
    """A fast scenario: 8 prompt and 8 output tokens."""
    given = {"model": mixtral(), "system": SYSTEM, "trace": recording(), "prompt": 8, "output": 8, **changes}
    return Scenario.of(policy=policies or (NEAR,), **given)


def price(policy: str = NEAR, metric: str = "tpot_mean_s", output: int = 8, **values: Any) -> float:
    """One evaluation, without any of the machinery of the answers; ``__`` in a name stands for a dot."""
    system = SYSTEM.with_values({key.replace("__", "."): value for key, value in values.items()})
    found = evaluate(mixtral(), system, recording(), policy, prompt=8, output=output)
    return float(getattr(found, metric))


# ---- roots ----


@given(
    st.lists(st.floats(0.5, 900.0), min_size=1, max_size=4),
    st.sampled_from([(0.01, 1000.0), (0.0, 1000.0), (0.4, 1000.0)]),
)
def test_every_root_of_a_polynomial_is_found(roots: list[float], ends: tuple[float, float]) -> None:
    roots = sorted(roots)
    if any(b / a < 1.2 for a, b in itertools.pairwise(roots)):
        return

    def function(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.prod([np.log1p(x) - np.log1p(root) for root in roots], axis=0)

    found = stretches(function, Domain(*ends, False, 129))
    assert [one.cut for one in found[:-1]] == ["exact"] * len(roots)
    np.testing.assert_allclose([one.high for one in found[:-1]], roots, rtol=1e-7, atol=0)
    assert [one.state for one in found] == [(-1) ** (len(roots) - i) for i in range(len(roots) + 1)]
    assert (found[0].low, found[-1].high) == ends


@given(
    st.lists(st.integers(102, 999), min_size=1, max_size=5, unique=True),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_steps_gaps_and_ties_are_cut_where_they_are(places: list[int], seed: int, whole: bool) -> None:
    places = sorted(places)
    levels = np.random.default_rng(seed).choice([-0.5, 0.0, 0.25, np.nan], size=len(places) + 1)

    def function(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return levels[np.searchsorted(places, x, side="right")]

    found = stretches(function, Domain(100.0, 1000.0, whole, 2000))
    # Every value lies in a stretch of its own state, and neighbours in the list touch.
    for x in [*places, *(p - 1 for p in places), 100, 1000]:
        level = levels[np.searchsorted(places, x, side="right")]
        state = None if math.isnan(level) else int(np.sign(level))
        assert any(one.low <= x <= one.high and one.state == state for one in found)
    for left, right in itertools.pairwise(found):
        assert left.state != right.state
        assert left.cut == "step"
        assert right.low == (left.high + 1 if whole else math.nextafter(left.high, math.inf))
        assert right.low in places


def test_a_smooth_double_crossing_between_two_grid_points_is_found() -> None:
    domain = Domain(1.0, 2.0, False, 5)
    found = stretches(lambda x: (x - 1.6) * (x - 1.62), domain)
    np.testing.assert_allclose([one.high for one in found], [1.6, 1.62, 2.0], rtol=1e-12, atol=0)
    assert [one.state for one in found] == [1, -1, 1]


def test_a_touch_is_one_place_and_equality_can_last() -> None:
    touch = stretches(lambda x: (x / 50.0 - 1.0) ** 2, Domain(1.0, 1000.0, False, 65), also=[50.0])
    assert [one.state for one in touch] == [1, 0, 1]
    assert touch[1].low == touch[1].high
    np.testing.assert_allclose(touch[1].low, 50.0, rtol=1e-6, atol=0)
    tie = stretches(lambda x: np.minimum(x / 50.0 - 1.0, 0.0), Domain(1.0, 1000.0, False, 65))
    assert [one.state for one in tie] == [-1, 0]
    np.testing.assert_allclose(tie[0].high, 50.0, rtol=1e-9, atol=0)
    assert stretches(lambda x: 0.0 * x, Domain(1.0, 9.0, False, 65)) == [Stretch(1.0, 9.0, 0, "exact")]


@pytest.mark.parametrize("end", [0.01, 5000.0])
def test_a_root_at_an_end_of_the_range(end: float) -> None:
    found = stretches(lambda x: x / end - 1.0, Domain(0.01, 5000.0, False, 65))
    assert {one.state for one in found} == {0, 1 if end < 1 else -1}
    assert next((one.low, one.high) for one in found if one.state == 0) == (end, end)


@pytest.mark.parametrize("root", [1.0, 7.0, 4097.0, 77777.0, 1e6])
def test_whole_numbers_too_many_to_look_at_each(root: float) -> None:
    found = stretches(lambda x: np.where(x < root, 1.0, -1.0), Domain(1.0, 1e6, True, 65))
    assert found[-1].state == -1
    assert found[-1].low == root


def test_a_range_upside_down_is_refused() -> None:
    with pytest.raises(PerfModelError, match="low end below"):
        stretches(lambda x: x, Domain(2.0, 1.0, False, 65))


@pytest.mark.parametrize("gap", [(300.0, 400.0), (499.0, 501.0), (1.5, 900.0)])
@pytest.mark.parametrize("scan", [5, 65])
def test_gaps_between_two_sides(gap: tuple[float, float], scan: int) -> None:
    def function(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where((x > gap[0]) & (x < gap[1]), np.nan, np.where(x <= gap[0], -0.5, x / 1000.0))

    found = stretches(function, Domain(1.0, 1000.0, False, scan))
    assert [one.state for one in found] == [-1, None, 1]
    assert [one.cut for one in found[:-1]] == ["step", "step"]
    assert (found[0].high, found[2].low) == gap


# ---- targets ----


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("tpot_ms=50", "tpot_mean_s", 0.05),
        ("tpot_s=0.05", "tpot_mean_s", 0.05),
        ("tpot_mean_us = 50", "tpot_mean_s", 50e-6),
        ("tpot_p99.9_ms=1e2", "tpot_p99.9_s", 0.1),
        ("ttft_ms=200", "ttft_s", 0.2),
        ("end_to_end_s=3", "end_to_end_s", 3.0),
        ("busy_link_us=3", "busy_link_s", 3e-6),
        ("tok_per_s=20", "decode_tok_per_s", 20.0),
        ("decode_tok_per_s=20", "decode_tok_per_s", 20.0),
        ("gpu_memory_gb=80", "gpu_memory_bytes", 80e9),
        ("offload_memory_gib=2", "offload_memory_bytes", 2.0**31),
        ("hit_rate=0.5", "hit_rate", 0.5),
    ],
)
def test_targets(text: str, name: str, value: float) -> None:
    found = parse_target(text)
    assert found.metric.name == name
    np.testing.assert_allclose(found.value, value, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("tpot_ms", "NAME=VALUE"),
        ("tpot=50", "'tpot' has no unit; allowed tpot_ms or tpot_mean_s"),
        ("ttft=50", "'ttft' has no unit; allowed ttft_ms or ttft_s"),
        ("tpot_p99=50", "tpot_p99_ms or tpot_p99_s"),
        ("gpu_memory=80", "gpu_memory_gb or gpu_memory_bytes"),
        ("tpt_ms=5", "tpot_ms"),
        ("tpot_p101_ms=5", "tpot_pQ_s"),
        ("tok_per_ms=5", "unknown metric"),
        ("tpot_ms=0", "above 0"),
        ("tpot_ms=-1", "above 0"),
        ("tpot_ms=nan", "above 0"),
        ("tpot_ms=inf", "above 0"),
        ("tpot_ms=1_0", "above 0"),
        ("tpot_ms=", "above 0"),
        ("=5", "unknown metric"),
        ("tpot_ms=5 ms", "above 0"),
        ("tpot_p050_ms=5", "its name is tpot_p50_s"),
        ("tpot_p50.0_s=5", "its name is tpot_p50_s|unknown metric"),
    ],
)
def test_bad_targets(text: str, word: str) -> None:
    with pytest.raises(PerfModelError, match=word):
        parse_target(text)


# ---- pareto ----


def sweep_dataset(seed: int = 0, shape: tuple[int, ...] = (2, 3, 4), ties: bool = True) -> xr.Dataset:
    """A sweep by hand: three axes, three metrics, with ties and points without a value."""
    rng = np.random.default_rng(seed)
    dims = ("policy", "policy.mean_bits", "link.bandwidth_gb_per_s")
    data = {}
    for name in ("tpot_mean_s", "tpot_p99_s", "decode_tok_per_s"):
        values = rng.integers(1, 6, shape).astype(float) if ties else rng.random(shape)
        values[rng.random(shape) < 0.1] = np.nan
        data[name] = (dims, values, {"units": "s", "long_name": name})
    coords = {
        "policy": np.array([f"policy-{i}" for i in range(shape[0])], dtype=object),
        "policy.mean_bits": np.arange(1.0, shape[1] + 1),
        "link.bandwidth_gb_per_s": np.arange(10.0, 10.0 * shape[2] + 1, 10.0),
        "model": "mixtral-8x7b",
    }
    return xr.Dataset(data, coords, {"title": "by hand", "perfmodel_version": "0"})


def front_by_definition(values: NDArray[np.float64]) -> set[int]:
    """Rows without NaN that no row dominates; of equal rows the first."""
    rows = [tuple(row) for row in values.tolist()]
    found = set()
    for i, row in enumerate(rows):
        if any(math.isnan(v) for v in row):
            continue
        others = [r for j, r in enumerate(rows) if j != i and not any(math.isnan(v) for v in r)]
        beaten = any(all(a <= b for a, b in zip(r, row, strict=True)) and r != row for r in others)
        if not beaten and row not in rows[:i]:
            found.add(i)
    return found


@given(st.integers(1, 5), st.integers(1, 60), st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_fronts_by_definition(columns: int, rows: int, levels: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, levels, (rows, columns)).astype(float)
    found = nondominated(values)
    assert set(found.tolist()) == front_by_definition(values)
    assert values[found].tolist() == sorted(values[found].tolist())


def test_large_fronts_of_many_objectives() -> None:
    rng = np.random.default_rng(1)
    on_sphere = np.abs(rng.normal(size=(700, 4)))
    on_sphere /= np.linalg.norm(on_sphere, axis=1, keepdims=True)
    behind = on_sphere[rng.integers(0, 700, 2000)] + rng.random((2000, 4))
    found = nondominated(np.concatenate((behind, 1.0 + on_sphere - 1.0)))
    assert set(found.tolist()) == set(range(2000, 2700))


@pytest.mark.parametrize("slab", [1, 3, 4, 5, 12, 24, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_pareto_of_a_dataset(monkeypatch: pytest.MonkeyPatch, seed: int, slab: int) -> None:
    monkeypatch.setattr(grid, "SLAB_POINTS", slab)
    dataset = sweep_dataset(seed)
    found = pareto(dataset, minimise=["tpot_mean_s", "link.bandwidth_gb_per_s"], maximise="decode_tok_per_s")
    frame = dataset.to_dataframe(dim_order=list(dataset.tpot_mean_s.dims)).reset_index()
    columns = frame[["tpot_mean_s", "link.bandwidth_gb_per_s", "decode_tok_per_s"]].to_numpy() * [1, 1, -1]
    expected = frame.iloc[sorted(front_by_definition(columns))]
    got = found.to_dataframe().reset_index(drop=True)
    assert set(got.columns) == set(frame.columns)
    assert {tuple(map(str, row)) for row in got[frame.columns].to_numpy()} == {
        tuple(map(str, row)) for row in expected.to_numpy()
    }
    assert found.tpot_mean_s.attrs["units"] == "s"
    assert found.tpot_mean_s.values.tolist() == sorted(found.tpot_mean_s.values.tolist())
    assert json.loads(found.attrs["objectives"])["decode_tok_per_s"] == "maximise"


def test_pareto_of_samples_and_zipped_axes() -> None:
    data = {"tpot_mean_s": ("sample", [3.0, 1.0, 2.0, np.nan])}
    dataset = xr.Dataset(data, {"sample": np.arange(4), "ndp.arrays": ("sample", [1, 4, 2, 9])})
    found = pareto(dataset, ["tpot_mean_s", "ndp.arrays"])
    assert found["ndp.arrays"].values.tolist() == [4, 2, 1]
    assert found["sample"].values.tolist() == [1, 2, 0]


def test_axes_by_their_last_part() -> None:
    dataset = sweep_dataset()
    full = pareto(dataset, ["tpot_mean_s", "policy.mean_bits"], "link.bandwidth_gb_per_s")
    assert pareto(dataset, ["tpot_mean_s", "mean_bits"], "bandwidth_gb_per_s").identical(full)
    by_name = best(dataset, constraint="policy.mean_bits >= 2 and link.bandwidth_gb_per_s < 30")
    assert best(dataset, constraint="mean_bits >= 2 and bandwidth_gb_per_s < 30").identical(by_name)
    assert best(dataset, "mean_bits").identical(best(dataset, "policy.mean_bits"))
    twice = dataset.assign_coords({"static.mean_bits": ("policy.mean_bits", np.arange(3.0))})
    with pytest.raises(PerfModelError, match="did you mean"):
        pareto(twice, "mean_bits")


@pytest.mark.parametrize(
    ("minimise", "maximise", "word"),
    [
        (["tpot_men_s"], [], "did you mean 'tpot_mean_s'"),
        ([], [], "at least one"),
        (["tpot_mean_s"], ["tpot_mean_s"], "twice"),
        (["policy"], [], "words"),
        ([3], [], "objective"),
    ],
)
def test_bad_objectives(minimise: Any, maximise: Any, word: str) -> None:
    with pytest.raises(PerfModelError, match=word):
        pareto(sweep_dataset(), minimise, maximise)


def test_no_dataset_and_no_points() -> None:
    with pytest.raises(PerfModelError, match="allowed an xarray"):
        pareto({"a": 1}, ["a"])  # type: ignore[arg-type]
    with pytest.raises(PerfModelError, match="no points"):
        best(xr.Dataset())
    empty = sweep_dataset().map(lambda one: one * np.nan)
    with pytest.raises(NoAnswerError, match="none of 24 points has a value of tpot_mean_s"):
        pareto(empty, ["tpot_mean_s"])
    with pytest.raises(NoAnswerError, match="none of 24 points"):
        best(empty)


# ---- best and conditions ----

CONDITIONS: dict[str, Any] = {
    "tpot_p99_s < 3": lambda f: f.p99 < 3,
    "tpot_p99_s <= 2e0 and decode_tok_per_s >= 3": lambda f: (f.p99 <= 2) & (f.rate >= 3),
    "1 < tpot_p99_s <= 4 or policy == 'policy-1'": lambda f: ((f.p99 > 1) & (f.p99 <= 4)) | (f.policy == "policy-1"),
    "not (link.bandwidth_gb_per_s > 20)": lambda f: f.link <= 20,
    "policy in ('policy-1', 'x') and -policy.mean_bits < -1.5": lambda f: (f.policy == "policy-1") & (f.bits > 1.5),
    "tpot_p99_s * 2 + 1 != decode_tok_per_s / 1": lambda f: f.p99 * 2 + 1 != f.rate,
    "tpot_p99_s > decode_tok_per_s - policy.mean_bits": lambda f: f.p99 > f.rate - f.bits,
}
SHORT = {
    "tpot_p99_s": "p99",
    "decode_tok_per_s": "rate",
    "link.bandwidth_gb_per_s": "link",
    "policy.mean_bits": "bits",
    "tpot_mean_s": "mean",
}


@pytest.mark.parametrize("text", CONDITIONS)
@pytest.mark.parametrize("slab", [1, 5, 1000])
@pytest.mark.parametrize("metric", ["tpot_mean_s", "decode_tok_per_s"])
def test_best_by_definition(monkeypatch: pytest.MonkeyPatch, text: str, slab: int, metric: str) -> None:
    monkeypatch.setattr(grid, "SLAB_POINTS", slab)
    dataset = sweep_dataset(3)
    frame = dataset.to_dataframe(dim_order=list(dataset.tpot_mean_s.dims)).reset_index().rename(columns=SHORT)
    known = [SHORT[name] for name in SHORT if name in text or name == metric]
    left = frame[CONDITIONS[text](frame) & frame[known].notna().all(axis=1)]
    values = left[SHORT[metric]]
    expected = frame.loc[values.idxmin() if metric == "tpot_mean_s" else values.idxmax()]
    found = best(dataset, metric, text)
    assert found.sizes == {}
    for name, short in [*SHORT.items(), ("policy", "policy")]:
        got = found[name].values.item()
        assert got == expected[short] or (math.isnan(got) and math.isnan(expected[short]))


def test_best_by_a_function() -> None:
    dataset = sweep_dataset(5)
    by_text = best(dataset, constraint="link.bandwidth_gb_per_s >= 30")
    assert best(dataset, constraint=lambda one: one["link.bandwidth_gb_per_s"] >= 30).identical(by_text)
    with pytest.raises(PerfModelError, match="true or false for every point"):
        best(dataset, constraint=lambda one: one["tpot_mean_s"])
    with pytest.raises(PerfModelError, match="true or false for every point"):
        best(dataset, constraint=lambda one: np.ones(7, np.bool_))
    with pytest.raises(PerfModelError, match="no point of 24 meets"):
        best(dataset, constraint=lambda one: one["tpot_mean_s"] < 0)
    with pytest.raises(PerfModelError, match="constraint: found int"):
        best(dataset, constraint=3)  # type: ignore[arg-type]


def test_how_close_it_came() -> None:
    data = {"tpot_mean_s": ("link.x", [0.4, 0.2, 0.1]), "gpu_memory_bytes": ("link.x", [10.0, 20.0, 40.0])}
    dataset = xr.Dataset(data, {"link.x": [1.0, 2.0, 3.0]})
    with pytest.raises(NoAnswerError) as error:
        best(dataset, constraint="tpot_mean_s <= 0.15 and gpu_memory_bytes <= 16")
    text = str(error.value)
    # Misses of the points: 0.4/0.15 - 1 = 1.67, max(0.33, 0.25), 40/16 - 1 = 1.5.
    for words in ("tpot_mean_s <= 0.15 holds at 1", "gpu_memory_bytes <= 16 holds at 1", "at link.x=2", "by 33.3 %"):
        assert words in text
    assert error.value.details == {"nearest": {"link.x": 2.0, "tpot_mean_s": 0.2, "gpu_memory_bytes": 20.0}}
    with pytest.raises(NoAnswerError, match=r"at link.x=3, has tpot_mean_s=0.1 and misses tpot_mean_s < 0.1 only just"):
        best(dataset, constraint="tpot_mean_s < 0.1")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "condition: found ''"),
        ("a <", "cannot be read"),
        ("a", "not understood"),
        ("a + 1", "not understood"),
        ("1 < 2", "not understood"),
        ("a ** 2 < 1", "not understood"),
        ("a < 1j", "not understood"),
        ("a < True", "unknown name 'True'"),
        ("b.d < 1", "did you mean 'b.c'"),
        ("words < 'x'", "allowed == != in"),
        ("words == 1", "another kind"),
        ("a == 'x'", "another kind"),
        ("a + words < 1", "calculates with words"),
        ("a is 1", "unknown name 'is'"),
        ("a in b.c", "not understood"),
        ("__import__('os').system('true') == 0", "unknown name"),
        ("a.__class__ == 1", "unknown name"),
        ("(lambda: a)() < 1", "unknown name 'lambda"),
        ("[a for a in a] < 1", "unknown name 'for'"),
        ("(a := 1) < 1", "not understood"),
        ("a < f'{a}'", "unknown name 'f'"),
        ("a[0] < 1", "not understood"),
        ("a < 9" + "9" * 400, "too large"),
        ("(" * 300 + "a" + ")" * 300 + " < 1", "cannot be read"),
        ("not " * 100 + "a < 1", "too deeply"),
        ("a < 1 " * 500, "condition: found"),
    ],
)
def test_bad_conditions(text: str, word: str) -> None:
    data: dict[str, NDArray[Any]] = {"a": np.ones(2), "b.c": np.ones(2), "words": np.array(["x", "y"], dtype=object)}
    with pytest.raises(PerfModelError, match=word):
        Condition(text, list(data))(data.__getitem__)


WORDS = st.sampled_from(
    [
        *"ab<>=()+-*/,.:'\"\\[]{}#@ \n\0",
        "a",
        "b.c",
        "words",
        "and",
        "or",
        "not",
        "in",
        "is",
        "if",
        "'x'",
        "1",
        "0x1",
        "1e9",
    ]
)


@given(
    st.one_of(
        st.text(max_size=30), st.lists(WORDS, max_size=12).map(" ".join), st.lists(WORDS, max_size=12).map("".join)
    )
)
def test_any_text_is_judged_or_refused(text: str) -> None:
    data: dict[str, NDArray[Any]] = {"a": np.ones(2), "b.c": np.ones(2), "words": np.array(["x", "y"], dtype=object)}
    with contextlib.suppress(PerfModelError):
        verdict = Condition(text, list(data))(data.__getitem__)
        assert verdict.holds.shape == verdict.miss.shape == (2,)
        assert (verdict.holds == (verdict.miss == 0)).all()
    with contextlib.suppress(PerfModelError):
        assert parse_target(text).value > 0


def test_equal_means_as_printed() -> None:
    printed = np.geomspace(16.0, 450.0, 40)
    data: dict[str, Any] = {"x": printed, "n": np.arange(1000000.0, 1000040.0)}
    for i, value in enumerate(printed.tolist()):
        for text in (f"{value:.6g}", repr(value), f"{value * (1 + 1e-10)!r}"):
            assert np.flatnonzero(Condition(f"x == {text}", ["x"])(data.__getitem__).holds).tolist() == [i]
            assert np.flatnonzero(~Condition(f"x != {text}", ["x"])(data.__getitem__).holds).tolist() == [i]
            assert np.flatnonzero(Condition(f"x in ({text}, -1)", ["x"])(data.__getitem__).holds).tolist() == [i]
        assert not Condition(f"x == {value * (1 + 1e-4):.9g}", ["x"])(data.__getitem__).holds.any()
    # Whole numbers are what they are.
    assert np.flatnonzero(Condition("n == 1000001", ["n"])(data.__getitem__).holds).tolist() == [1]


def test_conditions_in_other_units() -> None:
    dataset = xr.Dataset(
        {
            "tpot_mean_s": ("link.x", [0.04, 0.02, 0.01]),
            "gpu_memory_bytes": ("link.x", [10e9, 20e9, 40e9]),
            "decode_tok_per_s": ("link.x", [25.0, 50.0, 100.0]),
        },
        {"link.x": [1.0, 2.0, 3.0]},
    )
    for text, place in (
        ("tpot_ms > 15 and tpot_ms < 25", 2.0),
        ("tpot_mean_us >= 20000", 2.0),
        ("gpu_memory_gb <= 15", 1.0),
        ("tok_per_s < 80", 2.0),
    ):
        assert float(best(dataset, constraint=text)["link.x"]) == place
    with pytest.raises(NoAnswerError, match=r"has tpot_mean_s=0.01 and misses tpot_ms < 5 by 100 %"):
        best(dataset, constraint="tpot_ms < 5")
    for word, forms in (("tpot", "tpot_ms or tpot_mean_s"), ("gpu_memory", "gpu_memory_gb or gpu_memory_bytes")):
        with pytest.raises(PerfModelError, match=f"'{word}' has no unit; allowed {forms}"):
            best(dataset, constraint=f"{word} < 50")


def test_several_conditions_hold_together() -> None:
    dataset = sweep_dataset(3)
    one = "link.bandwidth_gb_per_s > 20 and policy == 'policy-1'"
    assert best(dataset, constraint=[one, "mean_bits > 1 or mean_bits < 0"]).identical(
        best(dataset, constraint=f"({one}) and (mean_bits > 1 or mean_bits < 0)")
    )
    for wrong in (["mean_bits > 1) or (mean_bits > 0"], ["mean_bits > 1", 3], [], ["mean_bits > 1", ""]):
        with pytest.raises(PerfModelError):
            best(dataset, constraint=wrong)
    with pytest.raises(NoAnswerError, match=r"mean_bits > 1 holds at .*, policy.mean_bits < 0 holds at 0"):
        best(dataset, constraint=["mean_bits > 1", "mean_bits < 0"])


def test_fronts_under_a_condition() -> None:
    dataset = sweep_dataset(2, ties=False)
    held = pareto(dataset, ["tpot_mean_s", "tpot_p99_s"], constraint="link.bandwidth_gb_per_s == 20")
    part = pareto(dataset.sel({"link.bandwidth_gb_per_s": [20.0]}), ["tpot_mean_s", "tpot_p99_s"])
    assert held.drop_attrs().equals(part.drop_attrs())
    by_function = pareto(
        dataset, ["tpot_mean_s", "tpot_p99_s"], constraint=lambda one: one["link.bandwidth_gb_per_s"] == 20
    )
    assert by_function.equals(held)
    with pytest.raises(NoAnswerError, match=r"pareto: no point of 24 meets .*; the nearest, at .* has "):
        pareto(dataset, "tpot_mean_s", constraint="tpot_p99_s < -1")


def test_metrics_that_were_added() -> None:
    dataset = sweep_dataset(1, ties=False)
    dataset = dataset.assign(edp=dataset.tpot_mean_s * dataset.tpot_p99_s)
    least, most = float(dataset.edp.min()), float(dataset.edp.max())
    assert float(best(dataset, "edp").edp) == least
    assert float(best(dataset, "edp", maximise=True).edp) == most
    assert float(best(dataset, "tpot_mean_s", f"edp >= {most!r}").edp) == most
    rate = dataset.decode_tok_per_s
    assert float(best(dataset, "decode_tok_per_s").decode_tok_per_s) == float(rate.max())
    assert float(best(dataset, "decode_tok_per_s", maximise=False).decode_tok_per_s) == float(rate.min())
    assert set(pareto(dataset, "edp").edp.values.tolist()) == {least}
    with pytest.raises(PerfModelError, match=r"did you mean 'edp'.*allowed decode_tok_per_s, edp, link"):
        best(dataset, "edpp")
    with pytest.raises(
        PerfModelError, match=r"allowed decode_tok_per_s, edp, link.*, model, policy, policy.mean_bits, t"
    ):
        best(dataset, constraint="nothing < 1")
    with pytest.raises(PerfModelError, match="maximise: found 'no'"):
        best(dataset, maximise="no")  # type: ignore[arg-type]


def test_axes_that_do_not_matter() -> None:
    times = np.array([[[3.0, 3.0], [2.0, 2.0]], [[4.0, 5.0], [6.0, np.nan]]])
    data = {"tpot_mean_s": (("policy", "mean_bits", "link.x"), times)}
    coords = {"policy": ["a", "b"], "mean_bits": [1.0, 2.0], "link.x": [1.0, 2.0]}
    dataset = xr.Dataset(data, coords)
    assert json.loads(best(dataset).attrs["any"]) == ["link.x"]
    # It matters to the condition, to another policy, or where a point has no value.
    assert json.loads(best(dataset, constraint="link.x > 1").attrs["any"]) == []
    assert json.loads(best(dataset, constraint="policy == 'b'").attrs["any"]) == []
    assert json.loads(best(dataset.isel({"policy": [1], "mean_bits": [1]})).attrs["any"]) == []


def test_the_order_of_a_file_does_not_matter() -> None:
    dataset = sweep_dataset(4)
    turned = dataset[list(reversed(list(dataset.variables)))]
    for one in (dataset, turned):
        found = best(one)
        assert [str(name) for name in found.coords] == [
            "model",
            "policy",
            "policy.mean_bits",
            "link.bandwidth_gb_per_s",
        ]
        assert [str(name) for name in found.data_vars] == ["tpot_mean_s", "decode_tok_per_s", "tpot_p99_s"]


def test_notes_are_those_of_the_points() -> None:
    from perfmodel.sweeps.api import sweep

    whole = sweep(
        policy=("context-aware", "hobbit"),
        axes={"gpu_experts": [0, 2, 3], "link.bandwidth_gb_per_s": [16.0, 100.0, 450.0]},
        prompt=8,
        output=8,
        progress=False,
    )
    notes = json.loads(whole.attrs["notes"])
    assert "context-aware: 0 to 3 of 8 experts a layer on the GPU" in notes
    assert any(note.startswith("hobbit: HOBBIT split") for note in notes)
    assert sum(note.startswith("link.bandwidth_gb_per_s 100 to 450 is above the stated peak") for note in notes) == 1
    assert "the routing is of tiny-mixtral-32l, not of mixtral-8x7b" in notes
    one = best(whole, constraint="policy == 'context-aware' and gpu_experts == 2 and bandwidth_gb_per_s < 200")
    own = json.loads(one.attrs["notes"])
    assert "2 of 8 experts a layer on the GPU" in own
    assert any(note.startswith("link.bandwidth_gb_per_s 100 is above the stated peak") for note in own)
    assert not any("HOBBIT" in note for note in own)
    front = pareto(whole, "tpot_mean_s", "policy.gpu_experts", "policy == 'context-aware' and bandwidth_gb_per_s < 20")
    assert front["policy.gpu_experts"].values.tolist() == [3]
    assert "3 of 8 experts a layer on the GPU" in json.loads(front.attrs["notes"])
    lost = whole.assign_attrs(scenario="{}")
    assert json.loads(best(lost).attrs["notes"]) == notes


# ---- solve ----


@pytest.mark.parametrize("policy", [NEAR, GPU_ONLY])
def test_the_whole_request_at_a_solution(policy: str) -> None:
    target = price(policy, link__bandwidth_gb_per_s=5.0)
    (one,) = solve(scenario(policy), "link.bandwidth_gb_per_s", ("tpot_mean_s", target)).crossings
    for name in ("ttft_s", "migration_s", "decode_s", "end_to_end_s"):
        expected = price(policy, name, link__bandwidth_gb_per_s=one.value)
        np.testing.assert_allclose(getattr(one, name), expected, rtol=1e-12, atol=0)


def test_a_decode_target_that_is_met_while_something_else_takes_the_time() -> None:
    target = price(link__bandwidth_gb_per_s=0.02)
    found = solve(scenario(), "link.bandwidth_gb_per_s", ("tpot_mean_s", target))
    (one,) = found.crossings
    assert one.migration_s is not None
    assert one.end_to_end_s is not None
    assert one.migration_s > 0.9 * one.end_to_end_s
    (note,) = [note for note in found.notes if "end to end" in note]
    assert f"migration takes {one.migration_s:.4g} s of {one.end_to_end_s:.4g} s end to end" in note
    whole = solve(scenario(), "link.bandwidth_gb_per_s", ("end_to_end_s", one.end_to_end_s))
    assert not any("end to end" in note for note in whole.notes)


def test_solve_beside_other_settings() -> None:
    slow = solve(scenario(), "link.bandwidth_gb_per_s", "tpot_ms=150", settings={"ndp.arrays": 4})
    assert slow.settings == {"ndp.arrays": 4}
    reached = price(link__bandwidth_gb_per_s=slow.value, ndp__arrays=4)
    np.testing.assert_allclose(reached, 0.15, rtol=1e-9, atol=0)
    for settings, word in (
        ({"link.bandwidth_gb_per_s": 3}, "other axes than"),
        ({"policy": "monde"}, "other axes than"),
        ({"ndp.arrays": 1.5}, "whole"),
        (["ndp.arrays"], "one value by axis"),
    ):
        with pytest.raises(PerfModelError, match=word):
            solve(scenario(), "link.bandwidth_gb_per_s", "tpot_ms=150", settings=settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "metric", "side"),
    [
        ("link.bandwidth_gb_per_s", 7.5, "tpot_mean_s", "from here up"),
        ("link.latency_us", 40.0, "tpot_p99_s", "from here down"),
        ("gpu.memory_bandwidth_gb_per_s", 2500.0, "decode_tok_per_s", "from here up"),
        ("ndp.dram_bandwidth_gb_per_s", 300.0, "end_to_end_s", "from here up"),
        ("link.n_half_kb", 90.0, "tpot_p50_s", "from here down"),
        ("gpu.layer_overhead_us", 12.0, "tpot_max_s", "from here down"),
    ],
)
def test_solve_finds_the_value_again(key: str, value: float, metric: str, side: str) -> None:
    target = price(metric=metric, **{key.replace(".", "__"): value})
    found = solve(scenario(), key, (metric, target))
    assert found.value is not None
    np.testing.assert_allclose(found.value, value, rtol=1e-6, atol=0)
    reached = price(metric=metric, **{key.replace(".", "__"): found.value})
    np.testing.assert_allclose(reached, target, rtol=1e-9, atol=0)
    (crossing,) = found.crossings
    assert (crossing.kind, crossing.side) == ("exact", side)
    np.testing.assert_allclose(crossing.reached, reached, rtol=1e-12, atol=0)
    limits = SYSTEM.limits_of(key)
    ends = (found.value, limits.high) if side == "from here up" else (limits.low, found.value)
    assert found.met == (ends,)


@pytest.mark.parametrize(("key", "high"), [("ndp.arrays", 40), ("ndp.cols", 24)])
def test_whole_numbers_one_by_one(key: str, high: int) -> None:
    prices = {n: price(**{key.replace(".", "__"): n}) for n in range(1, high + 1)}
    target = (min(prices.values()) * max(prices.values())) ** 0.5
    found = solve(scenario(), key, ("tpot_mean_s", target), low=1, high=high)
    inside = {n for low, top in found.met for n in range(int(low), int(top) + 1)}
    assert inside == {n for n, one in prices.items() if one <= target}
    assert found.crossings
    for one in found.crossings:
        assert one.kind == "step"
        assert one.beyond is not None
        assert abs(one.value - one.beyond) == 1
        np.testing.assert_allclose(one.reached, prices[int(one.value)], rtol=1e-12, atol=0)
        np.testing.assert_allclose(one.reached_beyond, prices[int(one.beyond)], rtol=1e-12, atol=0)
    assert not any("searched" in note for note in found.notes)  # every value was looked at


def test_policy_options_with_several_crossings_and_no_plan() -> None:
    prices: dict[int, float] = {}
    refused = set()
    for count in range(9):
        try:
            prices[count] = price(f"context-aware:mean_bits=3,gpu_experts={count}")
        except PerfModelError:
            refused.add(count)
    assert refused  # eight experts a layer are more than the GPU holds
    target = sorted(prices.values())[len(prices) // 2]
    found = solve(scenario(FREE_EXPERTS), "gpu_experts", ("tpot_mean_s", target))
    assert found.axis == "policy.gpu_experts"
    inside = {n for low, top in found.met for n in range(int(low), int(top) + 1)}
    assert inside == {n for n, one in prices.items() if one <= target}
    assert any("does not fit" in note for note in found.notes)


def test_mean_bits_move_in_steps() -> None:
    low, high = price("context-aware:mean_bits=1,gpu_experts=2"), price("context-aware:mean_bits=4,gpu_experts=2")
    target = (low + high) / 2
    found = solve(scenario(FREE_BITS), "policy.mean_bits", ("tpot_mean_s", target))
    (crossing,) = found.crossings
    assert (crossing.kind, crossing.side) == ("step", "from here down")
    assert crossing.beyond == math.nextafter(crossing.value, math.inf)
    assert price(f"context-aware:mean_bits={crossing.value!r},gpu_experts=2") <= target
    assert price(f"context-aware:mean_bits={crossing.beyond!r},gpu_experts=2") > target


def test_capacity_is_found_to_the_byte() -> None:
    # The plan that is chosen automatically grows with the memory: the metric jumps where one more expert fits.
    policy = "context-aware:mean_bits=3"
    target = price(policy, gpu__memory_capacity_gb=30.0) * (1 + 1e-6)
    found = solve(scenario(policy), "gpu.memory_capacity_gb", ("tpot_mean_s", target))
    crossing = found.crossings[0]
    assert crossing.kind == "step"
    assert crossing.beyond == math.nextafter(crossing.value, -math.inf)
    assert price(policy, gpu__memory_capacity_gb=crossing.value) <= target
    assert crossing.value <= 30.0
    missed = crossing.reached_beyond
    assert missed is None or missed > target


def test_output_tokens() -> None:
    totals = {n: price(metric="end_to_end_s", output=n) for n in range(1, 25)}
    target = (totals[17] + totals[18]) / 2
    found = solve(scenario(), "output", ("end_to_end_s", target), high=24)
    assert found.axis == "workload.output"
    assert found.met == ((1.0, 17.0),)
    assert found.value == 17.0
    without = solve(scenario(), "workload.output", ("end_to_end_s", target))
    assert without.met == ((1.0, 17.0),)
    assert any("searched up to 4096" in note for note in without.notes)


def test_more_is_better_for_rates() -> None:
    rate = price(metric="decode_tok_per_s", gpu__memory_bandwidth_gb_per_s=3000.0)
    found = solve(scenario(), "gpu.memory_bandwidth_gb_per_s", f"tok_per_s={rate!r}")
    assert found.goal == "at least"
    assert found.crossings[0].side == "from here up"


def test_met_everywhere_and_nowhere() -> None:
    everywhere = solve(scenario(), "link.bandwidth_gb_per_s", "tpot_ms=1e6", low=1, high=100)
    assert everywhere.value is None
    assert everywhere.crossings == ()
    assert everywhere.met == ((1.0, 100.0),)
    least = price(link__bandwidth_gb_per_s=100.0)
    with pytest.raises(NoAnswerError, match="never at most") as error:
        solve(scenario(), "link.bandwidth_gb_per_s", "tpot_ms=1", low=1, high=100)
    assert f"the best is {least:.6g} s, at 100 GB/s" in str(error.value)
    np.testing.assert_allclose(error.value.details["nearest"]["tpot_mean_s"], least, rtol=1e-12, atol=0)
    with pytest.raises(NoAnswerError, match="no effect"):
        solve(scenario(), "ndp.dram.n_faw", "tpot_ms=1")


@pytest.mark.parametrize(
    ("axis", "target", "changes", "word"),
    [
        ("link.bandwith_gb_per_s", "tpot_ms=9", {}, "did you mean"),
        ("policy.overlap", "tpot_ms=9", {}, "words"),
        ("policy.nothing", "tpot_ms=9", {}, "none of the policies"),
        (3, "tpot_ms=9", {}, "name of an axis"),
        ("ndp.arrays", "tpot_ms=9", {"low": 1.5}, "whole"),
        ("ndp.arrays", "tpot_ms=9", {"low": 9, "high": 3}, "low end below"),
        ("link.bandwidth_gb_per_s", "tpot_ms=9", {"high": 1e9}, "allowed numbers from"),
        ("link.bandwidth_gb_per_s", "tpot_ms=9", {"low": float("nan")}, "allowed numbers from"),
        ("gpu_experts", "tpot_ms=9", {"high": "auto"}, "allowed a number"),
        ("link.bandwidth_gb_per_s", ("tpot_ms", True), {}, "above 0"),
        ("link.bandwidth_gb_per_s", "tpot_ms=9", {"policy": "hobit"}, "allowed one of"),
    ],
)
def test_bad_questions(axis: Any, target: Any, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(PerfModelError, match=word):
        solve(scenario(FREE_EXPERTS), axis, target, **changes)


def test_numbers_of_numpy_are_numbers() -> None:
    one, two = scenario(), scenario(NEAR, GPU_ONLY)
    axis = "link.bandwidth_gb_per_s"
    assert solve(one, axis, ("tpot_s", np.float64(0.3))) == solve(one, axis, ("tpot_s", 0.3))
    assert solve(one, axis, ("tpot_s", np.int64(1)), low=np.float32(0.5)) == solve(one, axis, "tpot_s=1", low=0.5)
    assert solve(two, axis, "tpot_s=0.3", policy=np.int64(1)) == solve(two, axis, "tpot_s=0.3", policy=1)
    share = np.float32(0.25)
    assert tornado(one, [axis], change=share).equals(tornado(one, [axis], change=0.25))
    assert break_even(two, (axis, np.int64(1), np.float64(50)), np.int64(0)).equals(break_even(two, (axis, 1, 50)))
    ends = {axis: np.array([1.0, 2.0])}
    drawn = sobol_indices(one, ends, n=np.int64(16), seed=np.uint8(1))
    assert drawn.equals(sobol_indices(one, {axis: (1.0, 2.0)}, n=16, seed=1))


def test_a_label_does_not_spell_what_varies() -> None:
    both = scenario(FREE_EXPERTS, GPU_ONLY)
    for asked in (
        lambda: solve(scenario(FREE_EXPERTS), "mean_bits", "tpot_ms=9"),
        lambda: break_even(both, "policy.mean_bits"),
        lambda: break_even(both, "ndp.arrays", along=("mean_bits", [2.0, 4.0])),
        lambda: sobol_indices(both, {"mean_bits": (1.0, 4.0)}, n=16),
    ):
        with pytest.raises(PerfModelError, match=r"axis policy\.mean_bits: .* sets mean_bits itself"):
            asked()


def test_options_are_searched_within_their_limits() -> None:
    for name, low, high in (("mean_bits", 1.0, 4.0), ("alpha", 0.0, 1.0), ("gpu_experts", 0.0, 8.0)):
        found = solve(scenario("context-aware"), name, "tpot_s=1000")
        assert (found.low, found.high) == (low, high)


def test_which_policy() -> None:
    both = scenario(NEAR, GPU_ONLY)
    with pytest.raises(PerfModelError, match="allowed one of"):
        solve(both, "link.bandwidth_gb_per_s", "tpot_ms=300")
    by_number = solve(both, "link.bandwidth_gb_per_s", "tpot_ms=300", policy=1)
    assert by_number == solve(both, "link.bandwidth_gb_per_s", "tpot_ms=300", policy=GPU_ONLY)
    assert by_number.policy == GPU_ONLY
    np.testing.assert_allclose(price(GPU_ONLY, link__bandwidth_gb_per_s=by_number.value), 0.3, rtol=1e-9, atol=0)
    json.dumps(by_number.to_dict(), allow_nan=False)


def test_a_metric_that_the_policy_lacks() -> None:
    with pytest.raises(PerfModelError, match="cannot tell quant_loss_vs_uniform"):
        solve(scenario("monde"), "link.bandwidth_gb_per_s", "quant_loss_vs_uniform=0.5")


# ---- break-even ----


SLOW = {"ndp.dram_bandwidth_gb_per_s": 100.0}


def test_break_even_is_equal_there_and_not_elsewhere() -> None:
    axis = ("link.bandwidth_gb_per_s", 1.0, 5000.0)
    found = break_even(scenario(NEAR, GPU_ONLY, system=SYSTEM.with_values(SLOW)), axis)
    assert found.sizes == {"crossing": 1}
    x = float(found.break_even[0])
    near, gpu_only = (price(one, link__bandwidth_gb_per_s=x, **SLOW) for one in (NEAR, GPU_ONLY))
    np.testing.assert_allclose(near, gpu_only, rtol=1e-9, atol=0)
    np.testing.assert_allclose([found.a[0], found.b[0]], [near, gpu_only], rtol=1e-12, atol=0)
    assert [str(found[name].values[0]) for name in ("kind", "before", "after")] == ["exact", NEAR, GPU_ONLY]
    for factor, better in ((0.99, NEAR), (1.01, GPU_ONLY)):
        prices = {one: price(one, link__bandwidth_gb_per_s=x * factor, **SLOW) for one in (NEAR, GPU_ONLY)}
        assert min(prices, key=prices.__getitem__) == better
    assert str(found.winner.values) == ""
    assert found.break_even.attrs["units"] == "GB/s"


def test_break_even_line_along_another_axis() -> None:
    axis = ("ndp.dram_bandwidth_gb_per_s", 1.0, 1000.0)
    found = break_even(scenario(FREE_BITS, GPU_ONLY), axis, along=("mean_bits", [2.0, 4.0]))
    assert found["policy.mean_bits"].values.tolist() == [2.0, 4.0]
    for bits in (2.0, 4.0):
        x = float(found.break_even.sel({"policy.mean_bits": bits})[0])
        policy = f"context-aware:mean_bits={bits:g},gpu_experts=2"
        near, gpu_only = (price(one, ndp__dram_bandwidth_gb_per_s=x) for one in (policy, GPU_ONLY))
        np.testing.assert_allclose(near, gpu_only, rtol=1e-9, atol=0)


def test_break_even_in_whole_numbers() -> None:
    fixed = {"ndp.clock_ghz": 0.1, "link.bandwidth_gb_per_s": 400.0}
    prices = {n: [price(one, ndp__arrays=n, **fixed) for one in (NEAR, GPU_ONLY)] for n in range(1, 101)}
    wins = [n for n, (near, gpu_only) in prices.items() if near < gpu_only]
    assert wins == list(range(wins[0], 101))
    assert wins[0] > 1
    found = break_even(scenario(NEAR, GPU_ONLY, system=SYSTEM.with_values(fixed)), ("ndp.arrays", 1, 100))
    assert found.break_even.values.tolist() == [wins[0]]
    assert [str(found[name].values[0]) for name in ("before", "after")] == [GPU_ONLY, NEAR]
    np.testing.assert_allclose([found.a[0], found.b[0]], prices[wins[0]], rtol=1e-12, atol=0)


def test_nobody_overtakes() -> None:
    found = break_even(scenario(NEAR, GPU_ONLY), ("link.bandwidth_gb_per_s", 10.0, 20.0), metric="decode_tok_per_s")
    assert found.sizes == {"crossing": 0}
    assert str(found.winner.values) == NEAR


def test_equal_up_to_some_clock() -> None:
    # Arrays that always compute at full width: while they are what takes time, the bits do not matter.
    fixed = {"ndp.precision_scaling": "none"}
    few, many = "context-aware:mean_bits=1,gpu_experts=2", "context-aware:mean_bits=4,gpu_experts=2"
    found = break_even(scenario(few, many, system=SYSTEM.with_values(fixed)), ("ndp.clock_ghz", 0.001, 20.0))
    assert [str(found[name].values[0]) for name in ("before", "after")] == ["tie", few]
    assert found.sizes == {"crossing": 1}
    below, above = (float(found.break_even[0]) * factor for factor in (0.999, 1.001))
    prices = {x: [price(one, ndp__clock_ghz=x, **fixed) for one in (few, many)] for x in (below, above)}
    np.testing.assert_allclose(*prices[below], rtol=1e-12, atol=0)
    assert prices[above][0] < prices[above][1]


def test_a_line_goes_on_where_one_plan_is_not_possible() -> None:
    axis = ("link.bandwidth_gb_per_s", 1.0, 5000.0)
    setup = scenario(FREE_EXPERTS, GPU_ONLY, system=SYSTEM.with_values(SLOW))
    found = break_even(setup, axis, along=("gpu_experts", [2, 8]))
    assert found.winner.values.tolist() == ["", "unknown"]
    assert np.isnan(found.break_even.values[1]).all()
    with pytest.raises(PerfModelError, match="does not fit"):
        break_even(scenario(FREE_EXPERTS, GPU_ONLY), axis, along=("gpu_experts", [8]))


@pytest.mark.parametrize(
    ("arguments", "options", "word"),
    [
        (("link.bandwidth_gb_per_s", 0, 0), {}, "twice"),
        (("link.bandwidth_gb_per_s", 0, 5), {}, "allowed one of"),
        (("link.bandwith_gb_per_s",), {}, "did you mean"),
        (("ndp.arrays",), {"metric": "tpot"}, "tpot_mean_s"),
        (("ndp.arrays",), {"along": ("ndp.arrays", [1])}, "another axis"),
        (("ndp.arrays",), {"along": "mean_bits"}, "axis and its values"),
        (("ndp.arrays",), {"along": ("mean_bits", [9.0])}, "1 to 4"),
    ],
)
def test_bad_break_even(arguments: tuple[Any, ...], options: dict[str, Any], word: str) -> None:
    with pytest.raises(PerfModelError, match=word):
        break_even(scenario(NEAR, GPU_ONLY), *arguments, **options)


def test_break_even_of_a_metric_that_one_policy_lacks() -> None:
    with pytest.raises(PerfModelError, match="cannot tell quant_loss_vs_uniform"):
        break_even(scenario(NEAR, "monde"), "ndp.arrays", metric="quant_loss_vs_uniform")


# ---- tornado ----


def test_tornado_is_one_evaluation_an_end() -> None:
    found = tornado(scenario(NEAR, GPU_ONLY), change=0.2)
    for label in (NEAR, GPU_ONLY):
        np.testing.assert_allclose(found.base.sel(policy=label), price(label), rtol=1e-12, atol=0)
        for key in found.key.values.tolist()[:4]:
            for side in ("low", "high"):
                one = found.sel(policy=label, key=key, side=side)
                setting = float(found.setting.sel(key=key, side=side))
                expected = price(label, **{key.replace(".", "__"): setting})
                np.testing.assert_allclose(one.value, expected, rtol=1e-12, atol=0)
    largest = found.swing.max("policy").values
    assert largest.tolist() == sorted(largest.tolist(), reverse=True)
    lists = {name: json.loads(found.attrs[name]) for name in ("no_effect", "zero", "refused", "clipped")}
    accounted = [*found.key.values, *lists["no_effect"], *lists["zero"], *lists["refused"]]
    assert sorted(accounted) == sorted(SYSTEM.numeric_keys())
    assert lists["clipped"] == ["link.efficiency", "gpu.devices"]
    assert float(found.setting.sel(key="link.efficiency", side="high")) == 1.0
    assert "link.n_half_kb" in lists["zero"]
    assert "gpu.memory_capacity_gb" in lists["no_effect"]
    for key in lists["no_effect"][:3]:
        here = SYSTEM.get(key)
        assert price(**{key.replace(".", "__"): here * 1.2}) == price()


def test_tornado_of_chosen_keys() -> None:
    found = tornado(scenario(), change={"mean_bits": (2.0, 4.0), "output": (4, 12)}, metric="end_to_end_s")
    assert set(found.key.values) == {"policy.mean_bits", "workload.output"}
    one = found.sel(key="workload.output", side="high")
    np.testing.assert_allclose(one.value, [price(metric="end_to_end_s", output=12)], rtol=1e-12, atol=0)
    relative = tornado(scenario(), ["mean_bits", "ndp.rows"], change=0.01)
    assert relative.setting.sel(key="ndp.rows").values.tolist() == [3.0, 5.0]  # whole numbers move by at least one


def test_tornado_by_other_names_and_beyond_all_limits() -> None:
    ends = {"policy.mean_bits": (2.0, 4.0), "output": (4, 12)}
    full = tornado(scenario(), change=ends)
    for keys in (["mean_bits", "workload.output"], ["policy.mean_bits", "output"], None):
        assert tornado(scenario(), keys, change=ends).equals(full)
    with pytest.raises(PerfModelError, match="every axis once"):
        tornado(scenario(), change={"mean_bits": (1, 2), "policy.mean_bits": (1, 2)})
    as_text = tornado(scenario(), change={"mean_bits": "2:4", "output": "12:4"})
    assert as_text.equals(full)
    clipped = tornado(scenario(), ["mean_bits", "link.efficiency"], change=0.9)
    assert set(json.loads(clipped.attrs["clipped"])) == {"policy.mean_bits", "link.efficiency"}
    assert clipped.setting.sel(key="policy.mean_bits").values.tolist() == [1.0, 4.0]


def test_tornado_of_a_metric_that_one_policy_lacks() -> None:
    with pytest.raises(PerfModelError, match="no number of h100-cxl2-ndp has an effect on quant_loss_vs_uniform"):
        tornado(scenario("monde", NEAR), metric="quant_loss_vs_uniform")
    found = tornado(scenario("monde", NEAR), ["gpu.memory_capacity_gb"], metric="quant_loss_vs_uniform")
    assert np.isnan(found.value.sel(policy="monde")).all()
    assert found.swing.sel(policy=NEAR).values.tolist() == [0.0]


@pytest.mark.parametrize(
    ("keys", "change", "word"),
    [
        (["link.bandwith_gb_per_s"], 0.1, "did you mean"),
        (None, 0.0, "above 0"),
        (None, 1.0, "below 1"),
        (None, 1e308, "below 1"),
        (["mean_bits"], 1, "below 1"),
        (None, True, "above 0"),
        (None, "a", "low and high end"),
        (None, {}, "at least one axis"),
        (["ndp.arrays"], {"ndp.rows": (1, 2)}, "two ends of every key"),
        (None, {"ndp.rows": (3, 2)}, "low below high"),
        (None, {"ndp.rows": 3}, "two numbers"),
        (["link.n_half_kb"], 0.1, "is 0"),
        (["gpu_experts"], 0.1, "different values"),
        (["workload.prompt", "prompt"], 0.1, "each once"),
        ([], 0.1, "at least one key"),
        (["ndp.dram.row_bytes"], 0.1, "multiple of line_bytes"),
    ],
)
def test_bad_tornado(keys: Any, change: Any, word: str) -> None:
    policies = (NEAR, "context-aware:mean_bits=3,gpu_experts=1") if keys == ["gpu_experts"] else (NEAR,)
    with pytest.raises(PerfModelError, match=word):
        tornado(scenario(*policies), keys, change=change)


# ---- Sobol indices ----


def test_ranges_may_be_texts() -> None:
    ends = {"mean_bits": (1.0, 4.0), "link.bandwidth_gb_per_s": (1.0, 100.0, "log")}
    texts = {"mean_bits": "4:1", "link.bandwidth_gb_per_s": "1:100:log"}
    assert sobol_indices(scenario(FREE_BITS), texts, n=16).equals(sobol_indices(scenario(FREE_BITS), ends, n=16))
    both = scenario(FREE_BITS, GPU_ONLY)
    axis = "ndp.dram_bandwidth_gb_per_s"
    by_text = break_even(both, (axis, "1:1000"), along=("mean_bits", "2:4:2"))
    assert by_text.equals(break_even(both, (axis, 1, 1000), along=("mean_bits", [2.0, 4.0])))
    for asked in (
        lambda: sobol_indices(scenario(), {"link.latency_us": "1:2:3"}, n=16),
        lambda: sobol_indices(scenario(), {"link.latency_us": "1,2"}, n=16),
        lambda: break_even(both, axis, along=("mean_bits", "2:4")),
        lambda: break_even(both, (axis, "1:10:4")),
    ):
        with pytest.raises(PerfModelError, match="allowed"):
            asked()


def test_shares_say_how_sure_they_are() -> None:
    ranges = {"link.latency_us": (10.0, 60.0), "gpu.layer_overhead_us": (5.0, 205.0), "link.bandwidth_gb_per_s": (1, 9)}
    few, many = (json.loads(sobol_indices(scenario(), ranges, n=n).attrs["notes"]) for n in (16, 2**14))
    (width,) = [note for note in few if "the widest 95 % interval spans" in note]
    assert int(re.search(r"--n ([0-9]+) would", width)[1]) > 16  # type: ignore[index]
    assert any("an error of sampling, which more base samples (--n) make smaller" in note for note in few)
    assert not any("interval" in note or "sampling" in note for note in many)


def test_shares_of_a_sum_follow_from_its_slopes() -> None:
    # Nothing overlaps, so the time is linear in these two: their shares are squares of slope times width.
    policy = f"{NEAR},overlap=sum"
    ranges = {"link.latency_us": (10.0, 60.0), "gpu.layer_overhead_us": (5.0, 205.0)}
    low = {"link__latency_us": 10.0, "gpu__layer_overhead_us": 5.0}
    rises = [
        price(policy, **{**low, "link__latency_us": 60.0}) - price(policy, **low),
        price(policy, **{**low, "gpu__layer_overhead_us": 205.0}) - price(policy, **low),
    ]
    expected = np.square(rises) / np.square(rises).sum()
    assert 0.02 < expected[0] < 0.98
    found = sobol_indices(scenario(policy), ranges, n=1024)
    np.testing.assert_allclose(found.first[0], expected, rtol=0.05, atol=0)
    np.testing.assert_allclose(found.total[0], expected, rtol=0.05, atol=0)
    np.testing.assert_allclose(found.variance[0], np.square(rises).sum() / 12, rtol=0.02, atol=0)
    middle = price(policy, link__latency_us=35.0, gpu__layer_overhead_us=105.0)
    np.testing.assert_allclose(found["mean"][0], middle, rtol=1e-3, atol=0)
    for name in ("first", "total"):
        assert (found[f"{name}_low"] <= found[name]).all()
        assert (found[name] <= found[f"{name}_high"]).all()


def test_indices_agree_with_scipy() -> None:
    from scipy.stats import sobol_indices as reference
    from scipy.stats import uniform

    ends = {"link.bandwidth_gb_per_s": (2.0, 80.0), "link.latency_us": (1.0, 4000.0)}
    setup = scenario(GPU_ONLY)

    def function(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return setup.prices(0, {}, dict(zip(ends, x, strict=True)), ["tpot_mean_s"])["tpot_mean_s"].copy()

    expected = reference(
        func=function,
        n=1024,
        dists=[uniform(low, high - low) for low, high in ends.values()],
        rng=np.random.default_rng(3),
    )
    found = sobol_indices(setup, ends, n=1024, seed=3)
    np.testing.assert_allclose(found.total[0], expected.total_order, rtol=0.1, atol=0)
    np.testing.assert_allclose(found.first[0], expected.first_order, rtol=0.1, atol=0)


def test_indices_of_plans_repeat_and_differ_by_seed() -> None:
    ranges = {"mean_bits": (1.0, 4.0), "ndp.arrays": (1, 64), "link.bandwidth_gb_per_s": (1.0, 100.0, "log")}
    first, again, other = (sobol_indices(scenario(FREE_BITS, GPU_ONLY), ranges, n=16, seed=seed) for seed in (1, 1, 2))
    assert first.identical(again)
    assert not np.array_equal(first.total, other.total)
    assert float(first.total.sel(policy=GPU_ONLY, key="policy.mean_bits")) == 0.0
    assert float(first.total.sel(policy=FREE_BITS, key="policy.mean_bits")) > 0.0
    constant = sobol_indices(scenario(), {"link.latency_us": (1.0, 2.0)}, n=16, metric="gpu_memory_bytes")
    assert np.isnan(constant.first).all()


@pytest.mark.parametrize(
    ("ranges", "options", "word"),
    [
        ({}, {}, "at least one axis"),
        ([("a", 1)], {}, "at least one axis"),
        ({"link.latency_us": (1.0,)}, {}, "low and high"),
        ({"link.latency_us": (1.0, 2.0, "lin")}, {}, "log"),
        ({"link.latency_us": (2.0, 2.0)}, {}, "low below high"),
        ({"link.latency_us": (0.0, 2.0, "log")}, {}, "above 0"),
        ({"policy.overlap": ("max", "sum")}, {}, "words"),
        ({"prompt": (1, 2), "workload.prompt": (1, 2)}, {}, "twice"),
        ({"link.latency_us": (1.0, 2.0)}, {"n": 1000}, "power of two"),
        ({"link.latency_us": (1.0, 2.0)}, {"n": 8}, "power of two"),
        ({"link.latency_us": (1.0, 2.0)}, {"seed": -1}, "seed"),
        ({"gpu_experts": (0, 8)}, {"n": 16}, "does not fit"),
    ],
)
def test_bad_ranges(ranges: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(PerfModelError, match=word):
        sobol_indices(scenario(FREE_EXPERTS), ranges, **options)


def test_answers_carry_provenance_that_files_can_hold(tmp_path: Any) -> None:
    setup = scenario(FREE_BITS, GPU_ONLY, model="mixtral-8x7b", system="h100-cxl2-ndp", trace="tiny-mixtral-32l-mini")
    answers = {
        "tornado": tornado(setup),
        "sobol": sobol_indices(setup, {"link.latency_us": (1.0, 2.0)}, n=16),
        "break-even": break_even(setup, ("link.bandwidth_gb_per_s", 1.0, 5000.0), along=("mean_bits", [2.0, 3.0])),
    }
    for kind, found in answers.items():
        assert found.attrs["kind"] == kind
        assert json.loads(found.attrs["policies"]) == [FREE_BITS, GPU_ONLY]
        rebuilt = Scenario.from_dict(json.loads(found.attrs["scenario"]))
        assert rebuilt.content() == json.loads(found.attrs["hashes"])
        assert found.attrs["weakest_source"] in ("assumed", "derived", "published", "measured", "datasheet")
        found.to_netcdf(tmp_path / "one.nc", engine="h5netcdf")
        with xr.open_dataset(tmp_path / "one.nc", engine="h5netcdf") as back:
            assert back.load().equals(found)
