"""docs/traces.md is true: its commands run in order, and its tables name what the code has."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from commands import run

from perfmodel.cli.commands import build_parser
from perfmodel.routing.defects import DEFECTS
from perfmodel.routing.importers.registry import formats
from perfmodel.routing.presets import PRESETS
from perfmodel.routing.statistics import survey

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8")
PLAIN = " ".join(TEXT.split())
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    """What stands under a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}$(.*?)(?=^#+ |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found.group(1)


def first_column(title: str) -> list[str]:
    return re.findall(r"^\| `([\w-]+)` \|", section(title), flags=re.MULTILINE)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {language for language, _ in BLOCKS} == {"sh", "text", "python", "console"}
    assert TEXT.count("```") == 2 * len(BLOCKS)
    printed, names = [], {"__name__": "page"}
    for language, text in BLOCKS:
        if language == "sh":
            for line in text.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "perfmodel"
                answer = run(*arguments)
                assert answer.code == 0, f"{line}\n{answer.err}{answer.out}"
                printed.append(answer.out)
        elif language == "python":
            exec(compile(text, "docs/traces.md", "exec"), names)
    (shown,) = (text for language, text in BLOCKS if language == "text")
    assert any(one.startswith(shown.rstrip()) for one in printed)
    assert {path.name for path in tmp_path.iterdir()} == {
        "request.npy", "request.npz", "again.npz", "figures", "hit_rate.png", "drawn.npz", "alike.npz",
    }  # fmt: skip
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == set(
        re.findall(r"`(\w+)`", PLAIN[PLAIN.index("`--plot DIR` draws") :].split("each as PNG")[0])
    ) - {"N"}


def test_commands_that_need_a_model_have_these_options() -> None:
    (shown,) = (text for language, text in BLOCKS if language == "console")
    program, *arguments = shlex.split(shown)
    assert program == "perfmodel"
    assert build_parser().parse_args(arguments).max_new_tokens == 256


def test_every_format_is_named_where_it_belongs() -> None:
    listed = formats().values()
    assert set(first_column("Picks of every token")) == {one.name for one in listed if one.gives == "trace"}
    assert set(first_column("Counts alone")) == {one.name for one in listed if one.gives == "profile"}
    # Where the prompt's length is asked for, the format takes it.
    for one in listed:
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{one.name}` |"))
        assert "--prompt-len" not in row or "prompt_len" in one.takes, one.name


def test_names_in_files_are_those_of_the_registry() -> None:
    rows = [line for line in section("Names in the files").splitlines() if line.startswith("| `")]
    assert rows == [f"| `{one.name}` | {one.files} |" for one in formats().values()]
    printed = run("trace", "formats").out
    assert all(f"files: {one.files}" in printed for one in formats().values())


def test_every_defect_is_named() -> None:
    assert set(first_column("Defects")) == set(DEFECTS)


def test_every_preset_is_named() -> None:
    assert all(f"`{name}`" in section("Generate") for name in PRESETS)


def test_numbers_of_the_text() -> None:
    found = survey("tiny-mixtral-32l-mini")
    assert f"A sequence needs {found.min_decode} decode rows" in PLAIN
    assert found.drift is not None
    assert f"each {found.drift.rows} output tokens" in PLAIN


def test_equations_of_the_table() -> None:
    """Each equation, as the page states it, in plain loops over a recording."""
    import perfmodel

    trace = perfmodel.RoutingTrace.load("tiny-mixtral-32l-mini")
    found = survey(trace)
    skew, layer, experts, top_k = found.skew["all"], 5, trace.num_experts, trace.top_k
    counts = np.bincount(trace.topk_ids[:, layer].ravel(), minlength=experts).astype(float)
    pairs = sum(abs(a - b) for a in counts for b in counts)
    shares = counts / counts.sum()
    expected = {
        "top_half": sorted(counts)[experts // 2 :],
        "gini": pairs / (2 * experts * counts.sum()),
        "entropy": -(shares * np.log(shares)).sum() / np.log(experts),
    }
    expected["top_half"] = sum(expected["top_half"]) / counts.sum()
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(skew, name).layers.value[layer], value, rtol=1e-12, atol=0)
    chances, tokens, again, asked = 0.0, 0, 0, 0
    for s in range(trace.num_sequences):
        rows = trace.topk_ids[trace.decode_slice(s), layer].tolist()
        n = np.bincount(np.ravel(rows), minlength=experts)
        chances += len(rows) * (n * (n - 1)).sum() / (len(rows) * (len(rows) - 1) * top_k)
        tokens += len(rows)
        for before, now in zip(rows, rows[4:], strict=False):
            again += len(set(before) & set(now))
            asked += top_k
    reuse = found.reuse["decode"]
    np.testing.assert_allclose(reuse.chance.layers.value[layer], chances / tokens, rtol=1e-12, atol=0)
    np.testing.assert_allclose(reuse.measured.layers.value[layer, 2], again / asked, rtol=1e-12, atol=0)
    assert found.lags[2] == 4


def test_options_of_stats_are_on_the_page() -> None:
    help_text = run("trace", "stats", "--help").out
    for option in set(re.findall(r"--\w[\w-]*", help_text)) - {"--help", "--seed"}:
        assert option in TEXT, option
