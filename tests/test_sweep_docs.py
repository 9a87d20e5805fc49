"""docs/sweeps.md is true: its commands run in order, its tables are those of the code, its numbers are computed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from commands import run

import perfmodel
from perfmodel.evaluation import METRICS
from perfmodel.hardware.system import PARTS
from perfmodel.plots import KINDS
from perfmodel.sweeps.files import KEYS
from perfmodel.sweeps.outputs import SUFFIXES

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
PLAIN = " ".join(TEXT.split())
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


class Block(NamedTuple):
    """A block of the page: its language and its lines."""

    language: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """The words of every command."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


BLOCKS = [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The page carried out from top to bottom: the folder it leaves, and what every command printed."""
    folder = tmp_path_factory.mktemp("page")
    printed = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in BLOCKS:
            if block.language == "toml":
                (name,) = re.findall(r"^# (\S+\.toml)$", block.text, flags=re.MULTILINE)
                Path(name).write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                exec(compile(block.text, "docs/sweeps.md", "exec"), {"__name__": "page"})
            elif block.language == "sh":
                for program, *arguments in block.commands:
                    assert program == "perfmodel"
                    line = shlex.join(arguments)
                    if "--dask" in arguments:  # its worker processes need a main program of their own
                        done = subprocess.run(
                            [sys.executable, "-m", "perfmodel", *arguments], capture_output=True, text=True, check=False
                        )
                        assert done.returncode == 0, f"{line}\n{done.stderr}"
                        continue
                    answer = run(*arguments)
                    assert answer.code == 0, f"{line}\n{answer.err}"
                    printed[line] = answer.out
    return folder, printed


def test_every_command_runs(ran: tuple[Path, dict[str, str]]) -> None:
    folder, printed = ran
    assert len(printed) > 20
    for words in (words for block in BLOCKS if block.language == "sh" for words in block.commands):
        if "-o" in words:
            assert (folder / words[words.index("-o") + 1]).exists()
    assert {words[1] for block in BLOCKS if block.language == "sh" for words in block.commands} == {
        "sweep", "plot", "best", "pareto", "sensitivity", "break-even", "solve",
    }  # fmt: skip


def test_the_output_shown_is_what_is_printed(ran: tuple[Path, dict[str, str]]) -> None:
    (block,) = (block for block in BLOCKS if block.language == "text")
    first = next(iter(ran[1].values()))
    assert first.startswith(block.text.rstrip())


def test_languages_of_the_blocks() -> None:
    """A block of another language would not be carried out."""
    assert {block.language for block in BLOCKS} == {"sh", "toml", "python", "text"}
    assert TEXT.count("```") == 2 * len(BLOCKS)


def test_metrics_and_kinds_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (lower|higher) \| (.*) \|$", TEXT, flags=re.MULTILINE)
    assert rows == [(one.name, one.unit, one.better, one.meaning) for one in METRICS.values()]
    kinds = re.findall(r"^\| `([\w-]+)` \| ([^|]*) \|$", TEXT, flags=re.MULTILINE)
    assert dict(kinds) == {name: kind.text for name, kind in KINDS.items()}
    assert re.findall(r"^\| `(\.\w+)` \|", TEXT, flags=re.MULTILINE) == list(SUFFIXES)
    for key in KEYS:
        assert re.search(rf"^{key} = |`{key}`|^\[{key}\]|`\[{key}\]`", TEXT, flags=re.MULTILINE), key


def test_axes_exist() -> None:
    scenario = perfmodel.Scenario.of(policy=["monde", "hobbit", "context-aware"])
    for name in re.findall(r"`((?:gpu|link|ndp|cpu|policy|workload)\.[\w.]+)`", TEXT):
        assert scenario.axis(name).name == name


def test_axes_of_every_part_are_listed() -> None:
    (cell,) = re.findall(r"^\| (`gpu\.…`.*?) \|", TEXT, flags=re.MULTILINE)
    assert re.findall(r"`(\w+)\.…`", cell) == list(PARTS)


def test_solutions() -> None:
    """What the text says of the answers to its own questions."""
    monde = perfmodel.solve(perfmodel.Scenario.of(policy="monde"), "link.bandwidth_gb_per_s", "tpot_ms=100")
    ours = perfmodel.solve(perfmodel.Scenario.of(policy="context-aware"), "ndp.arrays", "tok_per_s=50")
    assert f"MoNDE needs a link of {monde.value:.0f} GB/s for 100 ms a token" in PLAIN
    assert f"MoNDE would need a link of {monde.value:.0f} GB/s for 100 ms a token" in README
    assert f"the context-aware system needs {ours.value:.0f} arrays for 50 tok/s" in PLAIN
    cxl = perfmodel.load_system("h100-cxl2-ndp").link.bandwidth_gb_per_s
    assert 1.8 < monde.value / cxl < 2.3  # about twice


def test_break_even_in_the_readme() -> None:
    """The line of its figure lies at about a fifth of the link's bandwidth, for the better HOBBIT at about half."""
    links = [16, 59, 450]
    for other, share, words in (
        ("hobbit", 0.2, "at about a fifth of the link's bandwidth"),
        ("hobbit:cache_high=4,prefetch_accuracy=0.96", 0.5, "moves the line to about half"),
    ):
        scenario = perfmodel.Scenario.of(policy=["context-aware:mean_bits=3", other], prompt=128, output=512)
        span = ("ndp.dram_bandwidth_gb_per_s", 1, 1000)
        line = perfmodel.break_even(scenario, span, along=("link.bandwidth_gb_per_s", links))["break_even"]
        np.testing.assert_allclose(line.values[:, 0] / links, share, rtol=0.15, atol=0)
        assert words in README
