"""``perfmodel reproduce``: every number it prints, recomputed here from what it says about itself."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import perfmodel
from perfmodel import reports
from perfmodel.cli import main
from perfmodel.evidence import explore
from perfmodel.evidence import reproduce as reproduction
from perfmodel.hardware import load_system
from perfmodel.model import MoEModel
from perfmodel.routing import RoutingTrace
from perfmodel.run import evaluate

PACKAGE = Path(perfmodel.__file__).resolve().parent
PUBLISHED = {
    row["id"]: row for row in json.loads((PACKAGE / "evidence" / "published.json").read_text("utf-8"))["figures"]
}
FIT_IDS = [name for name, row in PUBLISHED.items() if row["fit"]]
COLUMNS = ("datasheet", "evidence", "calibrated")


class Made(NamedTuple):
    """One run of the command: its exit code and output, the document, the folder, and the result behind it."""

    code: int
    out: str
    err: str
    folder: Path
    result: reproduction.Reproduction

    @property
    def document(self) -> dict[str, Any]:
        return json.loads(self.out)

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in self.document["rows"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """``perfmodel reproduce --json``, run once in this process."""
    folder = tmp_path_factory.mktemp("json") / "new" / "folder"
    original = reproduction.reproduce
    results: list[reproduction.Reproduction] = []

    def spy(**options: Any) -> reproduction.Reproduction:
        results.append(original(**options))
        return results[-1]

    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(reproduction, "reproduce", spy)
        code = main(["reproduce", "--json", "--out", str(folder)])
    assert len(results) == 1
    return Made(code, out.getvalue(), err.getvalue(), folder, results[0])


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """``python -m perfmodel reproduce``, run once in a process of its own."""
    folder = tmp_path_factory.mktemp("text")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "perfmodel", "reproduce"],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    return done, folder / "reproduction"


def ends(value: float | list[float]) -> tuple[float, float]:
    """Both ends of a range, or a number twice."""
    return (value[0], value[1]) if isinstance(value, list) else (value, value)


def distance(published: float | list[float], computed: float | list[float]) -> float:
    """|ln(computed / published)| of two numbers; of two ranges, that of the gap between them."""
    (p_low, p_high), (c_low, c_high) = ends(published), ends(computed)
    return max(0.0, math.log(p_low) - math.log(c_high), math.log(c_low) - math.log(p_high))


def geomean_error(errors: list[float]) -> float:
    return math.exp(math.fsum(errors) / len(errors)) - 1


# The document


def test_standard_output_is_one_json_document(made: Made) -> None:
    assert made.code == 0
    document = made.document  # one document and nothing else, or this raises
    assert set(document) >= {
        "rows", "constants", "fitted", "fit_rows", "geomean_error", "max_error", "evidence_geomean_error",
        "leave_one_out_geomean_error", "hit_rate", "trace", "systems", "notes",
    }  # fmt: skip
    for row in document["rows"]:
        assert set(row) >= {"id", "model", "system", "published", *COLUMNS, "error"}
    assert "NaN" not in made.out
    assert "Infinity" not in made.out


def test_rows_are_the_published_figures(made: Made) -> None:
    assert list(made.rows) == list(PUBLISHED)
    for name, row in made.rows.items():
        figure = PUBLISHED[name]
        assert row["published"] == figure["value"], name
        assert (row["model"], row["system"], row["fit"]) == (figure["model"], figure["system"], figure["fit"])
        assert row["mark"] == figure["mark"]
        assert row["mean_bits"] == figure.get("mean_bits")
    assert made.document["fit_rows"] == FIT_IDS
    assert len(FIT_IDS) == 7


def test_errors_follow_from_the_published_and_computed_values(made: Made) -> None:
    for name, row in made.rows.items():
        for column in COLUMNS:
            expected = distance(row["published"], row[column])
            np.testing.assert_allclose(row["errors"][column] + 1, expected + 1, rtol=1e-13, atol=0, err_msg=name)
        assert row["error"] == row["errors"]["calibrated"]


def test_ranges_say_whether_they_overlap(made: Made) -> None:
    ranges = [row for row in made.rows.values() if isinstance(row["published"], list)]
    assert len(ranges) == 4
    for row in ranges:
        low, high = row["published"]
        for column in COLUMNS:
            computed = row[column]
            assert computed[0] <= computed[1]
            overlap = computed[0] <= high and low <= computed[1]
            assert row["overlaps"][column] is overlap
            assert (row["errors"][column] == 0.0) is overlap
        assert row["overlaps"]["calibrated"]


def test_geometric_means_are_those_of_the_fitted_rows(made: Made) -> None:
    document, rows = made.document, made.rows
    for key, column in (("geomean_error", "calibrated"), ("evidence_geomean_error", "evidence")):
        errors = [distance(PUBLISHED[name]["value"], rows[name][column]) for name in FIT_IDS]
        np.testing.assert_allclose(document[key], geomean_error(errors), rtol=1e-12, atol=0)
    assert document["max_error"] == max(rows[name]["error"] for name in FIT_IDS)


def test_the_reproduction_is_as_close_as_promised(made: Made) -> None:
    document = made.document
    assert document["geomean_error"] <= 0.05
    assert document["evidence_geomean_error"] <= 0.10
    assert document["geomean_error"] < document["leave_one_out_geomean_error"] <= 0.10
    # A row that is far off must not hide behind the mean.
    assert document["max_error"] <= 0.20
    held_out = [row["error"] for name, row in made.rows.items() if name not in FIT_IDS]
    assert max(held_out) <= 0.10


@pytest.mark.parametrize("column", COLUMNS)
def test_order_and_direction_hold_in_every_column(made: Made, column: str) -> None:
    value = {name: row[column] for name, row in made.rows.items()}
    assert value["8x22b-decode-monde"] < value["8x22b-decode-3bit"] < value["8x22b-decode-2bit"]
    for model in ("8x7b", "8x22b"):
        # HOBBIT is slower than MoNDE, MoNDE than 3 bits, 3 bits than 2 bits; as published.
        assert 1 < value[f"{model}-decode-gain-3bit"] < value[f"{model}-decode-gain-2bit"]
        assert value[f"{model}-decode-gain-2bit"] < value[f"{model}-over-hobbit-2bit"]
        three, two = value[f"{model}-end-to-end-3bit"], value[f"{model}-end-to-end-2bit"]
        assert 1 < three[0] < three[1]
        assert three[0] < two[0] < two[1]
        assert three[1] < two[1]
    assert 1 < value["both-ndp-latency-3bit"] < value["both-ndp-latency-2bit"]
    ratio = value["8x22b-decode-2bit"] / value["8x22b-decode-monde"]
    np.testing.assert_allclose(value["8x22b-decode-gain-2bit"], ratio, rtol=1e-12, atol=0)


def test_published_order_is_the_one_checked() -> None:
    value = {name: row["value"] for name, row in PUBLISHED.items()}
    assert value["8x22b-decode-monde"] < value["8x22b-decode-3bit"] < value["8x22b-decode-2bit"]
    assert value["8x7b-decode-gain-2bit"] < value["8x7b-over-hobbit-2bit"]
    assert value["8x22b-decode-gain-2bit"] < value["8x22b-over-hobbit-2bit"]


# Constants and the fit


def test_every_constant_is_named_with_its_origin(made: Made) -> None:
    constants = {c["name"]: c for c in made.document["constants"]}
    system = made.result.systems["calibrated"]
    assert set(system.numeric_keys()) <= set(constants)
    for constant in constants.values():
        assert set(constant) >= {"name", "value", "unit", "origin", "fitted", "citation"}
        assert constant["origin"] in {"datasheet", "published", "derived", "measured", "calibrated", "assumed"}
        assert (constant["origin"] == "calibrated") is constant["fitted"]
        assert constant["citation"].strip()


def test_at_most_three_constants_are_fitted_and_named(made: Made) -> None:
    fitted = made.document["fitted"]
    assert 1 <= len(fitted) <= 3
    constants = {c["name"]: c for c in made.document["constants"]}
    assert {f["name"] for f in fitted} == {name for name, c in constants.items() if c["fitted"]}
    for entry in fitted:
        assert entry["value"] == constants[entry["name"]]["value"] > 0
        assert entry["unit"] == constants[entry["name"]]["unit"]
        assert entry["evidence"] == made.result.systems["evidence"].get(entry["name"])
        if entry["name"].endswith("efficiency"):
            assert entry["value"] <= 1


def test_the_other_columns_hold_nothing_fitted(made: Made) -> None:
    for column in ("datasheet", "evidence"):
        assert "calibrated" not in {c.source for c in made.result.systems[column].constants()}
    peaks = made.result.systems["datasheet"]
    assert all(peaks.get(key) == 1 for key in peaks.numeric_keys() if key.endswith("efficiency"))
    assert made.document["systems"] == {name: system.name for name, system in made.result.systems.items()}
    fitted = {f["name"] for f in made.document["fitted"]}
    calibrated, evidence = made.result.systems["calibrated"], made.result.systems["evidence"]
    assert {key for key in calibrated.numeric_keys() if calibrated.get(key) != evidence.get(key)} == fitted


def _fit_with(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> reproduction.Reproduction:
    """The reproduction with one published figure replaced: ``figure`` and the fields to change."""
    name = changed.pop("figure")
    figures = tuple(dataclasses.replace(f, **changed) if f.id == name else f for f in reproduction.load_figures())
    with monkeypatch.context() as patch:
        patch.setattr(reproduction, "load_figures", lambda: figures)
        return reproduction.reproduce(explore=False)


@pytest.mark.parametrize("name", ["8x22b-decode-gain-3bit", "8x7b-end-to-end-2bit", "both-ndp-latency-2bit"])
def test_held_out_figures_do_not_move_the_constants(made: Made, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert not PUBLISHED[name]["fit"]
    wrong = tuple(3.0 * end for end in ends(PUBLISHED[name]["value"]))
    result = _fit_with(monkeypatch, figure=name, value=wrong if "end-to-end" in name else wrong[:1])
    assert result.fit.values == made.result.fit.values
    assert result.geomean_error == made.result.geomean_error
    row = next(row for row in result.rows if row.figure.id == name)
    assert row.errors["calibrated"] > 0.5


def test_fitted_figures_do_move_the_constants(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    result = _fit_with(monkeypatch, figure="8x22b-decode-monde", value=(1.5,))
    shift = [abs(math.log(a / b)) for a, b in zip(result.fit.values, made.result.fit.values, strict=True)]
    assert max(shift) > 0.01


def test_leave_one_out_is_a_fit_without_that_figure(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = made.result.fit.left_out
    assert left_out is not None
    assert left_out.shape == (7,)
    expected = geomean_error([abs(float(r)) for r in left_out])
    np.testing.assert_allclose(made.document["leave_one_out_geomean_error"], expected, rtol=1e-12, atol=0)
    name = "8x7b-decode-gain-3bit"  # the one that is furthest off
    result = _fit_with(monkeypatch, figure=name, fit=False)
    row = next(row for row in result.rows if row.figure.id == name)
    np.testing.assert_allclose(row.errors["calibrated"], abs(left_out[FIT_IDS.index(name)]), rtol=1e-3, atol=0)
    assert row.errors["calibrated"] > made.rows[name]["error"]


# Files


def test_the_overlay_reprices_to_the_same_rows(made: Made) -> None:
    system = load_system(made.folder / "calibrated.toml")
    calibrated = made.result.systems["calibrated"]
    assert all(system.get(f["name"]) == f["value"] for f in made.document["fitted"])
    assert {key: system.get(key) for key in system.numeric_keys()} == {
        key: calibrated.get(key) for key in calibrated.numeric_keys()
    }
    fitted = {f["name"] for f in made.document["fitted"]}
    assert {c.key for c in system.constants() if c.source == "calibrated"} == fitted
    again = reproduction.reproduce(system=str(made.folder / "calibrated.toml"), explore=False)
    for row in again.rows:
        # The overlay is where that run starts from, so its column of evidence is this run's calibrated one.
        stated = ends(made.rows[row.figure.id]["calibrated"])
        np.testing.assert_allclose(row.columns["evidence"], stated, rtol=1e-9, atol=0, err_msg=row.figure.id)


def test_rows_are_what_anybody_gets_from_the_overlay(made: Made) -> None:
    trace, overlay = RoutingTrace.load(reproduction.BUNDLED_TRACE), str(made.folder / "calibrated.toml")
    rates: dict[tuple[str, str], float] = {}
    for model in ("mixtral-8x7b", "mixtral-8x22b"):
        for policy in ("monde", "hobbit", "context-aware:mean_bits=2", "context-aware:mean_bits=3"):
            one = evaluate(MoEModel.from_config(model), overlay, trace, policy, prompt=128, output=2048, layers="cycle")
            rates[model, policy] = one.decode_tok_per_s
    for name, model, policy, baseline in (
        ("8x22b-decode-monde", "mixtral-8x22b", "monde", None),
        ("8x22b-decode-3bit", "mixtral-8x22b", "context-aware:mean_bits=3", None),
        ("8x22b-decode-2bit", "mixtral-8x22b", "context-aware:mean_bits=2", None),
        ("8x7b-decode-gain-3bit", "mixtral-8x7b", "context-aware:mean_bits=3", "monde"),
        ("8x7b-decode-gain-2bit", "mixtral-8x7b", "context-aware:mean_bits=2", "monde"),
        ("8x22b-decode-gain-3bit", "mixtral-8x22b", "context-aware:mean_bits=3", "monde"),
        ("8x22b-decode-gain-2bit", "mixtral-8x22b", "context-aware:mean_bits=2", "monde"),
        ("8x7b-over-hobbit-2bit", "mixtral-8x7b", "context-aware:mean_bits=2", "hobbit"),
        ("8x22b-over-hobbit-2bit", "mixtral-8x22b", "context-aware:mean_bits=2", "hobbit"),
    ):
        value = rates[model, policy] / (1.0 if baseline is None else rates[model, baseline])
        np.testing.assert_allclose(made.rows[name]["calibrated"], value, rtol=1e-9, atol=0, err_msg=name)


def test_a_range_is_what_anybody_gets_at_every_output_length(made: Made) -> None:
    outputs = (256, 512, 1024, 2048)
    gains = []
    for output in outputs:
        ours, theirs = (
            evaluate(
                "mixtral-8x22b", "h100-cxl2-ndp", reproduction.BUNDLED_TRACE, policy,
                prompt=128, output=output, layers="cycle",
            ).end_to_end_s
            for policy in ("context-aware:mean_bits=3", "monde")
        )  # fmt: skip
        assert ours is not None
        assert theirs is not None
        gains.append(theirs / ours)
    row = made.rows["8x22b-end-to-end-3bit"]["evidence"]
    np.testing.assert_allclose(row, (min(gains), max(gains)), rtol=1e-9, atol=0)
    # A length between the ends moves neither of them, so the lengths themselves are compared too.
    assert sorted(reproduction.RANGE_OUTPUTS) == sorted(outputs)
    assert len(set(gains)) == len(outputs)


def test_csv_holds_the_same_rows(made: Made) -> None:
    with (made.folder / "reproduce.csv").open(newline="", encoding="utf-8") as file:
        table = {line["id"]: line for line in csv.DictReader(file)}
    assert list(table) == list(made.rows)
    for name, row in made.rows.items():
        line = table[name]
        for key in ("model", "system", "kind", "mark"):
            assert line[key] == row[key]
        assert line["baseline"] == (row["baseline"] or "")
        assert line["fit"] == str(row["fit"])
        assert (float(line["mean_bits"]) if line["mean_bits"] else None) == row["mean_bits"]
        for column in ("published", *COLUMNS):
            assert (float(line[f"{column}_low"]), float(line[f"{column}_high"])) == ends(row[column]), (name, column)
        for column in COLUMNS:
            assert float(line[f"error_{column}"]) == row["errors"][column]


def test_every_file_that_is_named_is_there_and_no_other(made: Made) -> None:
    assert made.err.count("\n") == 1
    message = re.fullmatch(r"wrote (.*) to (.*)\n", made.err)
    assert message is not None
    assert Path(message[2]) == made.folder
    names: set[str] = set()
    for item in message[1].split(", "):
        stem, slash, rest = item.partition("/")
        names |= {stem, Path(stem).stem + rest} if slash else {item}
    assert names == {path.name for path in made.folder.iterdir()}
    assert {"reproduce.csv", "calibrated.toml"} < names
    figures = [made.folder / name for name in names if name.endswith(("png", "svg"))]
    assert len(figures) >= 4
    for path in figures:
        start = path.read_bytes()[:200]
        assert start.startswith(b"\x89PNG\r\n\x1a\n" if path.suffix == ".png" else b"<?xml"), path.name


def test_another_process_writes_the_same_numbers(
    made: Made, printed: tuple[subprocess.CompletedProcess[str], Path]
) -> None:
    _, folder = printed
    for name in ("reproduce.csv", "calibrated.toml"):
        assert (folder / name).read_bytes() == (made.folder / name).read_bytes()


# Routing


def test_the_trace_is_named_with_its_source(made: Made) -> None:
    trace = RoutingTrace.load(reproduction.BUNDLED_TRACE)
    stated = made.document["trace"]
    assert stated["source"] == "recorded" == trace.metadata["source"]
    assert stated["content_hash"] == trace.content_hash()
    assert (stated["sequences"], stated["layers"]) == (trace.num_sequences, trace.num_layers)
    recorded, *others = made.document["traces"]
    assert recorded["name"] == f"{stated['model']} (recorded)"
    np.testing.assert_allclose(recorded["geomean_error"], made.document["geomean_error"], rtol=1e-3, atol=0)
    assert others
    assert all("(synthetic)" in outcome["name"] for outcome in others)


def test_a_generated_trace_is_never_passed_off_as_a_recording() -> None:
    result = reproduction.reproduce(trace=explore.synthetic_trace(), explore=False)
    assert result.to_dict()["trace"]["source"] == "synthetic"
    assert any("synthetic" in note for note in result.notes)
    assert "(synthetic)" in reports.reproduction(result).splitlines()[1]


def _plain_hit_rate(trace: RoutingTrace, layers: int, hot: int, prompt: int = 128, output: int = 2048) -> float:
    """Share of decode picks among the ``hot`` experts of the sequence's own prefill, with plain loops."""
    assert trace.topk_weights is not None
    hits = picks = 0
    for s in range(trace.num_sequences):
        rows = np.arange(trace.num_tokens)
        before, after = rows[trace.prefill_slice(s)], rows[trace.decode_slice(s)]
        before, after = before[np.arange(prompt) % len(before)], after[np.arange(output) % len(after)]
        for layer in (i % trace.num_layers for i in range(layers)):
            ids, weights = trace.topk_ids[before, layer], trace.topk_weights[before, layer].astype(float)
            count, weight = np.zeros(trace.num_experts), np.zeros(trace.num_experts)
            np.add.at(count, ids.ravel(), 1.0)
            np.add.at(weight, ids.ravel(), weights.ravel())
            score = 0.5 * count / count.sum() + 0.5 * weight / weight.sum()
            chosen = np.argsort(-score, kind="stable")[:hot]
            hits += int(np.isin(trace.topk_ids[after, layer], chosen).sum())
            picks += output * trace.top_k
    return hits / picks


@pytest.mark.parametrize(
    ("model", "layers", "hot", "published"), [("mixtral-8x7b", 32, 4, 0.66), ("mixtral-8x22b", 56, 2, 0.40)]
)
def test_hit_rates_beside_their_controls(made: Made, model: str, layers: int, hot: int, published: float) -> None:
    own = made.document["hit_rate"][model]
    assert abs(own - published) < 0.02
    trace = RoutingTrace.load(reproduction.BUNDLED_TRACE)
    np.testing.assert_allclose(own, _plain_hit_rate(trace, layers, hot), rtol=1e-3, atol=0)
    controls = made.document["hit_rate_controls"][model]
    assert controls["own"] == own
    assert controls["uniform"] == hot / 8
    assert max(controls["uniform"], controls["other_sequence"], controls["static"]) < own < controls["oracle"] < 1


# What it says beside the figures


def test_readings_start_from_the_reported_one(made: Made) -> None:
    readings = {outcome["name"]: outcome for outcome in made.document["readings"]}
    assert list(readings) == list(explore.READINGS)
    first = readings["as reported"]
    np.testing.assert_allclose(first["geomean_error"], made.document["geomean_error"], rtol=1e-3, atol=0)
    np.testing.assert_allclose(
        first["evidence_geomean_error"], made.document["evidence_geomean_error"], rtol=1e-9, atol=0
    )
    changed = [name for name, one in readings.items() if one["geomean_error"] != first["geomean_error"]]
    assert len(changed) >= len(readings) - 3


def test_baselines_at_their_best_are_at_least_as_fast(made: Made) -> None:
    found = {(best["model"], best["baseline"]): best for best in made.document["own_best"]}
    assert set(found) == {(m, b) for m in ("mixtral-8x7b", "mixtral-8x22b") for b in ("monde", "hobbit")}
    for best in found.values():
        assert best["tok_per_s"] >= best["default_tok_per_s"] > 0
        assert 1 < best["gains"]["3-bit"] < best["gains"]["2-bit"]
    monde = found["mixtral-8x22b", "monde"]
    np.testing.assert_allclose(
        monde["default_tok_per_s"], made.rows["8x22b-decode-monde"]["calibrated"], rtol=1e-12, atol=0
    )


def test_near_data_latency_falls_as_the_bits_do(made: Made) -> None:
    reductions = made.document["ndp_latency_reduction"]
    assert set(reductions) == {"mixtral-8x7b", "mixtral-8x22b"}
    for values in reductions.values():
        np.testing.assert_allclose((values["3-bit uniform"], values["2-bit uniform"]), (16 / 3, 8), rtol=1e-9, atol=0)
    for bits in ("3", "2"):
        mean = sum(values[f"{bits}-bit selected"] for values in reductions.values()) / len(reductions)
        row = made.rows[f"both-ndp-latency-{bits}bit"]
        np.testing.assert_allclose(row["calibrated"], mean, rtol=1e-12, atol=0)


def test_published_accuracies_stand_beside_losses_as_context(
    made: Made, printed: tuple[subprocess.CompletedProcess[str], Path]
) -> None:
    quality = made.document["quality"]
    assert [row["published_accuracy_percent"] for row in quality["rows"]] == [70.03, 69.90, 69.71, 66.68, 63.48]
    full, three, three_uniform, two, two_uniform = quality["rows"]
    assert (full["quant_loss"], full["quant_loss_vs_uniform"], full["quant_noise"]) == (0, None, 0)
    assert 0 < three["quant_loss"] < two["quant_loss"] < two_uniform["quant_loss"]
    assert three_uniform["quant_loss_vs_uniform"] == two_uniform["quant_loss_vs_uniform"] == 1
    np.testing.assert_allclose(
        two["quant_loss_vs_uniform"], two["quant_loss"] / two_uniform["quant_loss"], rtol=1e-12, atol=0
    )
    for row in (three, two):
        one = evaluate(
            "mixtral-8x7b", "h100-cxl2-ndp", reproduction.BUNDLED_TRACE, row["policy"], prompt=128, output=2048
        )
        assert (row["quant_loss"], row["quant_noise"]) == (one.quant_loss, one.quant_noise)
    with (made.folder / "quality.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [{key: value or None for key, value in line.items()} for line in table] == [
        {key: None if value is None else str(value) for key, value in row.items()} for row in quality["rows"]
    ]
    lines = printed[0].stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Quality (context)"))
    for row, line in zip(quality["rows"], lines[start + 3 :], strict=False):
        assert line.startswith(row["name"])
        assert line.endswith(f"{row['published_accuracy_percent']:.2f} %*")
        computed = line[len(row["name"]) :].partition("|")[0].split()
        np.testing.assert_allclose(float(computed[0]), row["quant_loss"], rtol=1e-3, atol=0)
        np.testing.assert_allclose(float(computed[2]), 100 * row["quant_noise"], rtol=0.05, atol=0)
    assert lines[start + 3 + len(quality["rows"])] == quality["sentence"]
    assert "neither predicted from the losses nor compared with them" in quality["sentence"]
    # They are no rows of the reproduction: nothing is fitted to them, and they have no error.
    assert not any("accuracy" in name for name in made.rows)


def test_text_shows_what_the_document_holds(made: Made, printed: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, _ = printed
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for name in PUBLISHED:
        cells = next(line.split() for line in lines if line.startswith(f"{name} "))
        assert ("fit" in cells) is (name in FIT_IDS)
    for entry in made.document["fitted"]:
        cells = next(line.split() for line in lines if line.startswith(f"{entry['name']} "))
        shown = [float(cell) for cell in cells[-2:]]
        np.testing.assert_allclose(shown, (entry["evidence"], entry["value"]), rtol=1e-3, atol=0)
    summary = next(line for line in lines if "leave-one-out" in line)
    for key in ("geomean_error", "evidence_geomean_error", "leave_one_out_geomean_error"):
        assert f"{100 * made.document[key]:.1f} %" in summary, key
    assert f"a factor of {math.exp(made.document['max_error']):.2f}" in summary
    for model, rates in made.document["hit_rate_controls"].items():
        shown = next([float(cell) for cell in line.split()[1:]] for line in lines if re.match(rf"{model} +0\.\d", line))
        order = ("own", "uniform", "other_sequence", "static", "oracle")
        np.testing.assert_allclose(shown, [rates[key] for key in order], rtol=5e-3, atol=0)
    header = next(line for line in lines if "own prefill" in line)
    assert all(word in header for word in ("uniform", "other prefill", "static", "oracle"))
    carried = [line for line in lines if line.startswith("Carried by:")]
    assert len(carried) == 1
    assert made.document["trace"]["model"] in carried[0]
    assert "recorded" in lines[1]
    assert any("synthetic" in line for line in lines)


def test_a_system_of_ones_own_is_used_for_all_columns() -> None:
    result = reproduction.reproduce(system="a100-cxl-ndp", explore=False)
    assert {system.name for system in result.systems.values()} == {"a100-cxl-ndp"}
    assert result.rows[0].columns["datasheet"].low > result.rows[0].columns["evidence"].low
