"""The bit-width selector and its loss tables."""

import io
import itertools
import math
import os
import zipfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from perfmodel import reference
from perfmodel.bitwidth import BITS, LossTable, bit_budget, select_bitwidths
from perfmodel.errors import PerfModelError, PolicyError, TraceError
from perfmodel.run import evaluate

BUNDLED = "tiny-mixtral-32l-losses"


@st.composite
def layers(draw: st.DrawFn, whole: bool = False, max_experts: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Importance [E], all different, and losses [E, 4] of one layer."""
    num = draw(st.integers(1, max_experts))
    loss = st.integers(0, 40).map(float) if whole else st.floats(0, 1e3, allow_subnormal=False)
    losses = draw(st.lists(st.tuples(loss, loss, loss, loss), min_size=num, max_size=num))
    importance = draw(st.permutations(range(num)))
    return np.array(importance, dtype=float) / num, np.array(losses)


budgets = st.one_of(st.sampled_from([1.0, 2.0, 3.0, 4.0]), st.floats(1.0, 4.0))


def _loss(losses: np.ndarray, bits: np.ndarray) -> Fraction:
    return sum((Fraction(float(losses[i, q - 1])) for i, q in enumerate(bits)), Fraction(0))


# --- the selector ---


@given(layers(whole=True), budgets)
def test_equals_trying_every_prefix_split(layer, mean_bits) -> None:
    # Whole numbers add up exactly, so even ties must agree.
    importance, losses = layer
    order = sorted(range(len(importance)), key=lambda i: -importance[i])
    budget = np.array([bit_budget(len(order), mean_bits)])
    n4, n3, n2, n1 = reference.select_prefix(losses[order][None], budget)[0]
    expected = np.empty(len(order), dtype=int)
    expected[order] = [4] * n4 + [3] * n3 + [2] * n2 + [1] * n1
    assert_array_equal(select_bitwidths(importance, losses, mean_bits), expected)


@given(layers(max_experts=6), budgets)
def test_is_the_best_of_all_ordered_assignments(layer, mean_bits) -> None:
    importance, losses = layer
    bits = select_bitwidths(importance, losses, mean_bits)
    order = np.argsort(-importance)
    budget = bit_budget(len(order), mean_bits)
    best = min(
        _loss(losses[order], np.array(tried))
        for tried in itertools.combinations_with_replacement((4, 3, 2, 1), len(order))
        if sum(tried) - len(order) == budget
    )
    assert 0 <= _loss(losses, bits) - best <= 1e-12 * (1 + losses.sum())


@given(layers(), budgets)
def test_spends_the_budget_exactly_and_in_order(layer, mean_bits) -> None:
    importance, losses = layer
    bits = select_bitwidths(importance, losses, mean_bits)
    assert bits.dtype == np.int8
    assert bits.min() >= 1
    assert bits.max() <= 4
    assert bits.sum() - bits.size == math.floor(bits.size * (mean_bits - 1) + 1e-9)
    assert (np.diff(bits[np.argsort(-importance)]) <= 0).all()


@given(layers(), st.integers(1, 4))
def test_is_never_worse_than_uniform(layer, mean_bits) -> None:
    importance, losses = layer
    bits = select_bitwidths(importance, losses, mean_bits)
    uniform = np.full(bits.size, mean_bits)
    assert _loss(losses, bits) <= _loss(losses, uniform) + Fraction(1e-12) * (1 + _loss(losses, uniform))


@given(layers(), budgets, st.integers(-900, 900))
def test_does_not_depend_on_the_unit_of_losses(layer, mean_bits, exponent) -> None:
    importance, losses = layer
    # Keep clear of the range where scaling itself would lose bits.
    losses = np.where(losses < 1e-9, 0.0, losses)
    scaled = np.ldexp(losses, exponent)
    expected = select_bitwidths(importance, losses, mean_bits)
    assert_array_equal(select_bitwidths(importance, scaled, mean_bits), expected)


@given(layers(), budgets, st.randoms(use_true_random=False))
def test_follows_a_permutation_of_the_experts(layer, mean_bits, random) -> None:
    importance, losses = layer
    order = list(range(len(importance)))
    random.shuffle(order)
    bits = select_bitwidths(importance, losses, mean_bits)
    assert_array_equal(select_bitwidths(importance[order], losses[order], mean_bits), bits[order])


@given(layers(), budgets)
def test_depends_on_the_order_of_importance_only(layer, mean_bits) -> None:
    importance, losses = layer
    bits = select_bitwidths(importance, losses, mean_bits)
    assert_array_equal(select_bitwidths(np.exp(importance) - 7, losses, mean_bits), bits)


def test_equal_importance_goes_by_index() -> None:
    losses = np.tile([8.0, 8.0, 8.0, 0.0], (4, 1))  # only 4 bits help
    assert select_bitwidths(np.ones(4), losses, 1.75).tolist() == [4, 1, 1, 1]
    assert select_bitwidths([0, 1, 1, 0], losses, 1.75).tolist() == [1, 4, 1, 1]


def test_equal_losses_prefer_few_wide_experts() -> None:
    assert select_bitwidths(np.arange(6.0), np.ones((6, 4)), 2.0).tolist() == [2] * 6
    assert select_bitwidths(np.arange(6.0), np.ones((6, 4)), 2.5).tolist() == [2, 2, 2, 3, 3, 3]


def test_more_bits_in_total_never_cost_more_when_losses_fall() -> None:
    rng = np.random.default_rng(3)
    losses = np.sort(rng.random((9, 4)), axis=1)[:, ::-1]
    importance = rng.random(9)
    totals = [_loss(losses, select_bitwidths(importance, losses, 1 + r / 9)) for r in range(28)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(totals))


def test_leading_axes_broadcast() -> None:
    rng = np.random.default_rng(1)
    importance = rng.random((5, 3, 6))
    losses = rng.random((3, 6, 4))
    bits = select_bitwidths(importance, losses, 2.5)
    assert bits.shape == (5, 3, 6)
    for s, layer in itertools.product(range(5), range(3)):
        assert_array_equal(bits[s, layer], select_bitwidths(importance[s, layer], losses[layer], 2.5))
    one = importance[0, 0]
    assert_array_equal(select_bitwidths(one, losses, 2.5)[2], select_bitwidths(one, losses[2], 2.5))
    transposed = np.asfortranarray(losses)
    transposed.flags.writeable = False
    assert_array_equal(select_bitwidths(importance, transposed, 2.5), bits)


def test_nothing_to_choose() -> None:
    assert select_bitwidths(np.empty((2, 3, 0)), np.empty((3, 0, 4)), 2.0).shape == (2, 3, 0)
    assert select_bitwidths(np.empty((0, 5)), np.ones((5, 4)), 2.0).shape == (0, 5)
    with pytest.raises(PolicyError):
        select_bitwidths([], np.empty((0, 4)), 5.0)


@pytest.mark.parametrize(("num", "mean", "expected"), [(6, 3, 12), (10, 2.3, 13), (7, 1.5, 3), (0, 4, 0)])
def test_budget(num: int, mean: float, expected: int) -> None:
    assert bit_budget(num, mean) == expected
    assert bit_budget(num, np.float64(mean)) == expected


@pytest.mark.parametrize(
    "mean_bits",
    [0.99, 4.01, -2, math.nan, math.inf, True, "2", None, [2.0], 2j, 10**400, 10**5000, np.array([2.0])],
    ids=lambda value: str(type(value).__name__),
)
def test_refuses_an_impossible_budget(mean_bits) -> None:
    with pytest.raises(PolicyError, match=r"mean_bits is .*from 1 to 4"):
        select_bitwidths([1.0, 2.0], np.ones((2, 4)), mean_bits)


GOOD = np.ones((2, 4))


@pytest.mark.parametrize(
    ("importance", "losses", "message"),
    [
        ([1.0, math.nan], GOOD, r"importance\[1\] is nan"),
        ([1.0, -math.inf], GOOD, r"importance\[1\] is -inf"),
        ([1.0, 2.0], GOOD * [1, 1, math.inf, 1], r"losses\[0, 2\] is inf"),
        ([1.0, 2.0], GOOD * [1, -1, 1, 1], r"losses\[0, 1\] is -1.0; it must be 0 or more"),
        ([1.0, 2.0], np.ones((3, 4)), r"shape \[2\] and losses \[3, 4\]"),
        ([1.0, 2.0], np.ones((2, 3)), r"shape \[2\] and losses \[2, 3\]"),
        ([1.0, 2.0], np.ones(4), "shape"),
        (1.0, GOOD, "shape"),
        (np.ones((3, 2)), np.ones((4, 2, 4)), "do not match"),
        (["a", "b"], GOOD, "type <U1"),
        ([True, False], GOOD, "type bool"),
        ([1j, 2], GOOD, "type complex128"),
        ([10**400, 2], GOOD, "type object"),
        ([None, 2], GOOD, "type object"),
        ([[1.0], [1.0, 2.0]], GOOD, "not an array of numbers"),
        ([1.0, 2.0], {"a": 1}, "type object"),
    ],
)
def test_refuses_bad_numbers_and_shapes(importance, losses, message) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        select_bitwidths(importance, losses, 2.0)
    assert "\n" not in str(caught.value)


def test_survives_the_largest_and_smallest_losses() -> None:
    largest = np.finfo(float).max
    losses = np.array([[largest, largest / 2, 0, 0]] * 3 + [[5e-324, 0, 0, 0]] * 3)
    assert select_bitwidths(np.arange(6.0)[::-1], losses, 2.0).tolist() == [3, 3, 3, 1, 1, 1]


# --- loss tables ---


def test_bundled_table() -> None:
    table = LossTable.load(BUNDLED)
    assert (table.num_layers, table.num_experts) == (32, 8)
    assert (table.name, table.source, table.notes) == (BUNDLED, "measured", ())
    assert not table.losses.flags.writeable
    # Each bit helps every expert.
    assert (np.diff(table.losses, axis=2) < 0).all()


def test_layers_are_cycled_or_cut_with_a_note() -> None:
    table = LossTable.load(BUNDLED)
    assert table.for_model(32, 8) is table
    longer = table.for_model(56, 8)
    assert_array_equal(longer.losses, table.losses[np.arange(56) % 32])
    assert longer.source == "measured"
    assert "32 layers is cycled to 56" in longer.notes[0]
    shorter = longer.for_model(4, 8)
    assert_array_equal(shorter.losses, table.losses[:4])
    assert len(shorter.notes) == 2


def test_losses_that_rise_with_bits_are_kept_with_a_note() -> None:
    falling = np.tile([8.0, 4.0, 2.0, 2.0], (2, 3, 1))
    assert LossTable(falling, "mine").for_model(2, 3).notes == ()
    losses = falling.copy()
    losses[0, 1] = [1, 2, 4, 8]
    losses[1, 2, 3] = 2.5
    table = LossTable(losses, "mine")
    same = table.for_model(2, 3)
    assert_array_equal(same.losses, losses)
    assert same.notes == (
        "loss table mine: the loss of 2 of 6 experts rises with bits somewhere; check the order of the last axis",
    )
    assert same.for_model(2, 3).notes == same.notes
    cycled = table.for_model(3, 3)
    assert "cycled" in cycled.notes[0]
    assert "the loss of 3 of 9 experts rises with bits" in cycled.notes[1]


def test_the_note_on_rising_losses_reaches_the_report() -> None:
    table = LossTable(np.tile([1.0, 2.0, 4.0, 8.0], (32, 8, 1)), "upside-down")
    options = {"prompt": 8, "output": 2, "losses": table}
    one = evaluate("mixtral-8x7b", "h100-cxl2-ndp", "tiny-mixtral-32l-mini", "context-aware", **options)
    assert any("the loss of 256 of 256 experts rises with bits" in note for note in one.notes)


def test_another_number_of_experts_needs_consent() -> None:
    table = LossTable.load(BUNDLED)
    with pytest.raises(TraceError, match="8 experts per layer, the model 64"):
        table.for_model(16, 64)
    assumed = table.for_model(16, 64, assume=True)
    assert assumed.source == "assumed"
    assert assumed.losses.shape == (16, 64, 4)
    assert any("not used" in note for note in assumed.notes)


def test_assumed_losses_fall_fourfold_per_bit() -> None:
    table = LossTable.assumed(2, 3)
    assert table.source == "assumed"
    assert_array_equal(table.losses[1, 2], [4.0**-q for q in BITS])


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "3", None, 10**5000], ids=lambda v: type(v).__name__)
def test_sizes_are_whole_numbers(size) -> None:
    with pytest.raises(TraceError, match="num_layers is"):
        LossTable.assumed(size, 8)
    with pytest.raises(TraceError, match="num_experts is"):
        LossTable.load(BUNDLED).for_model(8, size)


@pytest.mark.parametrize(
    "losses",
    [
        np.ones((2, 4)),
        np.ones((2, 3, 5)),
        np.ones((0, 3, 4)),
        -np.ones((1, 1, 4)),
        np.full((1, 1, 4), np.nan),
    ],
)
def test_a_table_is_checked_when_made(losses) -> None:
    with pytest.raises(TraceError, match="mine: losses"):
        LossTable(losses, "mine")


def test_a_table_is_a_copy() -> None:
    losses = np.ones((1, 2, 4))
    table = LossTable(losses, "mine")
    losses[:] = 7
    assert_array_equal(table.losses, 1)
    with pytest.raises(TraceError, match="source is 'guessed'"):
        LossTable(losses, "mine", "guessed")  # type: ignore[arg-type]


def test_a_file_is_read_by_path(tmp_path: Path) -> None:
    losses = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    path = tmp_path / "mine.npz"
    np.savez_compressed(path, losses=losses, something=np.array("else"))
    for given_path in (path, str(path)):
        table = LossTable.load(given_path)
        assert_array_equal(table.losses, losses)
        assert table.name == "mine"


def _npz(path: Path, **arrays: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in arrays.items():
            archive.writestr(f"{name}.npy", data)
    return path


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _with_shape(npy: bytes, shape: bytes) -> bytes:
    """The same file whose header claims another shape; the padding keeps its length."""
    old = b"(4, 4, 4), }" + b" " * 20
    assert old in npy
    return npy.replace(old, (shape + b", }").ljust(len(old)))


def _bad_files(folder: Path) -> dict[str, Path]:
    whole = folder / "whole.npz"
    np.savez(whole, losses=np.ones((4, 4, 4)))
    header = _npy(np.ones((4, 4, 4)))
    bad = {
        "missing": folder / "missing.npz",
        "folder": folder,
        "empty": folder / "empty.npz",
        "junk": folder / "junk.npz",
        "cut": folder / "cut.npz",
        "null byte": Path("a\0b.npz"),
        "long name": folder / ("x" * 5000 + ".npz"),
        "no key": _npz(folder / "key.npz", other=header),
        "pickled": _npz(folder / "pickled.npz", losses=_npy(np.array([{"a": 1}], dtype=object))),
        "not an array": _npz(folder / "text.npz", losses=b"hello"),
        "cut array": _npz(folder / "short.npz", losses=header[:-9]),
        "bad header": _npz(folder / "header.npz", losses=header.replace(b"(4, 4, 4)", b"(4,4,9**)")),
        "huge shape": _npz(folder / "huge.npz", losses=_with_shape(header, b"(4000000000, 8, 4)")),
        "larger shape": _npz(folder / "larger.npz", losses=_with_shape(header, b"(400, 8, 4)")),
        "strings": _npz(folder / "strings.npz", losses=_npy(np.full((2, 2, 4), "x"))),
        "complex": _npz(folder / "complex.npz", losses=_npy(np.ones((2, 2, 4), dtype=complex))),
        "structured": _npz(folder / "struct.npz", losses=_npy(np.ones((2, 2, 4), dtype="f4,f4"))),
        "flat": _npz(folder / "flat.npz", losses=_npy(np.ones(4))),
        "scalar": _npz(folder / "scalar.npz", losses=_npy(np.float64(1))),
        "nan": _npz(folder / "nan.npz", losses=_npy(np.full((1, 1, 4), np.nan))),
    }
    bad["empty"].write_bytes(b"")
    bad["junk"].write_bytes(os.urandom(3000))
    bad["cut"].write_bytes(whole.read_bytes()[:-40])
    return bad


def test_a_bad_file_is_an_error_in_one_line(tmp_path: Path) -> None:
    for what, path in _bad_files(tmp_path).items():
        with pytest.raises(TraceError) as caught:
            LossTable.load(path)
        message = str(caught.value)
        assert "\n" not in message, what
        assert str(path).replace("\0", "\\x00")[:60] in message, (what, message)


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.routing.npz.MAX_BYTES", 1000)
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, losses=np.zeros((50, 8, 4)))
    with pytest.raises(TraceError, match="would expand to"):
        LossTable.load(path)


@pytest.mark.parametrize("name", ["no-such-table", "", "tiny-mixtral-32l-mini", 3, None, b"x.npz", ["a"]])
def test_an_unknown_name_lists_the_bundled_ones(name) -> None:
    with pytest.raises(PerfModelError, match=f"{BUNDLED}|a path or a name"):
        LossTable.load(name)
