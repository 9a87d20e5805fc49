"""Numbers that README.md and docs/defaults.md quote are the ones the reproduction gives now."""

from pathlib import Path

import pytest

from perfmodel.evidence.reproduce import Reproduction, reproduce

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def result() -> Reproduction:
    return reproduce()


@pytest.fixture(scope="module")
def defaults() -> str:
    return " ".join((ROOT / "docs" / "defaults.md").read_text(encoding="utf-8").split())


def percent(value: float | None) -> str:
    assert value is not None
    return f"{100 * value:.1f} %"


def test_headline_errors(result: Reproduction, defaults: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for value in (result.evidence_geomean_error, result.geomean_error, result.fit.leave_one_out_geomean_error):
        assert percent(value) in readme
        assert percent(value) in defaults


def test_fitted_constants(result: Reproduction, defaults: str) -> None:
    gpu, ndp, link = result.fit.values
    assert f"{gpu:.3f}, {ndp:.3f} ({512 * ndp:.0f} GB/s), {link:.1f} GB/s" in defaults


def test_other_evidence_and_readings(result: Reproduction, defaults: str) -> None:
    for outcome in result.machines:
        assert percent(outcome.evidence_geomean_error) in defaults, outcome.name
    quoted = {
        "GPU and NDP in turn (overlap=sum)",
        "MoNDE keeps the last copied expert",
        "MoNDE by its balance rule",
        "HOBBIT by its thresholds (split=gates)",
        "HOBBIT caches one expert a layer",
    }
    found = {outcome.name: outcome for outcome in result.readings}
    assert quoted <= set(found)
    for name in quoted:
        pair = f"{percent(found[name].evidence_geomean_error)}, {percent(found[name].geomean_error)}"
        assert pair in defaults, name


def test_generated_traces(result: Reproduction, defaults: str) -> None:
    generated = [outcome for outcome in result.traces if "synthetic" in outcome.name]
    evidence = [100 * outcome.evidence_geomean_error for outcome in generated]
    refitted = [100 * outcome.geomean_error for outcome in generated]
    assert f"{min(evidence):.1f} to {max(evidence):.1f} % on evidence" in defaults
    assert f"{min(refitted):.1f} to {max(refitted):.1f} % refitted" in defaults
    rates = [" / ".join(f"{rate:.2f}" for rate in outcome.hit_rate.values()) for outcome in generated]
    assert f"with {min(rates)} to {max(rates)} they" in defaults


def test_own_best(result: Reproduction, defaults: str) -> None:
    for best in result.own_best:
        left = " / ".join(f"{best.gains[bits]:.1f}" for bits in ("3-bit", "2-bit"))
        before = " / ".join(
            f"{best.gains[bits] * best.tok_per_s / best.default_tok_per_s:.1f}" for bits in ("3-bit", "2-bit")
        )
        label = {"mixtral-8x7b": "8x7B", "mixtral-8x22b": "8x22B"}[best.model]
        name = {"monde": "MoNDE", "hobbit": "HOBBIT"}[best.baseline]
        published = best.gpu_experts == {"8x7B": 4, "8x22B": 2}[label]
        head = f"{label} over {name} |" if published else f"{label} over {name}, {best.gpu_experts} a layer |"
        line = next(part for part in defaults.split("| 8x") if f"8x{part}".startswith(head))
        assert f"{left} x" in line
        assert (f"{before} x" in line) is published


def test_which_ranges_reach_lower(result: Reproduction, defaults: str) -> None:
    """The sentence on the lower ends of the computed end-to-end ranges names exactly these rows."""
    assert (
        "The computed 2-bit ranges, and the calibrated 8x22B one at 3 bits, reach lower than the published" in defaults
    )
    lower = {
        (row.figure.id, column)
        for row in result.rows
        for column in ("evidence", "calibrated")
        if row.figure.kind == "range" and row.columns[column].low < row.figure.value[0]
    }
    both = {(f"{m}-end-to-end-2bit", c) for m in ("8x7b", "8x22b") for c in ("evidence", "calibrated")}
    assert lower == both | {("8x22b-end-to-end-3bit", "calibrated")}
    for row in result.rows:
        if row.figure.kind == "range":
            assert row.errors["evidence"] == row.errors["calibrated"] == 0.0
            assert row.errors["datasheet"] > 0.0
