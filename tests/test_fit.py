"""Fits of measured rows: the truth comes back, what the rows cannot carry is refused, and held-out means held out."""

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from perfmodel.errors import SpecError
from perfmodel.evidence.fit import Constant, Problem, fit, leave_one_out, source_weights
from perfmodel.evidence.robust import FINE, ROBUST_SCALE
from perfmodel.evidence.skill import Rejected, drop_useless, held_out_error, shuffled_skill, skill

EFFICIENCY = Constant("gpu.memory_efficiency", 0.9, 0.05, 1.0)
KERNEL = Constant("engine.kernel_us", 5.0, 0.05, 200.0, "us")
LINK = Constant("link.efficiency", 0.5, 0.01, 1.0)
TRUTH = {"gpu.memory_efficiency": 0.55, "engine.kernel_us": 12.0, "link.efficiency": 0.3}


def rates(rows: int, seed: int = 0):
    """Token rates of a toy: bytes over bandwidth, plus kernels; on every third row also a copy that hides either."""
    draw = np.random.default_rng(seed)
    read, kernels = draw.uniform(0.2, 20.0, rows), draw.integers(50, 400, rows)
    copied = np.where(np.arange(rows) % 3 == 0, draw.uniform(1.0, 10.0, rows), 0.0)

    def predict(logs):
        efficiency, kernel, link = np.exp(logs).T[:, :, None]
        return -np.log(np.maximum(read / efficiency + 1e-3 * kernels * kernel, copied / link))

    return predict


def problem(rows: int = 60, noise: float = 0.0, sources: int = 12, seed: int = 0, between: float = 0.0) -> Problem:
    """Rows of the toy with known constants, noise of each row, and noise that a source's rows share."""
    constants, predict = (EFFICIENCY, KERNEL, LINK), rates(rows, seed)
    draw = np.random.default_rng(seed + 1000)
    at = np.arange(rows) % sources
    target = predict(np.log([list(TRUTH.values())]))[0]
    target = target + draw.normal(0.0, noise, rows) + draw.normal(0.0, between, sources)[at]
    return Problem(constants, predict, target, [f"s{i}" for i in at], [f"m{i % 4}" for i in at], ["toy"] * rows)


def with_extra(base: Problem, extra: Constant, effect) -> Problem:
    """The problem with a further constant, whose logarithm [N, 1] moves the predictions by effect(log) [N, R]."""

    def predict(logs):
        return base.predict(logs[:, :-1]) + effect(logs[:, -1:])

    return replace(base, constants=(*base.constants, extra), predict=predict)


def test_known_constants_come_back() -> None:
    found = fit(problem())
    assert list(found.values) == list(TRUTH)
    assert_allclose(list(found.values.values()), list(TRUTH.values()), rtol=1e-4, atol=0)
    assert_allclose(found.residuals, 0.0, rtol=0, atol=1e-4)
    assert found.fitted.all()
    assert found.kept.all()
    assert not found.on_bound.any()
    # A factor of two in the link's share cannot matter where nothing is copied.
    assert found.rows[2] <= 20
    assert found.rows[0] > 20
    assert 1.0 <= found.condition < 5.0


def test_the_fit_is_a_minimum_of_the_robust_loss_and_the_same_every_time() -> None:
    one = problem(noise=0.2)
    found, again = fit(one), fit(one)
    assert found.values == again.values

    def loss(logs) -> float:
        r = one.predict(logs[None, :])[0] - one.target
        return float((np.sqrt(1.0 + (r / ROBUST_SCALE) ** 2) - 1.0).sum())

    best = loss(found.logs)
    draw = np.random.default_rng(5)
    for _ in range(100):
        assert loss(found.logs + draw.normal(0.0, 0.02, 3)) > best
    # Another start leads to the same place.
    other = fit(one, start=np.log([0.2, 50.0, 0.9]))
    assert_allclose(other.logs, found.logs, rtol=0, atol=20 * FINE)


def test_rows_that_are_not_kept_do_not_matter() -> None:
    one = problem(noise=0.1)
    keep = np.arange(60) < 45
    poisoned = one.with_target(np.where(keep, one.target, 9.0))
    found, other = fit(one, keep), fit(poisoned, keep)
    assert found.values == other.values
    assert_array_equal(found.residuals[keep], other.residuals[keep])
    assert_allclose(other.residuals[~keep], found.residuals[~keep] + one.target[~keep] - 9.0, rtol=0, atol=1e-12)
    assert found.rows[0] <= 45


def test_constants_left_alone_stay_at_their_start() -> None:
    found = fit(problem(), without=["link.efficiency"])
    assert found.values["link.efficiency"] == pytest.approx(0.5, rel=1e-12)
    assert_array_equal(found.fitted, [True, True, False])
    assert np.isnan(found.standard_errors[2])
    assert np.isnan(found.correlations[2]).all()
    assert_allclose(np.diag(found.correlations)[:2], 1.0, rtol=1e-9)


def test_an_absent_constant_has_its_own_value() -> None:
    one = problem()
    here = replace(one, constants=(EFFICIENCY, KERNEL, replace(LINK, absent=0.3)))
    found = fit(here, without=["link.efficiency"])
    assert_allclose(list(found.values.values()), list(TRUTH.values()), rtol=1e-3)
    assert np.abs(leave_one_out(here, without=["link.efficiency"])).max() < 0.01
    assert np.abs(leave_one_out(one, without=["link.efficiency"])).max() > 0.1
    with pytest.raises(SpecError, match="found absent 0, allowed: positive"):
        replace(LINK, absent=0.0)


@pytest.mark.parametrize("between", [0.0, 0.15])
def test_standard_errors_are_the_scatter_of_the_estimates(between) -> None:
    fits = [fit(problem(120, 0.1, 12, seed, between)) for seed in range(60)]
    logs = np.array([one.logs for one in fits]) - np.log(list(TRUTH.values()))
    stated = np.array([one.standard_errors for one in fits])
    share = logs / stated
    # 60 draws know a standard deviation to 9 %; the rows differ from draw to draw as well.
    assert (np.sqrt((share**2).mean(axis=0)) > 0.6).all()
    assert (np.sqrt((share**2).mean(axis=0)) < 1.4).all()
    if between:
        # Rows taken for independent would claim less than this.
        independent = [fit(replace(problem(120, 0.1, 12, s, between), source=[str(i) for i in range(120)])) for s in (1, 2)]  # fmt: skip # noqa: E501
        assert all((a.standard_errors[0] < b.standard_errors[0]) for a, b in zip(independent, fits[1:3], strict=True))


def test_correlation_has_the_sign_of_a_trade() -> None:
    # Less bandwidth or more microseconds a kernel explain a slow row, so the estimates rise and fall together.
    found = fit(problem(noise=0.1))
    assert 0.1 < found.correlations[0, 1] < 0.99
    assert_allclose(found.correlations, found.correlations.T, rtol=0, atol=1e-12)
    logs = np.array([fit(problem(120, 0.1, 12, seed)).logs for seed in range(30)])
    assert np.corrcoef(logs.T)[0, 1] > 0.1


def test_a_few_wild_rows_do_not_steer_the_constants() -> None:
    one = problem(noise=0.05)
    wild = one.with_target(one.target + np.where(np.arange(60) % 10 == 1, 3.0, 0.0))
    clean, found = fit(one), fit(wild)
    assert_allclose(found.logs, clean.logs, rtol=0, atol=0.25)
    # One row in ten is off by a factor of 20. Least squares moves all of them by 0.3 in the mean.
    good = np.arange(60) % 10 != 1
    assert np.abs(found.residuals - clean.residuals)[good].mean() < 0.06


def test_bounds_hold_and_are_reported() -> None:
    one = problem()
    tight = replace(one, constants=(replace(EFFICIENCY, start=0.8, low=0.7), KERNEL, LINK))
    found = fit(tight)
    assert found.values["gpu.memory_efficiency"] == pytest.approx(0.7, rel=1e-3)
    assert_array_equal(found.on_bound, [True, False, False])
    assert np.isnan(found.standard_errors[0])
    assert np.isfinite(found.standard_errors[1:]).all()


def test_a_prior_pulls_weakly_towards_the_start() -> None:
    one = problem(noise=0.1)
    free = fit(one)
    loose = fit(replace(one, prior=np.full(3, 1.0)))
    tight = fit(replace(one, prior=np.array([np.inf, 1e-3, np.inf])))
    assert_allclose(loose.logs, free.logs, rtol=0, atol=0.1)
    assert np.abs(loose.logs - one.start).sum() < np.abs(free.logs - one.start).sum()
    assert tight.values["engine.kernel_us"] == pytest.approx(5.0, rel=1e-2)
    assert tight.standard_errors[1] == pytest.approx(1e-3, rel=0.1)


def test_weights_of_sources() -> None:
    source = ["a"] * 9 + ["b"]
    weights = source_weights(source)
    assert weights[:9].sum() == pytest.approx(weights[9])
    assert weights.mean() == pytest.approx(1.0)
    assert_allclose(source_weights(source, 0.0), 1.0)
    # A level fitted to two sources lies at the large one by rows, and between the two by sources.
    target = np.array([0.0] * 9 + [0.2] + [0.0] * 90)
    labels = ["a"] * 9 + ["b"] + ["a"] * 90
    level = Problem((Constant("c", 1.0, 0.1, 10.0),), lambda x: x + np.zeros(100), target, labels, labels, labels)
    assert fit(level).logs[0] == pytest.approx(0.0, abs=0.005)
    assert fit(replace(level, weights=source_weights(labels))).logs[0] == pytest.approx(0.1, abs=0.005)


# ---- what is refused ----


def test_more_constants_than_rows_are_refused() -> None:
    with pytest.raises(SpecError, match="found 14 rows for 3 constants, allowed: 5 or more rows a constant"):
        fit(problem(14))
    keep = np.arange(60) < 8
    with pytest.raises(SpecError, match="found 8 rows for 2 constants"):
        fit(problem(60), keep, without=["link.efficiency"])


def test_constants_that_rows_do_not_depend_on_are_refused() -> None:
    nothing = with_extra(problem(), Constant("idle", 1.0, 0.1, 10.0), lambda x: np.zeros((len(x), 60)))
    with pytest.raises(SpecError, match="no row depends on constant idle"):
        fit(nothing)
    few = with_extra(problem(), Constant("rare", 1.0, 0.1, 10.0), lambda x: x * (np.arange(60) < 4))
    with pytest.raises(SpecError, match="only 4 rows depend on constant rare, allowed: 5 or more"):
        fit(few)
    assert fit(nothing, without=["idle"]).values["idle"] == pytest.approx(1.0)


def test_constants_that_cannot_be_told_apart_are_refused() -> None:
    def both(logs):
        return problem().predict(logs[:, [0, 1, 2]] + logs[:, [3]] * [0, 1, 0])

    twin = Constant("engine.step_us", 1.0, 0.1, 10.0)
    with pytest.raises(SpecError, match=r"tell constants engine.kernel_us and engine.step_us apart .condition number"):
        fit(replace(problem(), constants=(*problem().constants, twin), predict=both))
    with pytest.raises(SpecError, match=r"condition number .*allowed: up to 1\.05"):
        fit(problem(), max_condition=1.05)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": ["a"]}, "found 1 sources, allowed: 60"),
        ({"weights": np.zeros(60)}, "weights that are not positive"),
        ({"prior": np.ones(2)}, "found 2 prior widths, allowed: 3"),
        ({"constants": (EFFICIENCY, EFFICIENCY, LINK)}, "each once"),
        ({"target": np.full(60, -np.inf)}, "not positive and finite"),
        ({"predict": lambda x: np.full((len(x), 60), np.nan)}, "row"),
    ],
)
def test_bad_problems_are_refused(change, words) -> None:
    with pytest.raises(SpecError, match=words) as refusal:
        fit(replace(problem(), **change))
    assert "\n" not in str(refusal.value)


def test_bad_constants_and_masks_are_refused() -> None:
    for start, low, high in ((2.0, 0.1, 1.0), (0.5, 0.0, 1.0), (1.0, 1.0, 1.0), (1.0, 0.5, math.inf)):
        with pytest.raises(SpecError, match="constant c: found start"):
            Constant("c", start, low, high)
    with pytest.raises(SpecError, match="found constant 'x', allowed: gpu"):
        fit(problem(), without=["x"])
    with pytest.raises(SpecError, match="60 booleans"):
        fit(problem(), [True])
    with pytest.raises(SpecError, match="no constant to fit"):
        fit(problem(), without=list(TRUTH))


# ---- held out ----


def test_left_out_rows_are_predicted_by_a_fit_without_their_source() -> None:
    one = problem(noise=0.15, sources=6)
    found = leave_one_out(one)
    source = np.asarray(one.source)
    for label in ("s0", "s4"):
        expected = fit(one, source != label).residuals
        assert_allclose(found[source == label], expected[source == label], rtol=0, atol=0.01)
    machine = np.asarray(one.machine)
    by_machine = leave_one_out(one, "machine")
    expected = fit(one, machine != "m1").residuals
    assert_allclose(by_machine[machine == "m1"], expected[machine == "m1"], rtol=0, atol=0.01)


@pytest.mark.parametrize("by", ["source", "machine"])
def test_a_poisoned_source_does_not_touch_its_own_prediction(by) -> None:
    one = problem(noise=0.1)
    labels = np.asarray(one.source if by == "source" else one.machine)
    out = labels == labels[3]
    poisoned = one.with_target(one.target + np.where(out, 1.0, 0.0))
    clean, found = leave_one_out(one, by), leave_one_out(poisoned, by)
    assert_array_equal((found + poisoned.target)[out], (clean + one.target)[out])
    assert np.abs(found - clean)[~out].max() > 1e-3  # the others' predictions have seen it


def test_what_one_source_alone_says_is_not_known_without_it() -> None:
    mine = np.arange(60) % 12 == 5
    special = with_extra(problem(noise=0.05), Constant("special", 1.0, 0.1, 10.0), lambda x: x * mine)
    special = special.with_target(special.target + np.where(mine, 0.7, 0.0))
    assert fit(special).values["special"] == pytest.approx(math.exp(0.7), rel=0.1)
    # Without the source the constant stays at its start, so its rows are off by what it stands for.
    assert_allclose(leave_one_out(special)[mine], -0.7, rtol=0, atol=0.25)


# ---- skill ----


def test_held_out_error_is_a_plain_mean() -> None:
    residuals, source = np.array([0.1, -0.2, 0.3, 9.0]), ["a", "a", "a", "b"]
    by_row = (0.1 + 0.2 + 0.3 + math.log(4.0)) / 4
    by_source = (0.2 + math.log(4.0)) / 2
    assert held_out_error(residuals, source) == pytest.approx(math.expm1((by_row + by_source) / 2), rel=1e-12)


def test_a_useless_constant_is_rejected_and_a_useful_one_is_not() -> None:
    draw = np.random.default_rng(3)
    useless = with_extra(problem(noise=0.1), Constant("useless", 1.0, 0.2, 5.0), lambda x: x * draw_of)
    draw_of = draw.uniform(-1.0, 1.0, 60)
    both = with_extra(useless, Constant("useful", 1.0, 0.2, 5.0), lambda x: x * (np.arange(60) % 5 == 0))
    both = both.with_target(both.target + 0.4 * (np.arange(60) % 5 == 0))
    found = drop_useless(both, ["useless", "useful"])
    assert [one.name for one in found] == ["useless"]
    one = found[0]
    assert str(one) == (
        "constant useless does not improve the leave-one-source-out error"
        f" ({100 * one.error_with:.2f} % with, {100 * one.error_without:.2f} % without): rejected"
    )
    assert one.error_with >= one.error_without
    assert one.error_with == held_out_error(leave_one_out(both), both.source)
    assert one.error_without == held_out_error(leave_one_out(both, without=["useless"]), both.source)


def test_a_small_gain_is_named_as_such() -> None:
    assert str(Rejected("c", 0.151, 0.152)) == (
        "constant c does not improve the leave-one-source-out error (15.10 % with, 15.20 % without, less than 1 % of"
        " it): rejected"
    )


def test_of_two_constants_for_one_effect_one_is_rejected() -> None:
    effect = np.arange(60) % 5 == 0
    one = with_extra(problem(noise=0.05), Constant("first", 1.0, 0.2, 5.0), lambda x: x * effect)
    two = with_extra(one, Constant("second", 1.0, 0.2, 5.0), lambda x: x * effect)
    two = two.with_target(two.target + 0.4 * effect)
    assert len(drop_useless(two, ["first", "second"])) == 1


def test_useless_constants_are_rejected_nearly_always() -> None:
    rejected = 0
    for seed in range(16):
        effect = np.random.default_rng(seed + 50).normal(size=60)
        one = with_extra(
            problem(noise=0.15, seed=seed, between=0.1),
            Constant("useless", 1.0, 0.2, 5.0),
            lambda x, effect=effect: x * effect,
        )
        rejected += len(drop_useless(one, ["useless"]))
    assert rejected >= 12  # about one in seven is kept by chance


def test_shuffled_targets_give_no_skill() -> None:
    one = problem(noise=0.1)
    assert skill(one) > 0.8
    null = shuffled_skill(one, seed=1, repeats=12)
    assert null.max() < 0.05
    assert null.mean() < 0.0
    assert_array_equal(null[:3], shuffled_skill(one, seed=1, repeats=3))
    # A model that only has a level is as good as the level of the others, and no better.
    level = replace(one, constants=(Constant("c", 0.1, 1e-4, 10.0),), predict=lambda x: x + np.zeros(60))
    assert abs(skill(level)) < 0.1
    with pytest.raises(SpecError, match="found one source"):
        skill(replace(one, source=["s"] * 60))


def test_a_fit_that_has_seen_its_rows_would_flatter_itself() -> None:
    # Eight free levels for ten rows each of random targets: in sample they explain something, out of sample nothing.
    kinds = np.arange(80) % 8
    constants = tuple(Constant(f"level{i}", 1.0, 1e-3, 1e3) for i in range(8))
    target = np.random.default_rng(2).normal(size=80)
    source = [f"s{i // 8}" for i in range(80)]
    one = Problem(constants, lambda x: x[:, kinds], target, source, source, source)
    seen = 1.0 - np.abs(fit(one).residuals).mean() / np.abs(target - np.median(target)).mean()
    assert seen > 0.02
    assert shuffled_skill(one, seed=0, repeats=4).max() < 0.02
