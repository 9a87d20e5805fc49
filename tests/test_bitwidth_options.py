"""Options of the selector and of the optimum: menus, ceilings, sizes, weights, floors, one budget for a model."""

import itertools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from perfmodel import reference
from perfmodel.bitwidth import assigned_loss, bitwidth_front, optimal_bitwidths, select_bitwidths, solve
from perfmodel.errors import PolicyError

MENUS = [(1, 2, 3, 4), (2, 3, 4), (2, 4, 8), (2, 3, 4, 8), (1, 2, 3, 4, 5, 6, 8, 16), (3,), (1, 16)]


class Case(NamedTuple):
    """One model: importance [L, E], losses [L, E, M], and the options of a call."""

    importance: np.ndarray
    losses: np.ndarray
    options: dict[str, Any]


def whole(draw: st.DrawFn, low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
    size = math.prod(shape)
    return np.array(draw(st.lists(st.integers(low, high), min_size=size, max_size=size))).reshape(shape)


@st.composite
def cases(draw: st.DrawFn, max_layers: int = 2, max_experts: int = 3) -> Case:
    """Whole losses, so that sums and ties are exact, and any mixture of options."""
    bits = draw(st.sampled_from(MENUS[:4] + MENUS[5:]))
    shape = draw(st.integers(1, max_layers)), draw(st.integers(1, max_experts))
    losses = whole(draw, 0, draw(st.sampled_from([1, 30])), (*shape, len(bits))).astype(float)
    if draw(st.booleans()):
        losses = -np.sort(-losses, axis=-1)
    options: dict[str, Any] = {
        "bits": bits,
        "budget": draw(st.sampled_from(["exact", "at-most"])),
        "scope": draw(st.sampled_from(["layer", "model"])),
        "mean_bits": draw(st.one_of(st.sampled_from(bits), st.floats(bits[0], bits[-1]))),
    }
    if draw(st.booleans()):
        options["weights"] = whole(draw, 0, 3, shape)
    if draw(st.booleans()):
        options["min_bits"] = draw(st.sampled_from([0, 1, 1.5, 2])) if bits != (1, 16) else whole(draw, 0, 2, shape)
        options["min_bits"] = np.minimum(options["min_bits"], bits[-1])
    if draw(st.booleans()):
        options["sizes"] = whole(draw, 1, 4, shape) * 6
        if draw(st.booleans()):
            del options["mean_bits"]
            options["max_bytes"] = draw(st.floats(0, 1.2 * options["sizes"].sum() * bits[-1] / 8))
    return Case(whole(draw, 0, 3, shape).astype(float), losses, options)


def by_trying(case: Case, ordered: bool) -> np.ndarray | None:
    """Bits [L, E] by trying every assignment, in bits rather than in steps; None where the budget cannot be met."""
    importance, losses, options = case
    shape = importance.shape
    bits = np.array(options["bits"])
    sizes = np.broadcast_to(options.get("sizes", 1), shape)
    floor = np.searchsorted(bits, np.broadcast_to(options.get("min_bits", 0), shape))
    level = np.maximum(np.arange(len(bits)), floor[..., None])
    table = np.take_along_axis(losses * np.broadcast_to(options.get("weights", 1), shape)[..., None], level, axis=-1)
    cost = sizes[..., None] * bits[level]
    order = np.argsort(-importance, axis=-1, kind="stable") if ordered else np.broadcast_to(np.arange(shape[1]), shape)
    table, cost = (np.take_along_axis(a, order[..., None], axis=1) for a in (table, cost))
    found = np.empty(shape, np.int64)
    groups = [slice(0, shape[0])] if options["scope"] == "model" else [slice(i, i + 1) for i in range(shape[0])]
    for group in groups:
        at_most = options["budget"] == "at-most" or len(np.unique(sizes[group])) > 1 or "max_bytes" in options
        if "max_bytes" in options:
            room = math.floor(8 * options["max_bytes"])
        else:
            # Slack of a whole product in units of what the sizes have in common, as for experts of one size.
            common = int(np.gcd.reduce(sizes[group], axis=None))
            above = Fraction(int(sizes[group].sum()), common) * (Fraction(float(options["mean_bits"])) - int(bits[0]))
            room = math.floor(above + Fraction(1e-9)) * common + int(bits[0]) * int(sizes[group].sum())
        best = reference.best_assignment(table[group], cost[group], room, at_most, ordered)
        if best is None:
            return None
        np.put_along_axis(found[group], order[group], best, axis=1)
    return bits[np.maximum(found, floor)]


@settings(max_examples=250)
@given(cases())
def test_every_option_equals_trying_every_assignment(case) -> None:
    importance, losses, options = case
    for ordered in (True, False):
        call = (
            (lambda: select_bitwidths(importance, losses, **options))
            if ordered
            else (lambda: optimal_bitwidths(losses, **options))
        )
        expected = by_trying(case, ordered)
        if expected is None:
            with pytest.raises(PolicyError, match=r"mean_bits is|max_bytes is") as caught:
                call()
            assert "\n" not in str(caught.value)
        else:
            found = call()
            assert found.dtype == np.int8
            assert_array_equal(found, expected)


def loss_of(case: Case, bits: np.ndarray) -> float:
    return float(assigned_loss(case.losses, bits, bits=case.options["bits"], weights=case.options.get("weights")).sum())


@given(cases(max_layers=4, max_experts=6))
def test_more_freedom_never_costs_more(case) -> None:
    """At most against exactly, a model against its layers, any order against the prefix rule."""
    importance, losses, options = case
    options.pop("max_bytes", None)
    options.setdefault("mean_bits", options["bits"][-1])
    options.pop("sizes", None)  # with sizes, a budget is a ceiling either way

    def lost(budget: str, scope: str, ordered: bool) -> float:
        chosen = {**options, "budget": budget, "scope": scope}
        try:
            bits = select_bitwidths(importance, losses, **chosen) if ordered else optimal_bitwidths(losses, **chosen)
        except PolicyError:
            return math.inf
        return loss_of(case, bits)

    for scope, ordered in itertools.product(("layer", "model"), (True, False)):
        assert lost("at-most", scope, ordered) <= lost("exact", scope, ordered)
    for budget, ordered in itertools.product(("at-most", "exact"), (True, False)):
        if budget == "at-most" or float(options["mean_bits"] * len(losses[0])).is_integer():
            # An exact model budget may be larger than what its layers round down to.
            assert lost(budget, "model", ordered) <= lost(budget, "layer", ordered)
    for budget, scope in itertools.product(("at-most", "exact"), ("layer", "model")):
        assert lost(budget, scope, False) <= lost(budget, scope, True)


@given(cases(max_layers=3, max_experts=6), st.sampled_from([1, 7, 301_989_888]))
def test_experts_of_one_size_choose_as_without_sizes(case, size) -> None:
    importance, losses, options = case
    for name in ("sizes", "max_bytes"):
        options.pop(name, None)
    options.setdefault("mean_bits", options["bits"][0])
    for call in (lambda **o: select_bitwidths(importance, losses, **o), lambda **o: optimal_bitwidths(losses, **o)):
        try:
            plain = call(**options)
        except PolicyError:
            with pytest.raises(PolicyError, match="mean_bits is"):
                call(**options, sizes=np.full(importance.shape[-1], size))
            continue
        assert_array_equal(call(**options, sizes=np.full(importance.shape[-1], size)), plain)
        if options["budget"] == "at-most" and options["scope"] == "layer":
            # So many bytes as the mean allows.
            room = size * (losses.shape[1] * float(options["mean_bits"])) / 8
            if float(options["mean_bits"] * losses.shape[1]).is_integer():
                within = {name: value for name, value in options.items() if name != "mean_bits"}
                assert_array_equal(call(**within, sizes=np.full(importance.shape[-1], size), max_bytes=room), plain)


@given(cases(max_layers=3, max_experts=6))
def test_budget_order_and_floor_hold(case) -> None:
    importance, losses, options = case
    try:
        bits = select_bitwidths(importance, losses, **options)
    except PolicyError:
        return
    sizes = np.broadcast_to(options.get("sizes", 1), importance.shape)
    axis = None if options["scope"] == "model" else -1
    spent = (bits * sizes).sum(axis=axis)
    if "max_bytes" in options:
        assert (spent / 8 <= options["max_bytes"]).all()
    else:
        assert (spent <= sizes.sum(axis=axis) * options["mean_bits"] + 1e-6).all()
    floor = np.broadcast_to(options.get("min_bits", 0), importance.shape)
    assert (bits >= floor).all()
    assert np.isin(bits, options["bits"]).all()
    if (floor <= options["bits"][0]).all():
        by_rank = np.take_along_axis(bits, np.argsort(-importance, axis=-1, kind="stable"), axis=-1)
        assert (np.diff(by_rank, axis=-1) <= 0).all()


@pytest.mark.parametrize("bits", MENUS)
def test_menus(bits: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(bits))
    losses = -np.sort(-rng.random((3, 12, len(bits))), axis=-1)
    importance = rng.random((3, 12))
    for mean in np.linspace(bits[0], bits[-1], 7):
        within = select_bitwidths(importance, losses, mean, bits=bits, budget="at-most")
        assert set(np.unique(within)) <= set(bits)
        assert (within.mean(axis=1) <= mean + 1e-9).all()
        free = optimal_bitwidths(losses, mean, bits=bits, budget="at-most")
        assert (assigned_loss(losses, free, bits=bits) <= assigned_loss(losses, within, bits=bits)).all()


def test_the_usual_case_is_the_same_by_both_ways() -> None:
    """The compiled search and the dynamic program, which a floor of 0 asks for."""
    rng = np.random.default_rng(0)
    importance, losses, weights = rng.random((4, 3, 9)), rng.random((3, 9, 4)), rng.random((4, 3, 9))
    for mean, given_weights in itertools.product((1, 1.7, 2.5, 3.3, 4), (None, weights)):
        usual = select_bitwidths(importance, losses, mean, weights=given_weights)
        assert_array_equal(usual, select_bitwidths(importance, losses, mean, weights=given_weights, min_bits=0))
        assert_array_equal(usual, select_bitwidths(importance, losses, mean, weights=given_weights, bits=[1, 2, 3, 4]))


def test_a_floor_counts_from_itself() -> None:
    losses = [[8, 4, 2, 1], [8, 4, 2, 1], [1, 1, 1, 0]]
    importance = [3, 2, 1]
    assert select_bitwidths(importance, losses, 2, min_bits=[0, 0, 2]).tolist() == [2, 2, 2]
    assert select_bitwidths(importance, losses, 2, min_bits=2).tolist() == [2, 2, 2]
    assert select_bitwidths(importance, losses, 7 / 3, min_bits=2).tolist() == [3, 2, 2]
    # The least important expert is lifted although those before it stay lower.
    assert select_bitwidths(importance, losses, 4 / 3, min_bits=[0, 0, 2]).tolist() == [1, 1, 2]
    # A floor between two widths is the upper one.
    assert optimal_bitwidths(losses, 3, bits=(1, 2, 3, 4), min_bits=2.5).tolist() == [3, 3, 3]


def test_one_budget_for_a_model_moves_bits_to_the_layers_that_need_them() -> None:
    losses = np.array([[[8.0, 4, 2, 1]] * 2, [[0.8, 0.4, 0.2, 0.1]] * 2])
    importance = np.array([[2.0, 1], [2.0, 1]])
    assert select_bitwidths(importance, losses, 2).tolist() == [[2, 2], [2, 2]]
    assert select_bitwidths(importance, losses, 2, scope="model").tolist() == [[3, 3], [1, 1]]
    assert optimal_bitwidths(losses, 2, scope="model").tolist() == [[3, 3], [1, 1]]
    both = select_bitwidths(np.stack([importance, importance[:, ::-1]]), losses, 2.25, scope="model")
    assert both.shape == (2, 2, 2)
    assert both[0].tolist() == both[1, :, ::-1].tolist() == [[4, 3], [1, 1]]


def test_at_most_leaves_bits_where_they_would_do_harm() -> None:
    losses = np.tile([4.0, 1.0, 2.0, 3.0], (3, 1))
    assert select_bitwidths([3, 2, 1], losses, 3).tolist() == [3, 3, 3]
    assert select_bitwidths([3, 2, 1], losses, 3, budget="at-most").tolist() == [2, 2, 2]
    assert optimal_bitwidths(np.ones((3, 4)), 3, budget="at-most").tolist() == [1, 1, 1]


def test_bytes() -> None:
    # 80 and 8 parameters: a bit of the large expert costs as much as ten of the small.
    losses = [[8, 4, 2, 1], [7, 3.5, 1.75, 0.5]]
    sizes = [80, 8]
    assert optimal_bitwidths(losses, max_bytes=11, sizes=sizes).tolist() == [1, 1]
    assert optimal_bitwidths(losses, max_bytes=14, sizes=sizes).tolist() == [1, 4]
    assert optimal_bitwidths(losses, max_bytes=23.9, sizes=sizes).tolist() == [2, 3]
    assert select_bitwidths([1, 0], losses, max_bytes=14, sizes=sizes).tolist() == [1, 1]
    assert select_bitwidths([0, 1], losses, max_bytes=14, sizes=sizes).tolist() == [1, 4]
    assert optimal_bitwidths(losses, max_bytes=2**59, sizes=sizes).tolist() == [4, 4]
    # A mean is one of weights, not of experts.
    assert optimal_bitwidths(losses, 14 * 8 / 88, sizes=sizes).tolist() == [1, 4]


def test_leading_axes_of_all_options_broadcast() -> None:
    rng = np.random.default_rng(1)
    importance, losses = rng.random((3, 1, 4, 5)), rng.random((4, 5, 3))
    sizes, weights, floors = rng.integers(1, 4, (2, 1, 5)), rng.random((3, 1, 1, 5)), rng.integers(1, 3, 5)
    options = {"bits": (1, 2, 4), "budget": "at-most", "mean_bits": 2.6}
    bits = select_bitwidths(importance, losses, sizes=sizes, weights=weights, min_bits=floors, **options)
    assert bits.shape == (3, 2, 4, 5)
    for s, t, layer in itertools.product(range(3), range(2), range(4)):
        one = select_bitwidths(
            importance[s, 0, layer],
            losses[layer],
            sizes=sizes[t, 0],
            weights=weights[s, 0, 0],
            min_bits=floors,
            **options,
        )
        assert_array_equal(bits[s, t, layer], one)


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0), (2, 0, 3)])
def test_nothing_to_choose(shape: tuple[int, ...], scope: str) -> None:
    for budget in ("exact", "at-most"):
        options = {"mean_bits": 2.0, "budget": budget, "scope": scope, "min_bits": 1}
        assert select_bitwidths(np.empty(shape), np.empty((*shape, 4)), **options).shape == shape
        assert optimal_bitwidths(np.empty((*shape, 4)), **options).shape == shape


def test_a_large_model_with_one_budget() -> None:
    """61 layers of 256 experts; what is spent is what the mean allows."""
    rng = np.random.default_rng(2)
    losses = -np.sort(-rng.random((61, 256, 4)) * rng.exponential(size=(61, 1, 1)), axis=-1)
    bits = optimal_bitwidths(losses, 1.3, scope="model")
    assert bits.sum() == 61 * 256 + math.floor(61 * 256 * 0.3)
    by_layer = optimal_bitwidths(losses, 1.3)
    assert assigned_loss(losses, bits).sum() < assigned_loss(losses, by_layer).sum()


# --- what is refused ---

GOOD = {"importance": np.ones((2, 3)), "losses": np.ones((2, 3, 4)), "mean_bits": 2.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": (1, 2, 3)}, r"shape \[2, 3\] and losses \[2, 3, 4\]; .* \[..., experts, 3\]"),
        ({"bits": (1, 2, 2, 4)}, r"bits is \[1, 2, 2, 4\]; it must be whole numbers from 1 to 16, rising"),
        ({"bits": (0, 1, 2, 3)}, "bits is"),
        ({"bits": (1, 2, 3, 17)}, "bits is"),
        ({"bits": (1, 2, 3, 4.5)}, "bits is"),
        ({"bits": ()}, "bits is"),
        ({"bits": "1234"}, "bits holds"),
        ({"bits": None}, "bits holds"),
        ({"bits": (2, 3, 4, 8)}, None),
        ({"bits": (3, 4, 5, 6)}, "mean_bits is 2.0; it must be a number from 3 to 6"),
        ({"budget": "most"}, "budget is 'most'; it must be 'exact' or 'at-most'; did you mean 'at-most'"),
        ({"budget": None}, "budget is None"),
        ({"budget": np.array(["exact"])}, "budget is"),
        ({"scope": "models"}, "scope is 'models'.*did you mean 'model'"),
        ({"scope": 1}, "scope is 1"),
        ({"min_bits": 5}, r"min_bits\[0\] is 5; it must be a number from 0 to 4"),
        ({"min_bits": [1, 1]}, r"min_bits has shape \[2\]"),
        ({"min_bits": [1, math.nan, 1]}, r"min_bits\[1\] is nan"),
        ({"min_bits": 3}, "mean_bits is 2.0; the lowest widths allowed of layer 0 take a mean of 3"),
        ({"min_bits": [1, 1, 3], "mean_bits": 1.5}, "lowest widths allowed of layer .* take a mean of 1.6666"),
        ({"min_bits": "two"}, "min_bits holds"),
        ({"sizes": [1, 2]}, r"sizes has shape \[2\]; it must be \[..., 3\]"),
        ({"sizes": [1, 2, 0]}, r"sizes\[2\] is 0; it must be a whole number from 1 to 1e\+12"),
        ({"sizes": [1, 2, 2.5]}, r"sizes\[2\] is 2.5"),
        ({"sizes": [1, 2, 1e13]}, r"sizes\[2\] is 1e\+13"),
        ({"sizes": [10**12, 10**12 - 1, 7]}, "would need tables of .* GB.*common divisor"),
        ({"max_bytes": 3}, "mean_bits and max_bytes are both given"),
        ({"max_bytes": 3, "mean_bits": None}, "max_bytes needs sizes"),
        ({"max_bytes": -1, "mean_bits": None, "sizes": [1, 2, 3]}, "max_bytes is -1; it must be a number of bytes"),
        ({"max_bytes": math.nan, "mean_bits": None, "sizes": [1, 2, 3]}, "max_bytes is nan"),
        ({"max_bytes": True, "mean_bits": None, "sizes": [1, 2, 3]}, "max_bytes is True"),
        ({"max_bytes": 0.7, "mean_bits": None, "sizes": [1, 2, 3]}, "lowest widths allowed of .* take 0.75 bytes"),
        ({"mean_bits": None, "scope": "model"}, "mean_bits is None; it must be a number from 1 to 4"),
        ({"mean_bits": True, "scope": "model"}, "mean_bits is True"),
        ({"weights": [1, -1, 1], "scope": "model"}, r"weights\[1\] is -1.0; it must be 0 or more"),
        ({"weights": np.ones((3, 3)), "scope": "model"}, r"leading axes of .* do not match"),
        ({"losses": np.ones((3, 4)), "importance": np.ones(3), "scope": "model"}, r"scope 'model' needs losses"),
        ({"losses": -np.ones((2, 3, 4)), "scope": "model"}, r"losses\[0, 0, 0\] is -1.0"),
        ({"losses": np.full((2, 3, 4), math.nan), "scope": "model"}, r"losses\[0, 0, 0\] is nan"),
        ({"losses": np.ones((2, 5, 4)), "importance": np.ones((2, 3)), "scope": "model"}, "shape"),
        ({"importance": None, "scope": "model"}, "importance holds values of type object"),
        ({"importance": [[1, 2, math.inf]] * 2, "budget": "at-most"}, r"importance\[0, 2\] is inf"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_in_one_line(changes: dict[str, Any], message: str | None) -> None:
    arguments = {**GOOD, **changes}
    if message is None:
        select_bitwidths(**arguments)
        return
    calls = [lambda: select_bitwidths(**arguments)]
    if "importance" not in changes and "shape [2, 3]" not in message.replace("\\", ""):
        free = {name: value for name, value in arguments.items() if name != "importance"}
        calls.append(lambda: optimal_bitwidths(**free))
    for call in calls:
        with pytest.raises(PolicyError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500


JUNK: list[Any] = [
    None, True, -1.5, math.nan, math.inf, 10**400, 1e308, "", "x" * 5000, b"x", [], [[1], [1, 2]], {"a": 1}, {2},
    object(), int, np.float16(2), np.array("x"), np.arange(3), np.ones((2, 3)) * 1j, np.array(["2020"], dtype="M8[D]"),
]  # fmt: skip


@pytest.mark.parametrize("function", [select_bitwidths, optimal_bitwidths])
@pytest.mark.parametrize("changes", [{}, {"sizes": [1, 2, 3], "weights": [1, 2, 3], "min_bits": 1, "scope": "model"}])
def test_junk_in_any_argument_is_taken_or_refused_in_one_line(function, changes: dict[str, Any]) -> None:
    unused = {"sizes": None, "weights": None, "min_bits": None, "max_bytes": None, "scope": "layer", "budget": "exact"}
    arguments = {**GOOD, "bits": (1, 2, 3, 4), **unused, **changes}
    if function is optimal_bitwidths:
        del arguments["importance"]
    function(**arguments)
    refused = 0
    for name, value in itertools.product(arguments, JUNK):
        try:
            function(**{**arguments, name: value})
        except PolicyError as error:
            message = str(error)
            refused += 1
            assert "\n" not in message
            assert len(message) < 600
    assert refused > 150


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_a_mean_that_cannot_be_met_names_the_nearest_that_can(scope: str, ordered: bool) -> None:
    rng = np.random.default_rng(3)
    losses, importance = rng.random((2, 7, 3)), rng.random((2, 7))
    options: dict[str, Any] = {"bits": (2, 4, 8), "scope": scope}

    def choose(mean: float, **more: str) -> np.ndarray:
        if ordered:
            return select_bitwidths(importance, losses, mean, **options, **more)
        return optimal_bitwidths(losses, mean, **options, **more)

    refused = 0
    for mean in np.linspace(2, 8, 25):
        try:
            choose(mean)
        except PolicyError as error:
            refused += 1
            message = str(error)
            assert "cannot meet exactly at 2, 4, 8 bits" in message
            nearest = message.partition("they can meet: ")[2].partition(";")[0].split(" and ")
            below, above = (float(near) for near in nearest)
            assert below < mean < above
            for near in (below, above):
                assert choose(near).sum() == pytest.approx(
                    near * (14 if scope == "model" else 7) * (2 if scope == "layer" else 1)
                )
        within = choose(mean, budget="at-most")
        assert within.mean() <= mean
    assert refused


# --- what would take too much memory or time ---


def model_of_odd_sizes(layers: int, experts: int, low: int, high: int) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    sizes = rng.integers(low, high, (layers, experts))
    return {"losses": rng.random((layers, experts, 4)), "sizes": sizes, "scope": "model"}


def test_a_split_over_layers_that_would_take_too_long_is_refused() -> None:
    model = model_of_odd_sizes(16, 8, 2000, 4000)
    for call in (
        lambda: optimal_bitwidths(mean_bits=2.5, **model),
        lambda: bitwidth_front(**model),
    ):
        with pytest.raises(PolicyError, match=r"16 layers would take .* steps of search.*steps of 1 bits.*round sizes"):
            call()
    # Few costs can be met in order of importance, and the same sizes rounded are quick.
    assert select_bitwidths(np.ones((16, 8)), mean_bits=2.5, **model).shape == (16, 8)
    model["sizes"] = model["sizes"] // 100 * 100
    assert optimal_bitwidths(mean_bits=2.5, **model).shape == (16, 8)


def test_steps_that_no_layer_can_cost_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four widths of one expert are four steps, however large it is."""
    model = model_of_odd_sizes(10, 1, 900, 1000)
    monkeypatch.setattr(solve, "_MOST_STEPS", 4 * 10 * 30_001)
    assert optimal_bitwidths(mean_bits=2, **model).shape == (10, 1)
    monkeypatch.setattr(solve, "_MOST_STEPS", 4 * 10 * 100)
    with pytest.raises(PolicyError, match="would take"):
        optimal_bitwidths(mean_bits=2, **model)


def test_memory_of_a_split_over_layers_is_refused() -> None:
    """Tables of one layer are small, those of all together are not."""
    model = model_of_odd_sizes(2500, 1, 30, 40)
    with pytest.raises(PolicyError, match=r"tables of .* GB.*2501 x"):
        optimal_bitwidths(mean_bits=2.5, **model)


def test_memory_of_a_front_counts_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of_odd_sizes(20, 2, 30, 40)
    budgets = bitwidth_front(**model).loss.shape[-1]
    monkeypatch.setattr(solve, "_MOST_BYTES", 8 * budgets * 10)
    with pytest.raises(PolicyError, match="tables of"):
        bitwidth_front(**model)
    monkeypatch.setattr(solve, "_MOST_BYTES", 8 * budgets * 30)
    bitwidth_front(**model)


def test_too_many_experts_are_named_as_what_is_too_much() -> None:
    with pytest.raises(PolicyError, match=r"tables of 4.8 GB.*20000 experts a layer.*fewer") as caught:
        optimal_bitwidths(np.random.default_rng(0).random((20_000, 4)), 2.5)
    assert "sizes" not in str(caught.value)


def test_axes_that_broadcast_to_more_than_memory_holds_are_refused() -> None:
    crossed = np.ones((10**5, 1, 2)), np.ones((10**5, 2, 4))
    repeated = np.broadcast_to(1.0, (10**10, 2)), np.broadcast_to(1.0, (10**10, 2, 4))
    calls = [
        lambda: select_bitwidths(*crossed, 2),
        lambda: select_bitwidths(*crossed, 2, scope="model"),
        lambda: bitwidth_front(crossed[1], importance=crossed[0]),
        lambda: assigned_loss(crossed[1][:, None], crossed[0][:, 0]),
        lambda: select_bitwidths(repeated[0], repeated[1][0], 2),
        lambda: select_bitwidths(*repeated, 2),
        lambda: optimal_bitwidths(repeated[1], 2),
        lambda: optimal_bitwidths(repeated[1][0], 2, weights=repeated[0]),
    ]
    for call in calls:
        with pytest.raises(PolicyError, match=r"it may hold 536870912|broadcast to .* GB.*at a time") as caught:
            call()
        assert "\n" not in str(caught.value)
