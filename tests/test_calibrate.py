"""Fitting constants to figures: known constants come back, and figures that are left out are not seen."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose
from strategies import mixtral, recording

from perfmodel.evidence.calibrate import ROBUST_SCALE, WIDEST_FACTOR, calibrate, fitted_system
from perfmodel.evidence.figures import Figure, Interval, error, geometric_mean_error, load_figures
from perfmodel.hardware import load_system
from perfmodel.point import dram_efficiency, hardware_point
from perfmodel.run import plan_run

KEYS = ("gpu.memory_efficiency", "ndp.dram_efficiency", "link.bandwidth_gb_per_s")


def start_system():
    """A system whose near-data rate is given, so that it can be fitted."""
    system = load_system("h100-cxl2-ndp")
    assert system.ndp is not None
    return system.with_values({"ndp.dram_efficiency": dram_efficiency(system.ndp)})


def make_predict():
    """Logarithms of the token rates of several policies, each bound by other constants."""
    texts = ("monde", "monde:reading=all-ndp", "hobbit", "hobbit:cache_high=6", "context-aware:gpu_experts=2")
    runs = [plan_run(mixtral(), start_system(), recording(), text, prompt=16, output=8) for text in texts]
    return lambda points: np.stack([-np.log(run.mean_token_s(points)) for run in runs], axis=1)


@pytest.fixture(scope="module")
def predict():
    """See make_predict."""
    return make_predict()


def figures_of(predict, values: dict[str, float]) -> list[float]:
    """The figures that the model itself computes at these constants."""
    system = start_system().with_values(values)
    return np.exp(predict(hardware_point(system)[None, :])[0]).tolist()


@pytest.mark.parametrize(
    "values",
    [
        dict(zip(KEYS, (0.5, 0.6, 40.0), strict=True)),
        dict(zip(KEYS, (0.2, 0.2, 100.0), strict=True)),
        dict(zip(KEYS, (0.95, 0.9, 25.0), strict=True)),
    ],
)
def test_known_constants_come_back(predict, values) -> None:
    fit = calibrate(start_system(), KEYS, predict, figures_of(predict, values))
    assert fit.keys == KEYS
    assert fit.overrides() == dict(zip(fit.keys, fit.values, strict=True))
    assert_allclose(fit.values, list(values.values()), rtol=1e-3, atol=0)
    assert_allclose(fit.residuals, 0, atol=1e-4)
    assert fit.geomean_error < 1e-4
    assert fit.left_out is not None
    assert len(fit.left_out) == 5


def test_an_overhead_per_layer_comes_back(predict) -> None:
    start = start_system().with_values({"gpu.layer_overhead_us": 100.0})
    truth = start.with_values({"gpu.layer_overhead_us": 250.0, "link.bandwidth_gb_per_s": 45.0})
    published = np.exp(predict(hardware_point(truth)[None, :])[0])
    keys = ("gpu.layer_overhead_us", "link.bandwidth_gb_per_s")
    fit = calibrate(start, keys, predict, published, leave_one_out=False)
    assert_allclose(fit.values, [250.0, 45.0], rtol=1e-3, atol=0)
    assert fit.left_out is None
    assert fit.leave_one_out_geomean_error is None


def test_residuals_are_those_of_the_fitted_system(predict) -> None:
    published = np.array(figures_of(predict, dict(zip(KEYS, (0.5, 0.6, 40.0), strict=True)))) * [1.1, 0.9, 1.2, 1, 1]
    fit = calibrate(start_system(), KEYS, predict, published.tolist())
    system = fitted_system(start_system(), fit.overrides(), "a test")
    assert_allclose(fit.residuals, predict(hardware_point(system)[None, :])[0] - np.log(published), rtol=0, atol=1e-9)
    for key in KEYS:
        assert system.source_of(key).source == "calibrated"
        assert system.source_of(key).citation == "a test"
    assert fit.geomean_error == pytest.approx(math.exp(np.abs(fit.residuals).mean()) - 1, rel=1e-12)
    assert fit.left_out is not None
    mean_left_out = math.exp(np.abs(fit.left_out).mean()) - 1
    assert fit.leave_one_out_geomean_error == pytest.approx(mean_left_out, rel=1e-12)

    # No constants nearby do better under the robust loss that is minimised.
    def loss(values) -> float:
        point = hardware_point(start_system().with_values(dict(zip(KEYS, values, strict=True))))
        z = ((predict(point[None, :])[0] - np.log(published)) / ROBUST_SCALE) ** 2
        return float((2 * (np.sqrt(1 + z) - 1)).sum())

    best = loss(fit.values)
    for i, factor in np.ndindex(3, 2):
        values = list(fit.values)
        values[i] *= (0.97, 1.03)[factor]
        assert loss(values) > best


def test_leave_one_out_is_a_fit_without_that_figure(predict) -> None:
    published = np.array(figures_of(predict, dict(zip(KEYS, (0.5, 0.6, 40.0), strict=True)))) * [1.3, 0.9, 1.1, 1, 1]
    fit = calibrate(start_system(), KEYS, predict, published.tolist())
    assert fit.left_out is not None
    for i in range(len(published)):
        keep = [j for j in range(len(published)) if j != i]
        alone = calibrate(
            start_system(), KEYS, lambda p, keep=keep: predict(p)[:, keep], published[keep], leave_one_out=False
        )
        system = fitted_system(start_system(), alone.overrides(), "without one")
        expected = (predict(hardware_point(system)[None, :])[0] - np.log(published))[i]
        assert_allclose(fit.left_out[i], expected, rtol=0, atol=2e-3)
    # The figure itself does not matter to its own left-out prediction.
    moved = published.copy()
    moved[2] *= 2
    again = calibrate(start_system(), KEYS, predict, moved.tolist())
    assert again.left_out is not None
    assert_allclose(again.left_out[2], fit.left_out[2] - math.log(2), rtol=0, atol=2e-3)


def test_one_odd_figure_does_not_steer_the_constants(predict) -> None:
    values = dict(zip(KEYS, (0.5, 0.6, 40.0), strict=True))
    published = np.array(figures_of(predict, values) * 3)
    published[12] *= 3

    def repeated(points):
        return np.tile(predict(points), (1, 3))

    fit = calibrate(start_system(), KEYS, repeated, published.tolist(), leave_one_out=False)
    # Least squares would move the link by the cube root of 3.
    assert_allclose(fit.values, list(values.values()), rtol=0.1, atol=0)


def test_constants_stay_near_their_evidence_and_efficiencies_below_one(predict) -> None:
    start = [start_system().get(key) for key in KEYS]
    for factor in (1e-4, 1e4):
        published = [factor * value for value in figures_of(predict, {})]
        fit = calibrate(start_system(), KEYS, predict, published, leave_one_out=False)
        for key, value, first in zip(KEYS, fit.values, start, strict=True):
            assert first / WIDEST_FACTOR * (1 - 1e-4) <= value <= first * WIDEST_FACTOR * (1 + 1e-4)
            if key.endswith("efficiency"):
                assert value <= 1
        assert fit.geomean_error > 1


# --- figures ---


def figure(*value: float) -> Figure:
    """A published figure."""
    return Figure("x", "rate", "mixtral-8x7b", "monde", None, None, value, "printed", fit=True)


@pytest.mark.parametrize(
    ("computed", "published", "expected"),
    [
        ((2.0, 2.0), (2.0,), 0.0),
        ((4.0, 4.0), (2.0,), math.log(2)),
        ((1.0, 1.0), (2.0,), math.log(2)),
        ((1.0, 3.0), (2.0,), 0.0),
        ((3.0, 5.0), (2.0,), math.log(1.5)),
        ((1.0, 2.0), (1.5, 4.0), 0.0),
        ((1.0, 2.0), (2.0, 4.0), 0.0),
        ((1.0, 2.0), (3.0, 4.0), math.log(1.5)),
        ((8.0, 9.0), (3.0, 4.0), math.log(2)),
        ((3.2, 3.3), (3.0, 4.0), 0.0),
        ((1.0, 9.0), (3.0, 4.0), 0.0),
    ],
)
def test_error_of_a_figure(computed, published, expected) -> None:
    assert error(Interval(*computed), figure(*published)) == pytest.approx(expected, rel=1e-15, abs=0)


def test_geometric_mean_error() -> None:
    assert geometric_mean_error([0.0, 0.0]) == 0.0
    assert geometric_mean_error([math.log(1.05)]) == pytest.approx(0.05, rel=1e-12)
    assert geometric_mean_error([math.log(2), math.log(8), 0.0]) == pytest.approx(16 ** (1 / 3) - 1, rel=1e-12)


def test_the_published_figures() -> None:
    figures = load_figures()
    assert len(figures) == 15
    assert len({one.id for one in figures}) == 15
    fitted = {one.id: one.value for one in figures if one.fit}
    assert fitted == {
        "8x22b-decode-monde": (1.714,),
        "8x22b-decode-3bit": (15.321,),
        "8x22b-decode-2bit": (19.795,),
        "8x7b-decode-gain-3bit": (8.7,),
        "8x7b-decode-gain-2bit": (11.2,),
        "8x7b-over-hobbit-2bit": (18.0,),
        "8x22b-over-hobbit-2bit": (19.0,),
    }
    by_id = {one.id: one for one in figures}
    assert by_id["8x22b-end-to-end-2bit"].value == (9.5, 11.2)
    assert by_id["8x7b-end-to-end-3bit"].value == (6.6, 8.3)
    assert by_id["both-ndp-latency-3bit"].models == ("mixtral-8x7b", "mixtral-8x22b")
    assert by_id["8x22b-decode-monde"].bits is None
    for one in figures:
        assert one.mark in ("printed", "secondary")
        assert set(one.models) <= {"mixtral-8x7b", "mixtral-8x22b"}
        assert len(one.value) == (2 if one.kind == "range" else 1)
        assert list(one.value) == sorted(one.value)
        assert (one.kind == "rate") == (one.baseline is None and "decode-" in one.id and "gain" not in one.id)
        if "hobbit" in one.id:
            assert one.baseline == "hobbit"
        elif one.kind in ("gain", "range"):
            assert one.baseline == "monde"
        if one.bits is not None:
            assert f"{one.bits:g}bit" in one.id
    kinds = [one.kind for one in figures]
    assert [kinds.count(kind) for kind in ("rate", "gain", "range", "ndp-latency")] == [3, 6, 4, 2]
