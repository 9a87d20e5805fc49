"""docs/tune.md is true: its commands run, its output and numbers are computed, its options are those of the code."""

import re
import shlex
from pathlib import Path

import pytest
from commands import run

from perfmodel.answers import Tuning, tune
from perfmodel.evidence.bench import Bench
from perfmodel.evidence.explore import outcome
from perfmodel.evidence.reproduce import reproduce
from perfmodel.policies import POLICIES
from perfmodel.run import evaluate
from perfmodel.scenario import Scenario

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "tune.md").read_text(encoding="utf-8")
PLAIN = " ".join(TEXT.split())
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {language for language, _ in BLOCKS} == {"sh", "text", "python"}
    assert TEXT.count("```") == 2 * len(BLOCKS)
    printed = []
    for language, text in BLOCKS:
        if language == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                program, *arguments = shlex.split(line)
                assert program == "perfmodel"
                answer = run(*arguments)
                assert answer.code == 0, f"{line}\n{answer.err}{answer.out}"
                printed.append(answer.out)
        elif language == "python":
            exec(compile(text, "docs/tune.md", "exec"), {"__name__": "page"})
    (shown,) = (text for language, text in BLOCKS if language == "text")
    assert any(one.startswith(shown.rstrip()) for one in printed)
    assert {path.name for path in tmp_path.iterdir()} == {"noise.svg", "noise.csv", "noise.csv.json"}


def test_options_are_those_of_the_code() -> None:
    stated = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", TEXT, flags=re.MULTILINE))
    for kind in (POLICIES["context-aware"], POLICIES["static"]):
        options = {one.name: one for one in kind.options()}
        for name, default in stated.items():
            assert str(options[name].default) == default.split(":")[0].strip("` ")
            for value in options[name].allowed.split(" | "):
                row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |"))
                assert value in row or name == "min_bits"


def test_losses_of_the_options() -> None:
    rows = re.findall(r"^\| (?:`([\w=,]+)`|\(the defaults\)) \| (0\.\d+) \| ([\d.]+) ms \|$", TEXT, flags=re.MULTILINE)
    assert len(rows) == 8
    found = {}
    for options, loss, time in rows:
        text = f"context-aware:mean_bits=2{',' if options else ''}{options}"
        one = evaluate("mixtral-8x7b", "h100-cxl2-ndp", "tiny-mixtral-32l-mini", text)
        assert one.quant_loss is not None
        assert (loss, time) == (f"{one.quant_loss:.5f}", f"{1e3 * one.tpot_mean_s:.2f}")
        found[options] = one.quant_loss
    assert found["selector=optimum"] > found[""] > found["objective=use"] > found["scope=model"]


def test_gains() -> None:
    def ask(policy: str, **limit: float) -> Tuning:
        return tune(Scenario.of(policy=policy), **limit)

    target = {"context-aware": "loses 4.9 times as much", "context-aware:scope=model": "3.2 times with `scope=model`"}
    for policy, words in target.items():
        own, most, whole, *_ = ask(policy, target_tpot_ms=18.4).compared
        assert own.met == most.met == 6
        assert f"{most.loss / own.loss:.1f} times" in words
        assert words in PLAIN
        if policy == "context-aware":
            assert (most.mean_bits, whole.mean_bits) == (1.0, 2.75)
            assert 0.62 < whole.loss / own.loss < 0.72  # a third less
    share = []
    for policy in target:
        found = ask(policy, max_noise=0.03)
        own, most, *_ = found.compared
        share.append(f"{100 * (most.latency_s / own.latency_s - 1):.1f} %")
    assert f"is {share[0]} faster than with one mean ({share[1]} with `scope=model`)" in PLAIN
    pooled = ask("context-aware", target_tpot_ms=18.4).front.pooled_latency_s
    assert 1.18 < pooled[-1] / pooled[0] < 1.22  # a fifth


def test_errors_of_the_reproduction_with_other_searches() -> None:
    defaults = " ".join((ROOT / "docs" / "defaults.md").read_text(encoding="utf-8").split())
    result = reproduce(explore=False)
    figures = tuple(row.figure for row in result.rows if row.figure.fit)
    bench = Bench(result.trace, result.systems["evidence"])
    near = tuple(result.fit.values)
    for option in ("objective=importance", "scope=model", "min_bits=2"):
        one = outcome(
            option,
            bench.branch(),
            figures,
            result.systems["evidence"],
            {"context-aware": f"context-aware:{option}"},
            near,
        )
        assert f"`{option}`: {100 * one.evidence_geomean_error:.1f} %, {100 * one.geomean_error:.1f} %" in defaults
