"""docs/engines.md is true: its generated parts are those of today, its commands run, and its numbers hold."""

import re
import shlex
from pathlib import Path

import pytest
from commands import run
from engines_page import GPUS, PAGE, TABLES, dense_share, expert_share, on, profiles, written

from perfmodel.hardware import EngineSpec
from perfmodel.hardware.engine import REPLACED

TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_the_generated_parts_are_those_of_today() -> None:
    assert written(TEXT) == TEXT, "write them anew by `python tests/engines_page.py`"


def test_every_key_is_in_a_table_and_in_an_equation() -> None:
    keys = [key for names in TABLES.values() for key in names]
    assert sorted(keys) == sorted(set(EngineSpec.model_fields) - {"kind", "name", "description", "sources"})
    equations = TEXT.partition("## Equations")[2].partition("## The bundled profiles")[0]
    words = ("experts", "copies", "cpu_units")  # told by their values
    assert [key for key in keys if key not in words and f"`{key}" not in equations and f"{key}`" not in equations] == []
    for key in REPLACED:
        assert f"`{key}`" in TEXT


def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {language for language, _ in BLOCKS} == {"toml", "sh"}
    for language, text in BLOCKS:
        if language == "toml":
            (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    for language, text in BLOCKS:
        for line in text.splitlines() if language == "sh" else ():
            program, *arguments = shlex.split(line)
            assert program == "perfmodel"
            answer = run(*arguments)
            assert answer.code == 0, f"{line}\n{answer.err}{answer.out}"


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("engine", ["llama-cpp-cuda", "vllm"])
def test_small_kernels_reach_less_of_the_bandwidth_than_large_ones(gpu: str, engine: str) -> None:
    system = on(gpu, engine)
    assert 0.21 < expert_share(system) < 0.45
    assert dense_share(system, 5120, 5120) > 0.5
    for cols in (8192, 25600):
        assert 0.55 < dense_share(system, 5120, cols) < 0.8


def test_the_profiles_that_are_told_apart_are_there() -> None:
    assert {"ideal", "ndp-simulator", "gpu-offloading", "llama-cpp-expert-cache"} <= set(profiles())
