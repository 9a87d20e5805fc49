"""docs/policies.md is true: its blocks run, its tables and defaults are those of the code, its numbers are computed."""

import dataclasses
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from commands import run
from strategies import NDP_SYSTEM, mixtral, recording
from test_policies_adaptive import KNOWN, WINDOWS, joined, switching, synthetic, token_s, windows
from test_policies_cached import stored_at

from perfmodel.hardware import list_specs, load_system
from perfmodel.model import MoEModel
from perfmodel.policies import POLICIES, parse_policy
from perfmodel.policies.base import CAPACITY_KEYS, SPLIT_KEYS
from perfmodel.policies.costs import COST_KEYS
from perfmodel.routing import RoutingTrace
from perfmodel.routing.synthetic import MIXTRAL_SKEW, generate
from perfmodel.run import plan_run

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
PLAIN = " ".join(TEXT.split())
CODE = re.compile(r"`([^`]+)`")
SERVER = load_system("h100-pcie5-cpu")


def rows(header: str) -> list[list[str]]:
    """Cells of the table whose header starts like this, without the header."""
    (table,) = re.findall(rf"^\| {re.escape(header)}.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, flags=re.MULTILINE)
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]


def section(name: str) -> str:
    """Text below a policy's heading."""
    (found,) = re.findall(rf"^### {name}\n(.*?)(?=^##|\Z)", TEXT, flags=re.MULTILINE | re.DOTALL)
    return found


def names(cell: str) -> list[str]:
    """Policies that a cell names, once each."""
    return list(dict.fromkeys(code for code in CODE.findall(cell) if code in POLICIES))


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert [language for language, _ in blocks] == ["sh", "python"]
    assert TEXT.count("```") == 2 * len(blocks)
    for line in blocks[0][1].splitlines():
        program, *arguments = shlex.split(line)
        assert program == "perfmodel"
        answer = run(*arguments)
        assert answer.code == 0, f"{line}\n{answer.err}{answer.out}"
    exec(compile(blocks[1][1], "docs/policies.md", "exec"), {"__name__": "page"})


# --- every policy and option, and no other ---


def test_every_policy_has_its_row_and_its_section() -> None:
    listed = [names(row[0]) for row in rows("policy | experts live")]
    assert [len(one) for one in listed] == [1] * len(POLICIES)
    assert {one[0] for one in listed} == set(POLICIES)
    assert {len(row) for row in rows("policy | experts live")} == {7}
    headings = re.findall(r"^### (.+)$", TEXT, flags=re.MULTILINE)
    assert len(headings) == len(POLICIES)
    assert set(headings) == set(POLICIES)


@pytest.mark.parametrize("name", POLICIES)
def test_every_option_is_named_with_its_default(name: str) -> None:
    """A section starts with the policy's defaults spelled out, and says its rule and source."""
    first = section(name).strip().splitlines()[0]
    assert first == f"`{parse_policy(name).spec}`"
    for part in ("- **Rule.**", "- **Source.**"):
        assert part in section(name)
    number = re.search(r"\d{4}\.\d{5}", POLICIES[name].source)
    assert number is None or number[0] in section(name)


def test_what_the_page_names_exists() -> None:
    """Policies with options are some, option=value in a section is one of its options, names are policies or values."""
    kinds = POLICIES.values()
    known = {*POLICIES, *(word for kind in kinds for one in kind.options() for word in one.allowed.split(" | "))}
    known |= {entry.name for entry in list_specs()}
    prose = CODE.findall(re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
    for code in prose:
        assert not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", code) or code in known, code
        if re.fullmatch(r"[a-z-]+:[\w=.@/,-]+", code):
            parse_policy(code)
    for name, kind in POLICIES.items():
        options = {one.name for one in kind.options()}
        _, *codes = CODE.findall(section(name))
        for code in codes:
            for option, value in re.findall(r"(?:^|,)(\w+)=([\w.]+)", code):
                assert option in options, (name, code)
                if not value.isupper():  # N and FILE stand for any
                    parse_policy(f"{name}:{_with_needs(option, value)}")


def _with_needs(option: str, value: str) -> str:
    """An option with those that it cannot do without."""
    return f"{option}={value}" + (",slots=0,predicted=0" if (option, value) == ("load", "layers") else "")


# --- what the tables say of the rules ---


def test_policies_that_capacity_changes() -> None:
    stated: dict[str, set[str]] = {}
    for cell, options in rows("policy | at capacity"):
        for name in names(cell):
            stated[name] = {code.partition("=")[0] for code in CODE.findall(options)}
    model = mixtral()
    for name in POLICIES:
        rule = parse_policy(name)
        filled = rule.at_capacity(model, 5)
        changed = {f.name for f in dataclasses.fields(rule) if getattr(rule, f.name) != getattr(filled, f.name)}
        # A cache of none stays one of none.
        assert changed == stated.get(name, set()) - {"cache_low"}, name


def test_round_trips() -> None:
    variants = {
        "`llama-cpp` with a cache": "llama-cpp:cache=lru,n_cpu_moe=20",
        "`ktransformers` with": "ktransformers:round_trips=cpu",
    }
    stated: dict[str, str] = {}
    for kind, (where, cell) in zip(("layer", "cpu", "none"), rows("round trips | policies"), strict=True):
        assert where
        for part in re.split("[,;] ", cell):
            text = next((text for words, text in variants.items() if part.startswith(words)), names(part)[0])
            stated[text] = kind
    assert set(stated) == set(POLICIES) | set(variants.values())
    for text, kind in stated.items():
        system = NDP_SYSTEM if parse_policy(text).needs_ndp else SERVER
        assert plan_run(stored_at(4), system, recording(), text).plan.round_trips == kind, text


def test_keys_of_the_system() -> None:
    costs, prefills, splits, others = rows("policies | keys of the system")
    assert others[0] == "all others"
    always, cached, split = names(costs[0]), names(prefills[0]), names(splits[0])
    assert set(CODE.findall(costs[1])) == set(COST_KEYS) - set(CAPACITY_KEYS)
    for name in POLICIES:
        found = set(parse_policy(name).plan_keys)
        assert found == set(COST_KEYS if name in always else CAPACITY_KEYS), name
        if name in cached:
            for mode in ("each", "faster"):
                assert set(parse_policy(f"{name}:prefill={mode}").plan_keys) == set(COST_KEYS)
        if name in split:
            assert set(parse_policy(f"{name}:prefill=balanced").plan_keys) == {*CAPACITY_KEYS, *SPLIT_KEYS}
    assert set(parse_policy("fiddler:costs=published").plan_keys) == set(CAPACITY_KEYS)
    assert set(parse_policy("monde:reading=balance").plan_keys) == {*CAPACITY_KEYS, *SPLIT_KEYS}
    # Nobody else has such an option.
    for name in set(POLICIES) - {*always, *cached, *split}:
        allowed = next((one.allowed for one in POLICIES[name].options() if one.name == "prefill"), "")
        assert not {"each", "faster", "balanced"} & set(allowed.split(" | ")), name


# --- numbers ---


def test_the_readme_shows_what_is_printed() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    part = readme.split("\n## Copy or compute\n")[1].split("\n## ")[0]
    command, text = re.findall(r"^```(?:sh|text)\n(.*?)^```$", part, flags=re.MULTILINE | re.DOTALL)
    printed = run(*shlex.split(command)[1:]).out.splitlines()
    at = 0
    for line in text.splitlines():
        if line != "...":
            at = printed.index(line, at) + 1


def test_the_readme_lists_every_policy() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    part = readme.split("\n## Compare policies")[1].split("\n## ")[0]
    listed = [name for line in part.splitlines() if line.startswith("| ") for name in CODE.findall(line)]
    assert sorted(listed) == sorted(POLICIES)


def shown(values: list[float], decimals: int = 2) -> list[str]:
    return [f"{value:.{decimals}f}" for value in values]


def test_adapting() -> None:
    traces = [
        switching(11, 512, 512),
        switching(12, 512, 512),
        switching(11, 200, 300),
        switching(11, 200, 128),
        joined(recording(), [(5, 1), (2, 1), (1, 5), (0, 1)]),
    ]
    for trace, (_, *cells) in zip(traces, rows("trace with a change of topic"), strict=True):
        fixed, adaptive = (token_s(trace, f"{name}:selector=full") for name in ("context-aware", "adaptive"))
        known = [token_s(windows(trace, window), KNOWN) for window in WINDOWS]
        shares = [f"{100 * (fixed - adaptive) / (fixed - one):.0f}" for one in known]
        assert cells == [*shown([1e3 * one for one in (fixed, *known, adaptive)]), *shares]
    ratios = {
        bits: [
            token_s(trace, f"adaptive:{bits}") / token_s(trace, f"context-aware:{bits}")
            for trace in (recording(), synthetic(11), synthetic(12))
        ]
        for bits in ("selector=full", "mean_bits=3")
    }
    full, few = ratios["selector=full"], ratios["mean_bits=3"]
    assert f"it takes {min(full):.2f} to {max(full):.2f} of the time of the fixed placement" in PLAIN
    assert set(shown(few, 3)) == {"1.000"}
    assert "and at 3 bits 1.000:" in PLAIN


# --- copies beside computing ---


def _longer(model: MoEModel, system: str, trace: RoutingTrace, policy: str) -> float:
    """How much longer a token takes with all copies before computing [%]."""
    before, pipelined = (
        plan_run(model, load_system(system), trace, f"{policy},fetch={fetch}").price().tpot_mean_s
        for fetch in ("before", "pipelined")
    )
    return 100 * (before / pipelined - 1)


def _ranges() -> list[list[int]]:
    """Percentages that the page states of copies before computing: two ranges and an upper end."""
    (said,) = re.findall(r"\*\*Copies beside computing\.\*\* (.*?) \*\*Belady", PLAIN)
    return [[int(end) for end in re.findall(r"\d+", one)] for one in re.findall(r"\d+ to \d+ %|up to \d+ %", said)]


def test_copies_before_computing_with_mixtral() -> None:
    model = stored_at(4.5)
    found = [
        _longer(model, system, recording(), f"expert-cache:slots={slots}")
        for system in ("rtx4090-pcie4-cpu", "h100-pcie5-cpu")
        for slots in (0, 2, 4, 6)
    ]
    assert np.rint([min(found), max(found)]).tolist() == _ranges()[0]
    for misses in ("expert-cache:misses=cpu,slots=4", "expert-cache:misses=cpu,slots=0"):
        assert _longer(model, "rtx4090-pcie4-cpu", recording(), misses) == 0


def test_copies_before_computing_with_many_small_experts(shared: Path) -> None:
    model = MoEModel.from_config(shared / "configs" / "Qwen__Qwen3-30B-A3B")
    model = dataclasses.replace(model, storage=model.storage.override("expert=q4_k"))
    trace = generate(2, 32, 128, 48, 128, 8, seed=3, **MIXTRAL_SKEW._asdict())
    found = [
        _longer(model, system, trace, f"expert-cache:slots={slots}")
        for system in ("rtx4090-pcie4-cpu", "h100-pcie5-cpu")
        for slots in (0, 16, 32, 64)
    ]
    _, small, (most,) = _ranges()
    assert np.rint([min(found), max(found)]).tolist() == small
    assert round(_longer(model, "rtx5070-7950x", trace, "expert-cache:slots=16")) == most
