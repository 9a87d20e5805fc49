"""Mean bits chosen for every sequence: against brute force, against sequences priced alone, and the command."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from commands import check_refusal, run
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from strategies import models, plain_model, recording, small_trace, systems, traces

from perfmodel.answers import Tuning, control_front, tune
from perfmodel.answers.control import latency_metric
from perfmodel.answers.control_choice import Limit, choice
from perfmodel.answers.control_front import AXIS, Front
from perfmodel.bitwidth import LossTable
from perfmodel.errors import NoAnswerError, PerfModelError, PlacementError, PolicyError
from perfmodel.plots import control_figure, save
from perfmodel.point import hardware_point
from perfmodel.run import evaluate, plan_run
from perfmodel.scenario import Scenario
from perfmodel.sweeps.dataset import open_dataset

SHORT = ("--prompt", 16, "--output", 24)


def scenario(*policies: str, **options: Any) -> Scenario:
    return Scenario.of(policy=policies or ("context-aware",), **{"prompt": 16, "output": 24, **options})


# --- the choice, on fronts by hand ---


def front_of(latency: np.ndarray, loss: np.ndarray) -> Front:
    """A front with these times and losses [S, M]; what the choice does not look at is left empty."""
    nothing = np.empty(0)
    means = np.linspace(1, 4, latency.shape[1])
    whole = np.empty(0, np.int64)
    return Front(
        means,
        np.tile(means, (len(latency), 1)),
        latency,
        loss,
        2 * loss,
        nothing,
        nothing,
        nothing,
        nothing,
        whole,
        whole,
        0,
    )


@st.composite
def fronts(draw: st.DrawFn) -> Front:
    """Any times and losses, with many ties; losses may be unknown."""
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    size = shape[0] * shape[1]
    times = draw(st.lists(st.sampled_from([1.0, 2.0, 2.0, 3.0, 5.0]), min_size=size, max_size=size))
    lost = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 4.0, math.nan]), min_size=size, max_size=size))
    return front_of(np.array(times).reshape(shape), np.array(lost).reshape(shape))


@given(fronts(), st.sampled_from(["latency", "loss", "noise"]), st.sampled_from([0.5, 1.0, 2.0, 2.5, 6.0]))
def test_the_choice_is_that_of_a_search_through_all_means(front: Front, what, value: float) -> None:
    chosen, met = choice(Limit(what, value), front)
    for s, place in enumerate(chosen.tolist()):
        points = list(zip(front.latency_s[s].tolist(), front.loss[s].tolist(), strict=True))
        values = {"latency": [t for t, _ in points], "loss": [q for _, q in points]}
        values["noise"] = [2 * q for q in values["loss"]]
        good = [i for i, one in enumerate(values[what]) if one <= value]
        assert met[s] == bool(good)
        known = [math.inf if math.isnan(q) else q for _, q in points]
        if good and what == "latency":
            assert place == max(good)
        elif good:
            assert place in good
            assert all((points[place][0], known[place], -place) <= (points[i][0], known[i], -i) for i in good)
        elif what == "latency":
            assert points[place][0] == min(values[what])
        else:
            assert known[place] == min(known)


@given(fronts(), st.sampled_from(["latency", "loss", "noise"]), st.floats(0, 6), st.floats(0, 6))
def test_a_tighter_limit_never_gives_more(front: Front, what, one: float, other: float) -> None:
    tight, loose = sorted((one, other))
    (few, met), (many, still) = (choice(Limit(what, value), front) for value in (tight, loose))
    assert (still >= met).all()
    for s in np.flatnonzero(met):
        if what == "latency":
            assert few[s] <= many[s]
        else:
            assert front.latency_s[s, few[s]] >= front.latency_s[s, many[s]]


# --- the front, against sequences priced alone ---


def alone(found: Tuning, model: Any, system: Any, trace: Any, s: int, bits: float, **options: Any) -> tuple[float, ...]:
    """Time, loss and noise of one sequence of a trace at a mean, priced without the others."""
    name, _, rest = found.policy.partition(":")
    text = f"{name}:{rest},mean_bits={bits!r}" if rest else f"{name}:mean_bits={bits!r}"
    one = plan_run(model, system, trace.sequences([s]), text, **options)
    names = (found.metric, "quant_loss", "quant_noise")
    return tuple(value.item() for value in one.metrics(names, hardware_point(one.system)[None]).values())


@settings(max_examples=25)
@given(st.data())
def test_every_mean_costs_what_the_sequence_costs_alone(data) -> None:
    model, system = data.draw(models(max_experts=4)), data.draw(systems())
    trace = data.draw(traces(model, prefill=True))
    kept = data.draw(st.integers(0, model.num_experts - 1))
    options = [
        f"gpu_experts={kept}",
        f"selector={data.draw(st.sampled_from(['prefix', 'prefix', 'optimum', 'uniform']))}",
        f"scope={data.draw(st.sampled_from(['layer', 'model']))}",
        f"objective={data.draw(st.sampled_from(['plain', 'importance', 'use']))}",
        f"min_bits={data.draw(st.integers(1, 3))}",
    ]
    given_scenario = Scenario.of(model, system, trace, f"context-aware:{','.join(options)}")
    metric = data.draw(st.sampled_from(["mean", "max", "p50", "p99", "p12.5"]))
    found = tune(given_scenario, target_tpot_ms=1e9, metric=metric)
    front = found.front
    for _ in range(4):
        s = data.draw(st.integers(0, trace.num_sequences - 1))
        m = data.draw(st.integers(0, len(front.mean_bits) - 1))
        expected = alone(found, model, system, trace, s, float(front.mean_bits[m]))
        assert_allclose(
            (front.latency_s[s, m], front.loss[s, m], front.noise[s, m]), expected, rtol=1e-12, atol=0, equal_nan=True
        )
    assert found.met.all()
    assert_array_equal(found.chosen, len(front.mean_bits) - 1)


@pytest.mark.parametrize(
    "text", ["context-aware", "context-aware:scope=model", "static:selector=optimum,gpu_experts=2"]
)
def test_the_choice_priced_again(text: str) -> None:
    """Brute force over every mean of every sequence, and all of them together, from plans that nothing shares."""
    trace = recording()
    options = {"prompt": 8, "output": 12}
    given_scenario = Scenario.of(policy=text, **options)
    first = tune(given_scenario, target_tpot_ms=1e9)
    if not text.startswith("static"):  # its placement is that of the other sequences
        for s in range(trace.num_sequences):
            m = (7 * s) % len(first.front.mean_bits)
            expected = alone(
                first, "mixtral-8x7b", "h100-cxl2-ndp", trace, s, float(first.front.mean_bits[m]), **options
            )
            found = first.front.latency_s[s, m], first.front.loss[s, m], first.front.noise[s, m]
            assert_allclose(found, expected, rtol=1e-12, atol=0)
    limit = float(np.median(first.front.latency_s))
    found = tune(given_scenario, target_tpot_ms=1e3 * limit)
    every = range(trace.num_sequences)
    pooled: list[tuple[float, float, float]] = []
    for s in every:
        within = [m for m, t in enumerate(first.front.latency_s[s].tolist()) if t <= 1e-3 * (1e3 * limit)]
        assert found.met[s] == bool(within)
        assert found.chosen[s] == (max(within) if within else first.front.latency_s[s].argmin())
        picks = float(found.front.picks[s])
        pooled.append((found.latency_s[s] * 12, found.loss[s] * picks, picks))
    time, loss, picks = np.sum(pooled, axis=0)
    own = found.compared[0]
    assert_allclose((own.latency_s, own.loss), (time / (12 * len(every)), loss / picks), rtol=1e-12, atol=0)
    assert own.met == found.met.sum()
    name = text.partition(":")[0]
    for one in found.compared[1:]:
        run_together = evaluate(
            "mixtral-8x7b",
            "h100-cxl2-ndp",
            trace,
            f"{text}{':' if text == name else ','}mean_bits={one.mean_bits!r}",
            **options,
        )
        expected = run_together.tpot_mean_s, run_together.quant_loss, run_together.quant_noise
        assert_allclose((one.latency_s, one.loss, one.noise), expected, rtol=1e-12, atol=0)
        m = int(np.flatnonzero(found.front.mean_bits == one.mean_bits)[0])
        assert one.met == sum(t <= found.limit.value for t in found.front.latency_s[:, m])
    assert [one.rule for one in found.compared[-2:]] == ["fixed 2 bits", "fixed 3 bits"]


def test_all_at_their_own_mean_is_one_mean_where_all_choose_the_same() -> None:
    for metric in ("mean", "p99", "max"):
        for limit in ({"target_tpot_ms": 1e9}, {"max_loss": 1e9}, {"max_noise": 1.0}):
            found = tune(scenario(), metric=metric, **limit)
            if len(set(found.chosen.tolist())) > 1:
                continue
            own, most = found.compared[:2]
            assert_allclose(own[1:5], most[1:5], rtol=1e-12, atol=0)
            assert own.met == most.met == 6
            break
        else:
            raise AssertionError(metric)


def test_one_mean_for_all_is_the_best_there_is() -> None:
    given_scenario = scenario("context-aware:scope=model")
    front = tune(given_scenario, target_tpot_ms=1e9).front
    middle = float(np.median(front.latency_s))
    found = tune(given_scenario, target_tpot_ms=1e3 * middle)
    by_name = {one.rule: one for one in found.compared}
    good = [int((front.latency_s[:, m] <= found.limit.value).sum()) for m in range(len(front.mean_bits))]
    most = max(m for m, count in enumerate(good) if count == max(good))
    assert by_name["one mean, limit kept by most"].mean_bits == front.mean_bits[most]
    whole = max(m for m, t in enumerate(front.pooled_latency_s.tolist()) if t <= found.limit.value)
    assert by_name["one mean, limit kept on average"].mean_bits == front.mean_bits[whole]
    # As many sequences keep the target, and none of them loses more than with one mean for all.
    assert by_name["a mean for every sequence"].met >= max(good)
    assert (found.chosen[found.met & (front.latency_s[:, most] <= found.limit.value)] >= most).all()


def test_ceilings_of_loss_and_noise() -> None:
    given_scenario = scenario()
    front = tune(given_scenario, max_loss=1e9).front
    for name, values in (("max_loss", front.loss), ("max_noise", front.noise)):
        limit = float(np.median(values))
        found = tune(given_scenario, **{name: limit})
        for s in range(6):
            within = [m for m in range(len(front.mean_bits)) if values[s, m] <= limit]
            assert found.met[s] == bool(within)
            assert found.latency_s[s] == min(front.latency_s[s, within])
        assert found.limit == Limit("loss" if name == "max_loss" else "noise", limit)
    # Loss and noise differ by what the experts of a sequence put out.
    assert_allclose(front.loss / front.noise, np.repeat(front.variance[:, None], 13, axis=1), rtol=1e-9, atol=0)


def test_means_are_all_that_the_budget_can_have() -> None:
    for text, means in (
        ("context-aware", np.arange(13) / 4 + 1),
        ("context-aware:gpu_experts=5", np.arange(10) / 3 + 1),
        ("context-aware:gpu_experts=6,min_bits=2", [2, 2.5, 3, 3.5, 4]),
        ("context-aware:selector=uniform,min_bits=2", [2, 3, 4]),
        ("context-aware:min_bits=3", np.arange(5) / 4 + 3),
    ):
        assert_allclose(tune(scenario(text), target_tpot_ms=1e9).front.mean_bits, means, rtol=1e-15, atol=0)
    few = LossTable(np.ones((32, 8, 2)) * [2.0, 1.0], "few", bits=(2, 4))
    found = tune(scenario("context-aware:gpu_experts=5", losses=few), target_tpot_ms=1e9)
    assert_allclose(found.front.mean_bits, [2, 8 / 3, 10 / 3, 4], rtol=1e-15, atol=0)
    found = tune(scenario("context-aware:scope=model,gpu_experts=6"), target_tpot_ms=1e9)
    assert_allclose(found.front.mean_bits, 1 + np.arange(193) / 64, rtol=1e-15, atol=0)
    assert found.front.thinned == 0


def test_very_many_means_are_thinned() -> None:
    seen: list[tuple[int, int]] = []
    found = tune(
        scenario("context-aware:scope=model"), target_tpot_ms=1e9, progress=lambda *counts: seen.append(counts)
    )
    means = found.front.mean_bits
    assert control_front.MOST_MEANS <= len(means) <= control_front.MOST_MEANS + 4
    assert found.front.thinned == 32 * 4 * 3 + 1
    assert seen == [(done, len(means)) for done in range(len(means))]
    assert {1.0, 2.0, 3.0, 4.0} <= set(means.tolist())
    assert np.diff(means).max() <= 2.001 / 128
    assert f"{len(means)} of the 385 means that the budget can have were priced" in found.notes


def test_more_bits_may_be_faster_and_lose_more() -> None:
    """A table whose losses rise with bits, at a machine where a mean is planned but nothing is near memory in time."""
    rising = LossTable(np.tile([0.5, 1.0, 2.0, 4.0], (32, 8, 1)), "rising")
    found = tune(scenario(losses=rising), target_tpot_ms=1e9)
    assert_array_equal(found.mean_bits, 4.0)
    assert any("a smaller mean within the target loses less in 6 of 6 sequences" in note for note in found.notes)
    assert_array_equal(tune(scenario(losses=rising), max_loss=0.0 + found.front.loss.min()).mean_bits, 1.0)
    assert not any("loses less" in note for note in tune(scenario(), target_tpot_ms=1e9).notes)


def test_what_a_table_cannot_tell() -> None:
    bare = LossTable(np.tile([8.0, 4.0, 2.0, 1.0], (32, 8, 1)), "bare")
    found = tune(scenario(losses=bare), max_loss=4.0)
    assert np.isnan(found.noise).all()
    assert found.to_dict()["sequences"][0]["noise"] is None
    json.dumps(found.to_dict(), allow_nan=False)
    assert any("no output variances" in note for note in found.notes)
    with pytest.raises(PerfModelError, match=r"the noise of context-aware is unknown: .*bare has no output variances"):
        tune(scenario(losses=bare), max_noise=0.5)
    assert tune(scenario(losses=bare), target_tpot_ms=1e9).met.all()


def test_a_limit_that_no_mean_keeps() -> None:
    with pytest.raises(
        NoAnswerError, match=r"no sequence of context-aware has tpot_mean at most 0.001 ms at any mean"
    ) as error:
        tune(scenario(), target_tpot_ms=1e-3)
    front = tune(scenario(), target_tpot_ms=1e9).front
    rows = error.value.details["sequences"]
    assert [row["met"] for row in rows] == [False] * 6
    assert [row["latency_s"] for row in rows] == front.latency_s.min(axis=1).tolist()
    assert f"{1e3 * front.latency_s.min():.6g} ms" in str(error.value)
    json.dumps(error.value.details, allow_nan=False)
    with pytest.raises(NoAnswerError, match=r"has loss at most 0 at any mean") as error:
        tune(scenario(), max_loss=0)
    assert [row["loss"] for row in error.value.details["sequences"]] == front.loss.min(axis=1).tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "found none, allowed exactly one of target_tpot_ms, max_loss, max_noise"),
        ({"target_tpot_ms": 5, "max_loss": 1}, "found target_tpot_ms and max_loss"),
        (
            {"target_tpot_ms": 0},
            "target of the time per output token: found 0, allowed a number of milliseconds above 0",
        ),
        ({"target_tpot_ms": -1}, "found -1"),
        ({"target_tpot_ms": math.nan}, "found nan"),
        ({"target_tpot_ms": math.inf}, "found inf"),
        ({"target_tpot_ms": "5"}, "found '5'"),
        ({"target_tpot_ms": True}, "found True"),
        ({"max_loss": -0.5}, "ceiling of the loss: found -0.5, allowed a number from 0"),
        ({"max_noise": math.nan}, "ceiling of the noise: found nan, allowed a number from 0, or a text such as 3%"),
        ({"max_loss": 1, "metric": "p101"}, "metric: found 'p101', allowed mean, max or p0 to p100"),
        ({"max_loss": 1, "metric": "ttft_s"}, "found 'ttft_s', allowed mean, max or p0 to p100"),
        ({"max_loss": 1, "metric": "p099"}, "its name is tpot_p99_s"),
        ({"max_loss": 1, "metric": 99}, "found 99"),
        ({"max_loss": 1, "policy": "hobbit"}, "policy"),
    ],
)
def test_bad_questions(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PerfModelError, match=words) as error:
        tune(scenario(), **options)
    assert not isinstance(error.value, NoAnswerError)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("policy", "kind", "words"),
    [
        ("monde", PerfModelError, "policy monde has no bit budget to choose; allowed: context-aware, static"),
        ("hobbit", PerfModelError, "policy hobbit has no bit budget"),
        ("context-aware:selector=full", PerfModelError, "keeps every expert at its stored precision"),
        ("context-aware:mean_bits=2", PerfModelError, "sets mean_bits itself; leave it out"),
        ("context-aware:gpu_experts=0", None, ""),
        ("static:gpu_experts=8", PlacementError, "does not fit"),
    ],
)
def test_policies_without_a_budget(policy: str, kind: type[PerfModelError] | None, words: str) -> None:
    if kind is None:
        assert tune(scenario(policy), target_tpot_ms=1e9).met.all()
        return
    with pytest.raises(kind, match=words):
        tune(scenario(policy), target_tpot_ms=50)


def test_scenarios_without_an_answer() -> None:
    model = plain_model()
    bare = small_trace(model, [(0, 5), (0, 3)], seed=1)
    with pytest.raises(PolicyError, match="no prefill"):
        tune(Scenario.of(model, "h100-cxl-ndp", bare, "context-aware"), target_tpot_ms=50)
    assert tune(Scenario.of(model, "h100-cxl-ndp", bare, "static"), target_tpot_ms=50).met.all()
    with pytest.raises(PolicyError, match="near-data device"):
        tune(Scenario.of(model, "rtx4090-pcie4", small_trace(model, [(3, 5)]), "context-aware"), target_tpot_ms=50)
    with pytest.raises(PerfModelError, match=r"keeps all 4 experts of a layer on the GPU.*gpu_experts from 0 to 3"):
        tune(
            Scenario.of(model, "h100-cxl-ndp", small_trace(model, [(3, 5)]), "context-aware:gpu_experts=4"), max_loss=1
        )
    with pytest.raises(PerfModelError, match="allowed a Scenario"):
        tune("context-aware", target_tpot_ms=50)  # type: ignore[arg-type]
    with pytest.raises(PerfModelError, match="allowed one of"):
        tune(scenario("context-aware", "static"), target_tpot_ms=50)


def test_names_of_latencies() -> None:
    assert [latency_metric(one) for one in ("mean", "max", "p50", "p99.9", "tpot_mean_s", "tpot_p95_s")] == [
        "tpot_mean_s", "tpot_max_s", "tpot_p50_s", "tpot_p99.9_s", "tpot_mean_s", "tpot_p95_s",
    ]  # fmt: skip


def test_labels_are_those_of_the_trace() -> None:
    assert tune(scenario(), target_tpot_ms=1e9).labels == ("0 python", "1 english", "2 html", "3 json", "4 intl", "5 c")
    unnamed = dataclasses.replace(recording(), labels=None)
    assert tune(scenario(trace=unnamed), target_tpot_ms=1e9).labels == ("0", "1", "2", "3", "4", "5")


# --- the command ---


def test_the_command_says_what_the_function_says(tmp_path: Path) -> None:
    front = tune(scenario(), target_tpot_ms=1e9).front
    target = f"{1e3 * np.median(front.latency_s):.4f}"
    out, plot = tmp_path / "bits.nc", tmp_path / "bits.svg"
    arguments = ("tune", "--target-tpot-ms", target, *SHORT)
    answer = run(*arguments, "--json", "-o", out, "--plot", plot)
    expected = tune(scenario(), target_tpot_ms=float(target))
    document = json.loads(answer.out)
    (found,) = document["answers"]
    assert found == {**json.loads(json.dumps(expected.to_dict())), "reason": None}
    assert document["weakest_source"] == "assumed"
    assert answer.code == (0 if expected.met.all() else 1)
    assert answer.err == f"wrote {plot}\nwrote {out}\n"
    dataset = open_dataset(out)
    assert dataset.sizes == {"policy": 1, "sequence": 6, AXIS: 13}
    assert_array_equal(dataset.chosen[0].values.argmax(axis=1), expected.chosen)
    assert_array_equal(dataset.chosen.values.sum(axis=2), 1)
    assert_array_equal(dataset.tpot_mean_s[0].values, front.latency_s)
    assert_array_equal(dataset.quant_loss[0].values, front.loss)
    assert_array_equal(dataset.met[0].values, front.latency_s <= float(target) * 1e-3)
    text = run(*arguments).out
    for words in (
        "context-aware: the mean with the most bits for every sequence, tpot_mean at most", "tpot_mean [ms]",
        "loss over own [1]",
        "a mean for every sequence", "one mean, limit kept by most", "fixed 2 bits", "note: means are chosen from",
        "weakest source of a number", "4 intl", f"{expected.compared[0].met} of 6",
    ):  # fmt: skip
        assert words in text
    for row in expected.to_dict()["sequences"]:
        line = next(line for line in text.splitlines() if line.startswith(row["label"]))
        assert f"{1e3 * row['latency_s']:.5g}" in line.split()
        assert f"{row['mean_bits']:.4g}" in line.split()
        assert line.endswith("yes" if row["met"] else "no")


def test_sequences_that_miss_the_limit_are_listed(tmp_path: Path) -> None:
    front = tune(scenario(), target_tpot_ms=1e9).front
    fastest = np.sort(front.latency_s.min(axis=1))
    target = f"{1e3 * (fastest[2] + fastest[3]) / 2:.5f}"
    answer = run("tune", "--target-tpot-ms", target, *SHORT)
    assert answer.code == 1
    assert answer.err == ""
    assert "3 of 6 sequences cannot keep the limit; their nearest mean is shown" in answer.out
    assert sum(line.endswith(" no") for line in answer.out.splitlines()) == 3
    # One policy may have no answer at all while another has one.
    csv = tmp_path / "bits.csv"
    both = ("tune", "--max-loss", 0, "--policy", "context-aware", "--policy", "static:selector=optimum", *SHORT)
    answer = run(*both, "-o", csv)
    assert answer.code == 1
    assert "no sequence of context-aware has loss at most 0" in answer.out
    assert "is not written" in answer.err
    assert list(tmp_path.iterdir()) == []
    document = json.loads(run(*both, "--json").out)
    assert [one["policy"] for one in document["answers"]] == ["context-aware", "static:selector=optimum"]
    assert all(one["reason"] and not any(row["met"] for row in one["sequences"]) for one in document["answers"])


def test_several_policies_and_tables(tmp_path: Path) -> None:
    csv, plot = tmp_path / "bits.csv", tmp_path / "bits.png"
    policies = ("context-aware:objective=use", "static:min_bits=2", "context-aware:scope=model,gpu_experts=6")
    given_policies = [word for one in policies for word in ("--policy", one)]
    answer = run("tune", "--max-noise", "100%", "--metric", "p99", *given_policies, *SHORT, "-o", csv, "--plot", plot)
    assert answer.code == 0, answer
    assert plot.stat().st_size > 1000
    table = pd.read_csv(csv)
    assert list(table.columns) == [
        "policy", "sequence", AXIS, "tpot_p99_s", "quant_loss", "quant_noise", "spent_bits", "chosen", "met",
    ]  # fmt: skip
    chosen = table[table.chosen == 1]
    for one in policies:
        expected = tune(scenario(one), max_noise=1, metric="p99")
        own = chosen[chosen.policy == one]
        assert_allclose(own[AXIS], expected.mean_bits, rtol=0, atol=0)
        assert_allclose(own.tpot_p99_s, expected.latency_s, rtol=0, atol=0)
        assert f"{one}: the mean with the least time for every sequence, noise at most 1" in answer.out
    assert "time over own [1]" in answer.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--target-tpot-ms", "--max-loss", "--max-noise")),
        (("--target-tpot-ms", "5", "--max-loss", "1"), ("not allowed with",)),
        (("--target-tpot-ms", "x"), ("--target-tpot-ms", "'x'")),
        (("--target-tpot-ms", "nan"), ("time per output token", "found nan", "above 0")),
        (("--target-tpot-ms", "-3"), ("found -3",)),
        (("--target-tpot-ms", "0"), ("found 0",)),
        (("--max-loss", "-1"), ("ceiling of the loss", "from 0")),
        (("--max-noise", "inf"), ("ceiling of the noise", "found 'inf'")),
        (("--target-tpot-ms", "5", "--target-tpot-ms", "6"), ("given twice",)),
        (("--target-tpot-ms", "5", "--metric", "p9x"), ("metric: found 'p9x'", "p0 to p100")),
        (("--target-tpot-ms", "5", "--policy", "monde"), ("no bit budget", "context-aware, static")),
        (("--target-tpot-ms", "5", "--policy", "context-aware:mean_bits=2"), ("leave it out",)),
        (("--target-tpot-ms", "5", "--policy", "contextaware"), ("did you mean context-aware",)),
        (("--target-tpot-ms", "5", "--policy", "static", "--policy", "static"), ("same policy",)),
        (("--target-tpot-ms", "5", "--plot", "bits.txt"), ("bits.txt", ".png, .svg, .pdf")),
        (("--target-tpot-ms", "5", "--plot", f"{__file__}/bits.png"), ("--plot", "is not a folder")),
        (
            (
                "--target-tpot-ms",
                "5",
                "--plot",
                "b.png",
                *(w for k in range(5) for w in ("--policy", f"static:alpha=0.{k}")),
            ),
            ("--plot: found 5 policies, allowed 1 to 4",),
        ),
        (("--target-tpot-ms", "5", "-o", "bits.xls"), ("bits.xls", ".csv")),
        (("--target-tpot-ms", "5", "--trace", "nothing"), ("nothing",)),
        (("--target-tpot-ms", "5", "--loss", "/nowhere.npz"), ("/nowhere.npz",)),
        (("--target-tpot-ms", "5", "--system", "rtx4090-pcie4"), ("near-data device",)),
    ],
)
def test_the_command_refuses(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check_refusal(run("tune", *arguments, *SHORT), *words)


def test_an_output_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "mine.csv"
    other.write_text("a,b\n1,2\n")
    check_refusal(run("tune", "--target-tpot-ms", 50, "-o", other, *SHORT), "nothing that perfmodel wrote")
    assert other.read_text() == "a,b\n1,2\n"


def test_figures_of_every_kind_of_limit(tmp_path: Path) -> None:
    one = scenario()
    for number, limit in enumerate(({"target_tpot_ms": 1e9}, {"max_loss": 1e9}, {"max_noise": 1.0})):
        found = tune(one, **limit)
        path = tmp_path / f"{number}.svg"
        save(control_figure([found], one), path)
        assert path.stat().st_size > 5000
    figure = control_figure([found], one)
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    assert low < 1e3 * found.front.latency_s.min() < 1e3 * found.front.latency_s.max() < high
    drawn = {line.get_label(): line.get_ydata()[0] for line in axes.get_lines()}
    assert_allclose([drawn[name] for name in found.labels], 1e3 * found.latency_s, rtol=1e-15, atol=0)
    flat = LossTable(np.zeros((32, 8, 4)), "flat")
    save(control_figure([tune(scenario(losses=flat), max_loss=0)], one), tmp_path / "flat.png")
    for count in (0, 5):
        with pytest.raises(PerfModelError, match="1 to 4 policies"):
            control_figure([found] * count, one)
    unknown = LossTable(np.ones((32, 8, 4)), "bare")
    noiseless = dataclasses.replace(tune(scenario(losses=unknown), max_loss=1), limit=Limit("noise", 1.0))
    with pytest.raises(PerfModelError, match="nothing to draw"):
        control_figure([noiseless], one)


# --- what is spent, and what is said ---


def test_all_together_weigh_sequences_by_their_tokens_and_picks() -> None:
    """Sequences of unequal length that choose differently, against every decode step priced alone."""
    model = plain_model(num_experts=6)
    lengths = [(9, 2), (7, 41), (12, 11)]
    trace = small_trace(model, lengths, seed=5)
    rng = np.random.default_rng(3)
    losses = rng.random((3, 6, 4)) * [8.0, 4.0, 2.0, 1.0]
    table = LossTable(losses, "mine", output_variance=rng.random((3, 6)) + 5.0)
    given_scenario = Scenario.of(model, "h100-cxl-ndp", trace, "context-aware:gpu_experts=2", losses=table)
    every = range(3)
    front = tune(given_scenario, target_tpot_ms=1e9).front
    for limit in sorted(set(front.loss.ravel().tolist())):
        found = tune(given_scenario, max_loss=limit) if (front.loss.min(axis=1) <= limit).all() else None
        if found is not None and len(set(found.chosen.tolist())) == 3:
            break
    else:
        raise AssertionError("no limit at which all sequences choose differently")
    runs = [
        plan_run(
            model, "h100-cxl-ndp", trace.sequences([s]), f"context-aware:gpu_experts=2,mean_bits={bits!r}", losses=table
        )
        for s, bits in enumerate(found.mean_bits.tolist())
    ]
    assert found.front.tokens.tolist() == [2, 41, 11]
    steps = np.concatenate([one.token_times(hardware_point(one.system)) for one in runs])
    loss = sum(runs[s].quality.loss * lengths[s][1] for s in every) / 54
    variance = sum(runs[s].quality.loss / runs[s].quality.noise * lengths[s][1] for s in every) / 54
    own = found.compared[0]
    assert_allclose((own.latency_s, own.loss), (steps.mean(), loss), rtol=1e-12, atol=0)
    assert_allclose(own.noise, loss / variance, rtol=1e-12, atol=0)
    assert abs(own.loss / np.mean([one.quality.loss for one in runs]) - 1) > 1e-3  # the lengths matter


def test_bits_that_are_not_spent_are_said() -> None:
    """A table whose fourth bit harms half of the experts: a ceiling leaves it, an exact budget does not."""
    losses = np.tile([8.0, 4.0, 2.0, 1.0], (32, 8, 1))
    losses[:, ::2, 3] = 3.0
    table = LossTable(losses, "harmful", output_variance=np.full((32, 8), 16.0))
    found = tune(scenario("context-aware:budget=at-most", losses=table), target_tpot_ms=1e9)
    assert_array_equal(found.mean_bits, 4.0)
    assert (found.spent_bits < 4.0).all()
    assert len(set(found.spent_bits.tolist())) > 1
    for s, expected in enumerate(found.spent_bits.tolist()):
        text = "context-aware:budget=at-most,mean_bits=4"
        one = plan_run(
            "mixtral-8x7b", "h100-cxl2-ndp", recording().sequences([s]), text, prompt=16, output=24, losses=table
        )
        assert_allclose(one.plan.mean_bits, expected, rtol=1e-12, atol=0)
    document = found.to_dict()
    assert [row["spent_bits"] for row in document["sequences"]] == found.spent_bits.tolist()
    fixed = {one.rule: one for one in found.compared}["fixed 3 bits"]
    assert (fixed.mean_bits, fixed.spent_bits) == (3.0, 3.0)
    assert_allclose(found.compared[0].spent_bits, found.spent_bits.mean(), rtol=1e-12, atol=0)
    assert any("near-data experts a layer spend" in note and "of at most 4 bits" in note for note in found.notes)
    exact = tune(scenario(losses=table), target_tpot_ms=1e9)
    assert_allclose(exact.front.spent_bits, np.tile(exact.front.mean_bits, (6, 1)), rtol=1e-12, atol=0)


def test_the_command_shows_what_is_spent_where_it_differs(tmp_path: Path) -> None:
    path = tmp_path / "harmful.npz"
    np.savez(path, losses=np.tile([8.0, 4.0, 2.0, 3.0], (32, 8, 1)))
    arguments = ("tune", "--target-tpot-ms", 1e6, "--loss", path, *SHORT)
    text = run(*arguments, "--policy", "context-aware:budget=at-most").out
    assert "mean bits  spent  tpot_mean [ms]" in text
    rows = [line.split() for line in text.splitlines() if line.endswith("yes")]
    assert [(row[3], row[4]) for row in rows] == [("4", "3")] * 6
    assert "fixed 3 bits" in text
    assert "spent" not in run(*arguments).out


def test_the_lowest_width_may_be_the_widest() -> None:
    for limit in ({"target_tpot_ms": 1e9}, {"max_loss": 1e9}):
        found = tune(scenario("context-aware:min_bits=4"), **limit)
        assert_array_equal(found.front.mean_bits, [4.0])
        assert found.met.all()


def test_widths_above_four_are_left_with_a_note() -> None:
    wide = LossTable(np.tile([4.0, 2.0, 1.0, 0.1], (32, 8, 1)), "wide", bits=(2, 3, 4, 8))
    found = tune(scenario(losses=wide), target_tpot_ms=1e9)
    assert found.front.mean_bits[-1] == 4.0
    note = "width 8 of loss table wide is not used: near-data experts go up to 4 bits"
    assert note in found.notes
    two = LossTable(np.ones((32, 8, 2)), "two", bits=(2, 8))
    found = tune(scenario(losses=two), target_tpot_ms=1e9)
    assert_array_equal(found.front.mean_bits, [2.0])


def test_noise_without_a_table_of_the_model() -> None:
    model = plain_model(num_experts=16)
    one = Scenario.of(model, "h100-cxl-ndp", small_trace(model, [(5, 4)]), "context-aware:gpu_experts=2")
    with pytest.raises(PerfModelError, match=r"no loss table of 16 experts a layer is bundled.*losses build.*--loss"):
        tune(one, max_noise=0.1)
    assert tune(one, max_loss=1.0).met.all()


def test_noise_may_be_given_in_percent() -> None:
    share = tune(scenario(), max_noise=0.05)
    for text in ("5%", " 5 %", "0.05"):
        assert tune(scenario(), max_noise=text).limit == share.limit
    answer = run("tune", "--max-noise", "5%", *SHORT, "--json")
    assert json.loads(answer.out)["answers"][0]["limit"] == 0.05
    for value, words in (
        (3, "found 3, allowed a share of the variance from 0 to 1; for 3 % give 0.03 or 3%"),
        (1.5, "for 1.5 % give 0.015 or 1.5%"),
        ("101%", "found '101%', allowed a share of the variance from 0 to 100%$"),
        ("3 percent", "found '3 percent', allowed a number from 0, or a text such as 3%"),
        ("%", "found '%'"),
        ("-1%", "found '-1%'"),
        (1e9, "found 1000000000.0, allowed a share of the variance from 0 to 1$"),
    ):
        with pytest.raises(PerfModelError, match=f"tune: ceiling of the noise: .*{words}"):
            tune(scenario(), max_noise=value)


def test_left_over_arguments_name_the_help_of_the_command() -> None:
    check_refusal(run("tune", "--max-loss", 1, "--bogus"), "--bogus", "(see perfmodel tune --help)")
    check_refusal(run("losses", "show", "x", "--bogus"), "--bogus", "(see perfmodel losses show --help)")


def test_few_sequences_have_colours_and_names_in_the_figure() -> None:
    one = scenario()
    found = tune(one, max_noise="100%")
    (axes,) = control_figure([found], one).axes
    assert not axes.texts
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert len({lines[name].get_color() for name in found.labels}) == 6
    for s, name in enumerate(found.labels):
        assert_allclose(
            lines[name].get_xydata()[0], (100 * found.noise[s], 1e3 * found.latency_s[s]), rtol=1e-12, atol=0
        )
    assert "(%" in axes.get_xlabel().replace("\n", " ")
    star = lines["all, each at its own"]
    assert star.get_markerfacecolor() == "none"
    assert star.get_zorder() < min(lines[name].get_zorder() for name in found.labels)
    model = plain_model()
    many = Scenario.of(model, "h100-cxl-ndp", small_trace(model, [(3, 2)] * 9), "context-aware:gpu_experts=1")
    (axes,) = control_figure([tune(many, target_tpot_ms=1e9)], many).axes
    assert [line.get_label() for line in axes.get_lines()].count("one sequence") == 1


@pytest.mark.parametrize("arguments", [("--target-tpot-ms", 18.4), ("--max-noise", "3%"), ("--max-loss", 1)])
def test_losses_whose_sums_no_float_holds_are_refused(tmp_path: Path, arguments: tuple[Any, ...]) -> None:
    for value, unit in ((1.7e308, "larger"), (1e-320, "smaller")):
        np.savez(tmp_path / "odd.npz", losses=np.full((32, 8, 4), value))
        given = ("--loss", tmp_path / "odd.npz", "--json", *SHORT)
        check_refusal(run("tune", *arguments, *given), "odd", "losses holds", f"in a {unit} unit")
        policy = ("--policy", "context-aware:mean_bits=2")
        check_refusal(run("compare", "--model", "mixtral-8x7b", *policy, *given), f"in a {unit} unit")


def test_a_table_of_wide_formats_alone_is_refused() -> None:
    wide = LossTable(np.ones((32, 8, 1)), "t8", bits=(8,))
    with pytest.raises(PolicyError, match="widths of loss table t8 are 8, above the 4 bits") as error:
        tune(scenario(losses=wide), max_loss=1)
    assert "mean_bits" not in str(error.value)


def test_noise_is_said_in_percent() -> None:
    assert tune(scenario(), max_noise=0.5).asked == "noise at most 50 %"
    with pytest.raises(
        NoAnswerError, match=r"has noise at most 1e-07 % at any mean; the nearest is 0\.\d+ %, sequence"
    ):
        tune(scenario(), max_noise=1e-9)


def test_why_the_noise_is_unknown() -> None:
    losses = np.ones((32, 8, 4))
    zero = LossTable(losses, "zero", output_variance=np.zeros((32, 8)))
    for table, words in (
        (zero, "the output variances of loss table zero are 0"),
        (LossTable(losses, "bare"), "loss table bare has no output"),
    ):
        with pytest.raises(PerfModelError, match=f"^tune: the noise of context-aware is unknown: {words}[^:]*$"):
            tune(scenario(losses=table), max_noise=0.5)
