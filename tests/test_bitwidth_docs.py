"""docs/bitwidths.md is true: its examples run, and its table is computed."""

import doctest
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from perfmodel import RoutingTrace, placement
from perfmodel.bitwidth import (
    BUNDLED_LOSSES,
    OBJECTIVES,
    LossTable,
    assigned_loss,
    optimal_bitwidths,
    select_bitwidths,
)

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "bitwidths.md").read_text(encoding="utf-8")
PLAIN = " ".join(TEXT.split())


def test_examples_print_what_the_page_says() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    page = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "bitwidths.md", None, 0)
    result = doctest.DocTestRunner().run(page)
    assert result.attempted > 15
    assert result.failed == 0


@pytest.mark.parametrize("module", ["select", "front", "objective"])
def test_examples_in_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"perfmodel.bitwidth.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def price(cold: int, mean_bits: int, weighted: bool, losses: np.ndarray, importance: np.ndarray) -> tuple[float, float]:
    """Loss of the prefix rule and of uniform bits over the optimum's, mean over sequences and layers."""
    experts = np.argsort(-importance, axis=-1, kind="stable")[..., -cold:]
    table = losses[np.arange(losses.shape[0])[:, None], experts]
    rank = np.take_along_axis(importance, experts, axis=-1)
    weights = rank if weighted else None

    def lost(bits: np.ndarray) -> np.ndarray:
        return assigned_loss(table, bits, weights=weights)

    best = lost(optimal_bitwidths(table, mean_bits, weights=weights))
    prefix = lost(select_bitwidths(rank, table, mean_bits, weights=weights))
    return float((prefix / best).mean()), float((lost(np.full(experts.shape, mean_bits)) / best).mean())


def test_prices_are_those_of_the_bundled_table() -> None:
    losses = LossTable.load(BUNDLED_LOSSES).losses
    importance = placement.importance(RoutingTrace.load("tiny-mixtral-32l-mini")).values
    rows = re.findall(r"^\| (\d) of 8 \| (\d) \| (.*) \|$", TEXT, flags=re.MULTILINE)
    assert len(rows) == 4
    for cold, mean_bits, cells in rows:
        found = [
            value
            for weighted in (False, True)
            for value in price(int(cold), int(mean_bits), weighted, losses, importance)
        ]
        assert cells.split(" | ") == [f"{value:.3f}" for value in found]
    by_layer, by_model = (
        assigned_loss(losses, optimal_bitwidths(losses, 2, scope=scope)).sum() for scope in ("layer", "model")
    )
    assert f"at 2 bits {by_layer / by_model:.2f} times" in PLAIN


def test_prices_on_the_recorded_model(shared: Path) -> None:
    """What was measured when the model was recorded: plain and importance-weighted, mean 2 and 3 bits."""
    losses = LossTable.load(shared / "tiny-mixtral" / "loss_table.npz").losses
    importance = placement.importance(RoutingTrace.load(shared / "tiny-mixtral" / "tiny-mixtral-32l.npz")).values
    recorded = {8: (1.069, 1.102, 1.025, 1.626), 6: (1.064, 1.098, 1.024, 1.459), 4: (1.053, 1.092, 1.017, 1.397)}
    for cold, expected in recorded.items():
        found = [value for weighted in (False, True) for value in price(cold, 2, weighted, losses, importance)]
        assert found == pytest.approx(expected, abs=0.02)
        plain = price(cold, 3, False, losses, importance)
        assert plain == pytest.approx((1.0, 1.0), abs=0.02)
        prefix, uniform = price(cold, 3, True, losses, importance)
        assert prefix == pytest.approx(1.003, abs=0.02)
        assert 1.07 < uniform < 1.2


def test_every_option_and_objective_is_on_the_page() -> None:
    for option in ("mean_bits", "bits", "sizes", "max_bytes", "weights", "min_bits"):
        assert f"| `{option}` |" in TEXT
    for option in ('budget="exact"', 'budget="at-most"', 'scope="model"'):
        assert f"| `{option}` |" in TEXT
    for objective in OBJECTIVES:
        assert f"| `{objective}` |" in TEXT
