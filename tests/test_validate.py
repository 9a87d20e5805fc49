"""The validation says what it found, all of it follows from the rows, and it is as good as it claims."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from commands import check_refusal, run
from numpy.testing import assert_allclose

from perfmodel import plots
from perfmodel.cli import validate as command
from perfmodel.cli.validate import SECTIONS, Findings, markdown
from perfmodel.cli.validate_data import data
from perfmodel.evidence import cases, validation
from perfmodel.evidence.alternatives import alternatives, constant_ranges
from perfmodel.evidence.candidates import CANDIDATES, rejected_constants
from perfmodel.evidence.constants import SHARED, STREAMED
from perfmodel.evidence.described import profile_of
from perfmodel.evidence.measured import load_measured, missing_field
from perfmodel.evidence.predict import predicted
from perfmodel.evidence.simulators import STREAMS
from perfmodel.evidence.skill import MIN_IMPROVEMENT, shuffled_skill, skill
from perfmodel.evidence.validation import CONSTANTS, REASONS, WORST_FACTOR, Validation, problem_of
from perfmodel.hardware import load_spec

ROOT = Path(__file__).parents[1]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "validation.md"
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def found(findings: Findings) -> Findings:
    return findings


@pytest.fixture(scope="module")
def measured(found: Findings) -> Validation:
    assert found.measured is not None
    return found.measured


@pytest.fixture(scope="module")
def document(found: Findings):
    return json.loads(json.dumps(data(found), allow_nan=False))


def rows_of(measured: Validation, quantity: str):
    return [row for row in measured.rows if row.quantity == quantity]


# How good it is: the thresholds are those that the project set itself.


def test_decode_without_documented_machines(measured: Validation) -> None:
    others = alternatives(measured)
    general, defaults = (
        others.errors("decode", *rows) for rows in ((others.general,), (others.general, others.defaults))
    )
    assert general is not None
    assert defaults is not None
    assert general.by_row.median <= 0.20
    assert general.by_row.within_near >= 0.80
    assert defaults.rows == measured.errors("decode").rows
    assert defaults.by_row.median <= 0.20
    assert defaults.by_row.within_near >= 0.80


def test_default_profiles_have_not_seen_the_source(measured: Validation) -> None:
    """By hand: the profile of the kind with the constants of the fit that leaves out the source of the row."""
    others = alternatives(measured)
    assert {row.run.engine for row in others.defaults} == {"vllm", "llama-cpp-cuda"}
    assert [row.measured for row in others.defaults] == [row.measured for row in others.documented]
    own = {row.run.id for row in others.documented}
    for row in (others.defaults[0], others.defaults[-1]):
        assert row.run.id in own
        (one,) = predicted([row.run], row.quantity)
        logs = measured.without_source.get(row.run.source, measured.fit.logs)
        values = {f"engine.{name}": float(np.exp(log)) for name, log in zip(CONSTANTS, logs, strict=True)}
        assert row.predicted == pytest.approx(one._replace(system=one.system.with_values(values)).rate(), rel=1e-9)


def test_excluded_rows_would_count_but_for_their_reason(measured: Validation) -> None:
    runs = {run.id: run for run in load_measured()}
    found = alternatives(measured).excluded
    assert len(found) > 10
    assert len({(row.run.id, row.quantity) for row in found}) == len(found)
    for row in found:
        run_ = runs[row.run.id]
        assert row.reason in (run_.excluded_because, getattr(run_, f"{row.quantity}_excluded_because"))
        assert missing_field(row.run, row.quantity) is None
        assert missing_field(run_, row.quantity) is not None


def test_ranges_of_constants_hold_the_fitted_value(measured: Validation) -> None:
    for one in constant_ranges(measured):
        assert one.low <= measured.fit.values[one.name] * 1.01
        assert one.high >= measured.fit.values[one.name] * 0.99
        assert one.sources >= 2


def test_decode_of_unseen_sources(measured: Validation) -> None:
    errors = measured.errors("decode")
    assert errors.rows >= 200
    assert errors.by_row.median <= 0.20
    assert errors.by_source.median <= 0.20
    assert errors.by_row.within_near >= 0.80


def test_prefill_of_unseen_sources(measured: Validation) -> None:
    assert measured.errors("prefill").by_row.within_near >= 0.70


def test_rows_that_are_far_off_have_a_reason(measured: Validation) -> None:
    far = {row.run.id for row in measured.rows if max(row.ratio, 1.0 / row.ratio) > WORST_FACTOR}
    assert far == {row.run.id for row in measured.far_off}
    assert far <= set(REASONS)
    # A reason that no row needs any more is out of date.
    assert set(REASONS) <= far


def test_the_reason_of_the_early_build_follows_from_its_rows(measured: Validation) -> None:
    rows = {(row.run.id, row.quantity): row.measured for row in measured.rows}
    assert rows["N324", "decode"] / rows["N325", "decode"] == pytest.approx(2.5, rel=0.02)
    assert rows["N324", "prefill"] / rows["N325", "prefill"] == pytest.approx(2.2, rel=0.02)
    assert rows["N322", "decode"] > rows["N323", "decode"]


def test_simulators(found: Findings) -> None:
    assert found.simulators is not None
    scalesim, ramulator = found.simulators
    assert all(one.error == 0.0 for one in scalesim)
    assert max(abs(one.error) for one in ramulator if one.kind in STREAMS) <= 0.03


def test_documented_machines_are_not_fitted(measured: Validation) -> None:
    own = [row for row in measured.rows if cases.engine_class(row.run) == cases.DOCUMENTED]
    assert len(own) > 100
    assert not any(row.fitted for row in own)
    assert all(row.in_sample == row.held_out for row in own)


def test_fetched_machine(measured: Validation) -> None:
    fetched = cases.fetched_machine(measured.rows)
    for cell in fetched.cells:
        assert cell.rows == 8
        assert cell.worst < (0.08 if cell.label[1] == "none" else 0.25)
    assert fetched.right == fetched.rankings == 24


def test_cached_machine(measured: Validation) -> None:
    cells = cases.cached_machine(measured.rows)
    assert sum(cell.rows for cell in cells) == 35
    means = [cell for cell in cells if cell.label[1] != "other runs"]
    assert {cell.label[0] for cell in means} == {"56", "72"}
    assert all(cell.worst < 0.10 for cell in means)
    lines = cases.cost_line(measured.rows)
    assert [line.slots for line in lines] == [16, 24, 32, 40, 48, 56, 64, 72, 80, 88]
    for line in lines:
        assert line.predicted_ms == pytest.approx(line.owners_ms, rel=0.10)
    passes = [one for one in cases.cached_prefill(measured.rows) if "a pass" in one.what]
    assert len(passes) == 2
    for one in passes:
        assert one.predicted_s == pytest.approx(one.measured_s, rel=0.2)


def test_batch_sweep(measured: Validation) -> None:
    rows = cases.batch_sweep(measured.rows)
    assert [row.batch for row in rows] == [1, 2, 4, 8, 16, 32, 64]
    for row in rows:
        assert row.own == pytest.approx(row.measured, rel=0.10)
        if row.batch >= 4:
            assert row.measured / 1.5 < row.held_out < 1.5 * row.measured


def test_mixtral_question() -> None:
    question = cases.mixtral_question()
    assert max(map(abs, question.errors)) <= 0.25
    # By hand: 1.60 GB of attention, router and head, and 0.35 GB for each of 32 layers and visited experts, and 134 MB
    # of cache a sequence, at 6.7 TB/s.
    assert_allclose(question.floor_ms, [3.83, 9.72, 14.09, 15.18], atol=0.01)
    assert all(ideal >= floor for ideal, floor in zip(question.ideal_ms, question.floor_ms, strict=True))


def test_profiles_hold_the_fitted_values(measured: Validation) -> None:
    for profile in SHARED:
        engine = load_spec(profile)
        for name in CONSTANTS:
            assert getattr(engine, name) == pytest.approx(measured.fit.values[name], rel=5.1e-3), (profile, name)


def test_shuffled_targets_give_no_skill() -> None:
    _, problem = problem_of(load_measured())
    assert skill(problem) > 0.7
    assert shuffled_skill(problem, 0, 1).max() < 0.05


# What is reported.


def test_document(document, measured: Validation) -> None:
    assert list(document) == ["simulators", "published", "measured"]
    assert len(document["simulators"]["scalesim"]) == 858
    part = document["measured"]
    assert len(part["rows"]) == len(measured.rows)
    for shown, row in zip(part["rows"], measured.rows, strict=True):
        assert shown["predicted"] / shown["measured"] == pytest.approx(row.ratio, rel=1e-12)
        assert shown["fitted"] is row.fitted
    decode = [row for row in part["rows"] if row["quantity"] == "decode"]
    off = np.abs([row["ratio"] - 1.0 for row in decode])
    errors = part["errors"]["decode"]
    assert set(errors) == {
        "in_sample", "source_left_out", "machine_left_out", "without_documented", "documented", "default_profiles",
        "default_profiles_read_rate", "with_excluded", "without_documented_with_excluded",
    }  # fmt: skip
    assert errors["without_documented"]["rows"] + errors["documented"]["rows"] == len(decode)
    assert errors["default_profiles"]["rows"] == len(decode)
    assert errors["with_excluded"]["rows"] == len(decode) + len(
        [row for row in part["excluded"] if row["quantity"] == "decode"]
    )
    assert all(row["reason"] for row in part["excluded"])
    assert errors["source_left_out"]["by_row"]["median"] == pytest.approx(float(np.median(off)), rel=1e-9)
    batches = [group for group in part["groups"] if (group["quantity"], group["by"]) == ("decode", "batch")]
    assert sum(group["rows"] for group in batches) == len(decode)
    assert [one["name"] for one in part["constants"]] == list(CONSTANTS)
    assert part["tried"] is None
    for kind in ("decode", "prefill"):
        assert part["intervals"][kind]["coverage"]["level"] == 0.8
        assert len(part["missing"][kind]) + len(rows_of(measured, kind)) == len(load_measured())


def test_what_the_model_is_known_to_fail_at_follows_from_the_rows(measured: Validation) -> None:
    failures = cases.known_failures(measured.rows)
    assert len(failures) >= 8
    layered = next(one for one in failures if one.kind == "several GPUs in a row")
    own = [abs(row.ratio - 1.0) for row in rows_of(measured, "decode") if row.run.split == "layer"]
    assert layered.errors.rows == len(own)
    assert layered.errors.by_row.median == pytest.approx(float(np.median(own)), rel=1e-9)
    people = cases.spread(measured.rows, "gpt-oss-120b", "gb10")
    assert [row.measured for row in people] == [33.5, 43.9, 59.5]


def test_bytes_of_a_kernel(measured: Validation) -> None:
    rows = {row.run.id: row.run for row in measured.rows}
    # Qwen3-30B-A3B at 4.5 bits: 8 matrices of 768 x 2048.
    run_ = rows["M001"]
    assert cases.kernel_bytes(run_) == pytest.approx(8 * 768 * 2048 * run_.expert_bits / 8, rel=0.01)
    assert cases.kernel_bytes(rows["M007"]) > 8 * cases.kernel_bytes(run_)


def test_the_page_is_what_the_command_writes(found: Findings) -> None:
    """Numbers may differ by one in their last digit, as sums on another processor may."""
    committed = re.sub(r"## Constants that were tried\n.*?(?=\n## )", "", PAGE.read_text(encoding="utf-8"), flags=re.S)
    committed, written = (re.sub(r"\n{2,}", "\n\n", text) for text in (committed, markdown(found)))
    lines = written.splitlines(), committed.splitlines()
    remedy = "run the command that the page names"
    assert len(lines[0]) == len(lines[1]), remedy
    for now, then in zip(*lines, strict=True):
        assert _NUMBER.sub("#", now) == _NUMBER.sub("#", then), remedy
        for one, other in zip(_NUMBER.findall(now), _NUMBER.findall(then), strict=True):
            digits = min(len(text.partition(".")[2]) for text in (one, other))
            assert abs(float(one) - float(other)) <= 1.01 * 10.0**-digits, (remedy, now, then)


def test_the_page_has_the_constants_that_were_tried() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Constants that were tried")[2].partition("\n## ")[0]
    shown = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.startswith("| ") and "%" in line}
    assert list(shown) == [name for name in CANDIDATES if name not in CONSTANTS]
    name = "vllm.memory_efficiency"
    rows, _ = problem_of(load_measured())
    (one,) = rejected_constants(rows, [name])
    assert one.rejected
    assert "rejected" in one.message
    assert one.error > (1.0 - MIN_IMPROVEMENT) * min(one.error_now, one.error_start)
    known = [float(value) for value in re.findall(r"([\d.]+) %", shown[name])]
    assert_allclose(known, [100 * one.error_now, 100 * one.error_start, 100 * one.error], atol=0.11)
    assert "rejected" in shown[name]


def test_the_page_is_linked_and_says_what_peers_publish() -> None:
    root = PAGE.parent.parent
    assert "docs/validation.md" in (root / "README.md").read_text(encoding="utf-8")
    assert "perfmodel validate" in (root / "CHANGELOG.md").read_text(encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    for name in ("LLMServingSim", "InferSim", "BLIS", "Vidur", "aiconfigurator"):
        assert name in text


# The command.


def test_only_one_section() -> None:
    answer = run("validate", "--only", "simulators", "--json")
    assert list(answer.document) == ["simulators"]
    shown = run("validate", "--only", "simulators")
    assert shown.code == 0
    assert shown.out.startswith("Simulators\n")
    assert "Predicted against measured" not in shown.out
    assert run("validate", "--only", "simulators").out == shown.out


def test_text_and_figures(found: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find", lambda asked, evidence, candidates: found)
    short, long = run("validate"), run("validate", "--rows", "--plot", tmp_path / "figures")
    assert short.code == long.code == 0
    for title in ("Predicted against measured", "Fitted constants", "Intervals", "known to fail", "Published figures"):
        assert title in short.out
    assert "Every row\n=" not in short.out
    assert "Every row\n=" in long.out
    assert max(map(len, short.out.splitlines())) < 200
    names = [f"validation_{name}.{suffix}" for name in ("parity", "residuals") for suffix in ("png", "svg")]
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == sorted(names)
    assert run("validate", "--markdown").out == markdown(found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "nothing"), ("--only", "simulators")),
        (("--evidence", "no-such-file.toml"), ("no-such-file.toml",)),
        (("--only", "simulators", "--plot", "figures"), ("--plot", "measured")),
        (("--only", "published", "--candidates"), ("--candidates", "measured")),
        (("--plot", ""), ("--plot", "folder")),
        (("--json", "--markdown"), ("not allowed",)),
    ],
)
def test_bad_options(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check_refusal(run("validate", *arguments), *words)


def test_bad_input_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worked(*_: object, **__: object) -> None:
        raise AssertionError("worked first")

    monkeypatch.setattr("perfmodel.evidence.validation.problem_of", worked)
    broken, empty, blocked = tmp_path / "broken.toml", tmp_path / "empty.toml", tmp_path / "file"
    broken.write_text("[[run]]\nid = 'a'\nspeed = 3\n")
    empty.write_text("")
    blocked.write_text("")
    check_refusal(run("validate", "--evidence", broken), "broken.toml", "speed")
    check_refusal(run("validate", "--evidence", empty), "empty.toml")
    check_refusal(run("validate", "--plot", blocked / "figures"), "--plot", "not a folder")


def test_own_evidence_is_judged_by_fits_to_the_bundled_runs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of the bundled runs of engines with shared constants carry these, too, and every fit to them is quicker.
    part = tuple(run for run in load_measured() if profile_of(run) in (*SHARED, *STREAMED))[1::2]
    monkeypatch.setattr(validation, "load_measured", lambda file=None: part if file is None else load_measured(file))
    few = tmp_path / "few.toml"
    few.write_text(
        "[[run]]\nid = 'a'\nsource = 'me'\ncitation = 'my notes'\nconfidence = 'high'\nmodel = 'mixtral-8x7b'\n"
        "expert_bits = 4.5\nother_bits = 4.5\ngpu = 'rtx-4090'\nengine = 'llama-cpp-cuda'\nbatch = 1\n"
        "context_tokens = 100\ngpu_experts = 1.0\ndecode_tok_per_s = 30.0\n"
    )
    answer = run("validate", "--evidence", few, "--only", "measured", "--json")
    found = json.loads(answer.out)["measured"]
    assert found["errors"]["decode"]["source_left_out"]["rows"] == 1
    assert "prefill" not in found["errors"]
    few.write_text(few.read_text().replace("gpu_experts = 1.0\n", ""))
    check_refusal(run("validate", "--evidence", few, "--only", "measured"), "gpu_experts")


# The figures.


@pytest.fixture(scope="module")
def figures(measured: Validation):
    return plots.validation_figures(measured)


def points(axes) -> np.ndarray:
    found = [
        np.column_stack([line.get_xdata(), line.get_ydata()]) for line in axes.lines if line.get_linestyle() == "None"
    ]
    return np.concatenate(found)


def ordered(values) -> np.ndarray:
    found = np.asarray(values, dtype=np.float64)
    return found[np.lexsort(found.T)]


def test_figures_show_every_row(figures, measured: Validation) -> None:
    assert list(figures) == ["validation_parity", "validation_residuals"]
    for axes, quantity in zip(figures["validation_parity"].axes, ("decode", "prefill"), strict=True):
        rows = rows_of(measured, quantity)
        expected = [(row.measured, row.held_out) for row in rows]
        assert_allclose(ordered(points(axes)), ordered(expected), rtol=1e-12)
        low, high = axes.get_xlim()
        assert axes.get_ylim() == (low, high)
        assert low < min(map(min, expected)) < max(map(max, expected)) < high
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    rows = rows_of(measured, "decode")
    for axes, values in zip(
        figures["validation_residuals"].axes,
        (
            [row.run.batch for row in rows],
            [cases.kernel_bytes(row.run) / 1e6 for row in rows],
            [100 * (1 - row.run.gpu_experts) for row in rows],
        ),
        strict=True,
    ):
        drawn = points(axes)
        assert_allclose(
            ordered(drawn), ordered([(x, row.ratio) for x, row in zip(values, rows, strict=True)]), rtol=1e-9
        )
        low, high = axes.get_ylim()
        assert low < drawn[:, 1].min() < drawn[:, 1].max() < high


def test_series_differ_in_colour_or_marker(figures) -> None:
    for figure in figures.values():
        looks = {}
        for axes in figure.axes:
            for line in axes.lines:
                if line.get_linestyle() == "None":
                    looks.setdefault(line.get_label(), set()).add((line.get_color(), line.get_marker()))
        assert all(len(look) == 1 for look in looks.values())
        assert len({look for one in looks.values() for look in one}) == len(looks)
        (legend,) = figure.legends
        named = [text.get_text() for text in legend.get_texts()]
        assert set(looks) <= set(named)
        assert named[-2:] == ["within 1.25x", "within 1.5x"]


def test_captions_and_labels_stay_inside(figures, measured: Validation) -> None:
    for figure in figures.values():
        figure.canvas.draw()
        words = " ".join(figure.get_supxlabel().split())
        assert "not seen its source" in words
        assert f"{len(rows_of(measured, 'decode'))} rows" in words
        assert "with sources alike" in words
        inside = figure.bbox
        for axes in figure.axes:
            assert re.search(r"\((?:tok/s, log|%|MB, log|tokens of a step, log)\)", axes.get_xlabel())
            low, high = axes.get_xlim()
            ticks = [text for text in axes.get_xticklabels() if low <= text.get_position()[0] <= high]
            assert len(ticks) >= 3
            for text in (axes.xaxis.label, axes.yaxis.label, *ticks):
                box = text.get_window_extent()
                assert not text.get_text() or inside.x0 <= box.x0 <= box.x1 <= inside.x1 + 1
            boxes = [text.get_window_extent() for text in ticks]
            assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_evidence_of_one_kind_can_be_drawn(measured: Validation) -> None:
    rows = tuple(row for row in measured.rows if cases.engine_class(row.run) == "graph engine")
    found = plots.validation_figures(dataclasses.replace(measured, rows=rows))
    assert len(points(found["validation_parity"].axes[0])) == len([row for row in rows if row.quantity == "decode"])


def test_sections_are_those_of_the_option() -> None:
    assert SECTIONS == ("simulators", "published", "measured")


# The pages that people read first.


def test_the_example_of_own_runs_counts(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "evidence.md").read_text()
    example = page.partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "runs.toml").write_text(example)
    runs = load_measured(tmp_path / "runs.toml")
    assert [missing_field(run, "decode") for run in runs] == [None, None]
    assert missing_field(runs[1], "prefill") is None


def test_the_readme_says_what_the_rows_say(measured: Validation) -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    others = alternatives(measured)
    general, own, defaults = (
        others.errors("decode", rows) for rows in (others.general, others.documented, others.defaults)
    )
    assert general is not None
    assert own is not None
    assert defaults is not None
    assert (
        f"Against {general.rows} published decode rates of {general.sources} repositories, each predicted by a fit that"
        f" has not seen its repository, the median error is {100 * general.by_row.median:.0f} %, and"
        f" {100 * general.by_row.within_near:.0f} % lie within 1.5x ({100 * general.by_source.within_near:.0f} % with"
        f" every repository alike). Another {own.rows} are of two machines" in text
    )
    assert (
        f"within {100 * own.by_row.median:.0f} % at the median; by default profiles it is"
        f" {100 * defaults.by_row.median:.0f} %, and {100 * defaults.by_row.within_near:.0f} % lie within 1.5x." in text
    )
    assert len(CONSTANTS) == 2
    assert "Two constants are fitted" in text
