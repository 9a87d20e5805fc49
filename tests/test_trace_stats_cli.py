"""``perfmodel trace stats`` prints what the survey found, for traces of every shape and for frequency profiles."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import check_refusal, run
from routings import SHAPES, drawn_trace, surveyed

from perfmodel.cli.trace_reports import decimal, survey_data, survey_text
from perfmodel.routing import RoutingTrace
from perfmodel.routing.profile import FrequencyProfile
from perfmodel.routing.statistics import survey

MINI = "tiny-mixtral-32l-mini"
FIGURES = {"experts", "steps", "layers", "reuse", "distinct", "hit_rate", "cache", "drift"}


def save(trace: RoutingTrace, folder: Path) -> Path:
    path = folder / "trace.npz"
    trace.save(path)
    return path


def profile(folder: Path, scale: Any = "counts") -> Path:
    counts = np.array([[4.0, 1.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 9.0, 0.0]])
    path = folder / "profile.npz"
    FrequencyProfile(counts, np.array([1, 2, 5]), {"model": "counted", "source": "from-counts"}, 1, scale).save(path)
    return path


def row(text: str, start: str) -> list[float]:
    """Numbers of the first line that begins so."""
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return [float(found) for found in re.findall(r"-?\d+\.\d+", line.strip().removeprefix(start))]


def numbers(document: Any) -> list[float]:
    """Every number in a document, in order."""
    if isinstance(document, dict):
        return [one for value in document.values() for one in numbers(value)]
    if isinstance(document, list):
        return [one for value in document for one in numbers(value)]
    return [document] if isinstance(document, float) else []


def test_the_tables_are_those_of_the_survey() -> None:
    answer = run("trace", "stats", MINI)
    assert answer.code == 0, answer.err
    assert answer.err == ""
    found = survey(MINI)
    rates, cache, similarity = found.hit_rates, found.cache, found.similarity
    assert rates is not None
    assert cache is not None
    assert similarity is not None
    places = [0, 1, 3, 5]  # K = 1, 2, 4, 6
    expected = {
        "own prefill": rates.own,
        "another's prefill": rates.other_sequence,
        "static: others' decode, sequences alike": rates.static,
        "static: others' decode, picks alike": rates.static_pooled,
        "oracle: own decode": rates.oracle,
    }
    for name, one in expected.items():
        shown = row(answer.out, name)
        both = [value for i in places for value in (one.value[i], one.low[i], one.high[i])]
        np.testing.assert_allclose(shown, np.round(both, 3), rtol=1e-9, atol=0)
    top = [found.skew[scope].top_half.overall for scope in ("all", "prefill", "decode")]
    shown = row(answer.out, "share of the 4 most picked experts")
    np.testing.assert_allclose(shown[:9:3], [round(float(one.value), 3) for one in top], rtol=1e-9, atol=0)
    assert row(answer.out, "1 token before")[6] == round(float(found.reuse["decode"].measured.overall.value[0]), 3)
    assert row(answer.out, "cosine of its prefill and decode counts")[0] == round(
        float(similarity.cosine.overall.value), 3
    )
    assert row(answer.out, "4  ")[0] == round(float(cache.lru.value[3]), 3)
    assert row(answer.out, "2 tokens in a row")[-1] == 3.5  # 8 (1 - (3/4)^2)
    layers = answer.out[answer.out.index("By layer (decode; hits and caches with 4 of 8 experts)") :].splitlines()
    assert len(layers) == 1 + 2 + 32
    last = layers[-1].split()
    assert last[0] == "31"
    assert last[6] == "-"  # no layer after it
    assert float(last[-1]) == round(float(cache.belady_layers[31, 3]), 3)
    assert float(last[-2]) == round(float(cache.lru_layers[31, 3]), 3)


def test_json_is_the_whole_survey() -> None:
    document = run("trace", "stats", MINI, "--json", "--lags", "1,3", "--windows", "4", "--seed", "7").document
    assert document.pop("kind") == "trace"
    assert document.pop("perfmodel")
    assert (document["tokens"], document["layers"]) == (2016, 32)
    whole = json.loads(json.dumps(survey(MINI, lags=(1, 3), windows=(4,), seed=7).as_dict()))
    assert document == whole.pop("contents") | whole | {"tokens": 2016, "layers": 32}
    assert document["lags"] == [1, 3]
    other = run("trace", "stats", MINI, "--json", "--lags", "1,3", "--windows", "4", "--seed", "8").document
    assert other["hit_rates"]["own"]["value"] == document["hit_rates"]["own"]["value"]
    assert other["batches"]["distinct"] != document["batches"]["distinct"]


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_described(name: str) -> None:
    found = surveyed(name)
    text = survey_text(found)
    assert "nan" not in text.lower()
    assert not re.search(r"\binf\b", text)
    assert ("Hit rate of decode picks with K" in text) == (found.hit_rates is not None)
    assert ("in a cache" in text) == (found.cache is not None)
    for note in found.notes:
        assert f"note: {note}" in text
    document = json.loads(json.dumps(survey_data(found), allow_nan=False))
    assert all(math.isfinite(one) for one in numbers(document))


def test_what_is_missing_is_left_out_and_said(tmp_path: Path) -> None:
    text = run("trace", "stats", save(SHAPES["prefill only"], tmp_path)).out
    assert "Hit rate" not in text
    assert "note: " in text
    assert "  decode" not in text.split("\n\n")[1]
    text = survey_text(surveyed("decode only"))
    assert "own first half" in text
    assert "own prefill" not in text
    assert "all  " not in text.split("\n\n")[1]
    text = survey_text(surveyed("one sequence"))
    assert "one sequence, so no intervals" in text
    assert "[" not in text.split("\n\n")[1]


def test_no_interval_rests_on_one_sequence() -> None:
    text = survey_text(survey(drawn_trace([70, 50, 200], [30, 20, 10])))
    drift = text[text.index("Drift: ") :].split("\n\n")[0].splitlines()
    assert [line.split()[3] for line in drift[3:]] == ["2", "1", "1", "1", "1"]
    assert "[" in drift[3]
    assert not any("[" in line for line in drift[4:])


def test_every_command_names_size_and_shape_alike(tmp_path: Path) -> None:
    path = save(drawn_trace([12, 9], [8, 6]), tmp_path)
    trace = RoutingTrace.load(path)
    expected = {
        "sequences": 2,
        "tokens": 21,
        "prefill_tokens": 14,
        "decode_tokens": 7,
        "layers": trace.num_layers,
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "layer_index": trace.layer_index.tolist(),
        "metadata": trace.metadata,
    }
    for words in (
        ("stats", path),
        ("check", path),
        ("check", path, "--mend", "looping", "-o", tmp_path / "mended.npz"),
        ("import", "canonical", path, "-o", tmp_path / "copy.npz"),
    ):
        document = run("trace", *words, "--json").document
        assert {name: document[name] for name in expected} | {"metadata": trace.metadata} == expected, words
        assert document["metadata"]["model"] == trace.metadata["model"]
    document = run("trace", "stats", profile(tmp_path), "--json").document
    assert (document["layers"], document["num_experts"], document["top_k"]) == (3, 4, 1)


def test_one_of_a_kind_is_not_several() -> None:
    text = survey_text(surveyed("one sequence"))
    assert "mean of 1 sequence\n" in text
    assert ", 1 sequence alike\n" in text
    assert not re.search(r"\b1 sequences", text)
    ids = np.zeros((40, 1, 1), np.int64)
    trace = RoutingTrace(
        ids, None, np.array([0, 40]), np.array([20]), np.arange(1), 3, {"model": "m", "source": "synthetic"}
    )
    text = survey_text(survey(trace))
    assert "share of the most picked expert " in text
    assert "-0.000" not in text
    assert row(text, "entropy over log E")[0] == 0.0
    assert decimal(-0.0004) == "0.000"
    assert decimal(-0.0006) == "-0.001"


def test_windows_of_drift_that_are_left_out_are_said() -> None:
    text = survey_text(survey(drawn_trace([440, 370], [40, 40])))
    assert "(8 of 12 windows, from first to last; --json has all)" in text
    assert "windows, from" not in survey_text(survey(drawn_trace([240, 240], [40, 40])))


def test_figures_are_written_and_the_folder_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "figures"
    answer = run("trace", "stats", MINI, "--plot", folder, "--sequence", "2")
    assert answer.code == 0
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for name in FIGURES for kind in ("png", "svg")}
    assert answer.err.startswith("wrote experts.png/.svg, ")
    assert answer.err.strip().endswith(str(folder))
    assert answer.out == run("trace", "stats", MINI).out


def test_a_profile_shows_its_skew_and_says_that_this_is_all(tmp_path: Path) -> None:
    path = profile(tmp_path)
    answer = run("trace", "stats", path, "--plot", tmp_path / "figures")
    assert answer.code == 0, answer.err
    assert "counted (frequency profile, counts): 3 layers x 4 experts, top-1" in answer.out
    assert "note: a frequency profile holds no single tokens" in answer.out
    assert row(answer.out, "1  ")[:2] == [0.75, 0.312]  # Gini of 1, 1, 2, 4: 10 / (4 * 8)
    assert row(answer.out, "2  ") == [0.5, 0.0, 1.0]
    assert row(answer.out, "5  ") == [1.0, 0.75, 0.0]
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {"experts.png", "experts.svg"}
    document = run("trace", "stats", path, "--json").document
    assert document["kind"] == "profile"
    assert document["skew"]["shares"][0] == [0.5, 0.125, 0.25, 0.125]
    assert "hit_rates" not in document


def test_a_profile_of_ranks_shows_the_order(tmp_path: Path) -> None:
    answer = run("trace", "stats", profile(tmp_path, "ranks"), "--plot", tmp_path / "figures")
    assert answer.code == 0, answer.err
    assert re.search(r"^ +1 +0 2 1 3$", answer.out, flags=re.MULTILINE)
    assert "Gini" not in answer.out
    document = run("trace", "stats", profile(tmp_path, "ranks"), "--json").document
    assert document["skew"]["gini"] is None


@pytest.mark.parametrize("given", [("--lags", "1"), ("--windows", "2"), ("--seed", "1")])
def test_options_about_tokens_are_refused_with_a_profile(given: tuple[str, str], tmp_path: Path) -> None:
    check_refusal(run("trace", "stats", profile(tmp_path), *given), given[0], "frequency profile")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lags", "one"), ("--lags", "'one'", "whole numbers")),
        (("--lags", ""), ("--lags", "whole numbers")),
        (("--lags", "0"), ("--lags is 0", "1..64")),
        (("--lags", "65"), ("--lags is 65", "1..64")),
        (("--lags", ",".join(["1"] * 1001)), ("--lags has 1001 entries",)),
        (("--windows", "1.5"), ("--windows", "'1.5'")),
        (("--windows", "0"), ("--windows is 0",)),
        (("--seed", "-1"), ("--seed is -1",)),
        (("--seed", "x"), ("--seed", "'x'")),
        (("--sequence", "1"), ("--sequence", "--plot")),
        (("--plot", "", "--json"), ("--plot", "empty")),
        (("--plot", "figures", "--sequence", "6"), ("--sequence", "6", "0..5")),
        (("--plot", "figures", "--sequence", "-1"), ("--sequence", "-1", "0..5")),
        (("--lags", "1", "--lags", "2"), ("--lags", "given twice")),
    ],
)
def test_bad_options_are_refused(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_refusal(run("trace", "stats", MINI, *arguments), *words)
    assert list(tmp_path.iterdir()) == []


def test_bad_files_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    check_refusal(run("trace", "stats", "tiny-mixtral-32l-min"), "tiny-mixtral-32l-mini")
    check_refusal(run("trace", "stats", tmp_path / "absent.npz"), "absent.npz")
    check_refusal(run("trace", "stats", tmp_path), str(tmp_path))
    text = tmp_path / "text.npz"
    text.write_text("no archive")
    check_refusal(run("trace", "stats", text, "--plot", tmp_path / "figures"), "text.npz")
    np.savez(tmp_path / "other.npz", numbers=np.arange(3))
    check_refusal(run("trace", "stats", tmp_path / "other.npz"), "other.npz", "numbers")
    blocked = save(drawn_trace([8], [4]), tmp_path)
    check_refusal(run("trace", "stats", blocked, "--plot", text), "--plot", "text.npz")
    assert not (tmp_path / "figures").exists()
