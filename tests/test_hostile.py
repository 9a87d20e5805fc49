"""Files that were made to do harm are refused by every reader: soon, in little memory, in one line, and unread by
anything heavy. Readers run in a process of their own, where a marker tells if a payload was ever unpickled."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_files import (
    Sample,
    canonical,
    damaged,
    damaged_archive,
    generic,
    hostile_arrays,
    nearly_too_large,
    npy,
    npz,
    picks,
    samples,
    special,
    targeted,
)

from perfmodel.errors import TraceError
from perfmodel.routing import RoutingTrace
from perfmodel.routing.importers import formats, import_files
from perfmodel.routing.importers.base import ImportOptions

if not Path("/proc/self/clear_refs").exists():
    pytest.skip("peak memory can be told on Linux only", allow_module_level=True)

#: Processor time [s] and memory beyond the start of the interpreter and its libraries [byte].
SECONDS, BYTES = 1.0, 200 * 10**6
#: Readers beside those of the formats, and of files beside traces, whose packages import kernels.
OTHERS = ("auto", "RoutingTrace.load", "FrequencyProfile.load", "open_trace")
LOSSES = ("LossTable.load", "Calibration.load")
#: Readers that are shown documents near the limit, each of which takes them some time.
LARGE = ("auto", "vllm", "sglang-response")
Job = tuple[str, str, dict[str, Any]]


def answers(jobs: list[Job]) -> list[dict[str, Any]]:
    """What came of each job, in one new process."""
    worker = Path(__file__).with_name("hostile_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker)], input=json.dumps(jobs), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


class Asked:
    """What came of every file: by kind of damage and by reader."""

    def __init__(self, folder: Path) -> None:
        self.marker = folder / "unpickled"
        self.samples = samples(folder / "good")
        hostile = folder / "hostile"
        hostile.mkdir()
        for name, data in generic(self.marker):
            (hostile / name).write_bytes(data)
        for name, changes in hostile_arrays().items():
            (hostile / f"{name}.npz").write_bytes(npz(**canonical(**changes)))
        every = [str(path) for path in (*hostile.iterdir(), *special(folder).values())]
        jobs = [
            *((("auto", name), ("auto", str(one.paths[0]), one.options)) for name, one in self.samples.items()),
            *((("good", name), (name, str(one.paths[0]), one.options)) for name, one in self.samples.items()),
            *((("hostile", name), (name, path, one.options)) for name, one in self.samples.items() for path in every),
            *((("hostile", name), (name, path, {})) for name in OTHERS for path in every),
        ]
        for name, data in nearly_too_large():
            (folder / name).write_bytes(data)
            jobs += [(("large", reader), (reader, str(folder / name), {})) for reader in LARGE]
        for name, one in self.samples.items():
            jobs += [
                ((kind, name), (name, path, one.options)) for kind, path in _damaged(name, one, folder / "damaged")
            ]
        self.answers: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for (key, _), answer in zip(jobs, answers([job for _, job in jobs]), strict=True):
            self.answers.setdefault(key, []).append(answer)
        beside = answers([(name, path, {}) for name in LOSSES for path in every])
        self.answers |= {("hostile", name): [one for one in beside if one["reader"] == name] for name in LOSSES}


def _damaged(name: str, sample: Sample, folder: Path) -> Iterator[tuple[str, str]]:
    """Kind and path of damaged copies of a good file; of a folder each file is damaged in turn."""
    original = sample.paths[0]
    files = [original] if original.is_file() else sorted(original.iterdir())
    for path in files:
        data = path.read_bytes()
        changes = damaged_archive(data, 1) if path.suffix == ".npz" else damaged(data, 1)
        several = [("damaged", one) for _, one in changes] + [("targeted", one) for _, one in targeted(name, data)]
        for i, (kind, changed) in enumerate(several):
            place = folder / name / f"{path.stem}-{i}"
            place.mkdir(parents=True)
            for other in files:
                (place / other.name).write_bytes(changed if other == path else other.read_bytes())
            yield kind, str(place / path.name if original.is_file() else place)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return Asked(tmp_path_factory.mktemp("files"))


def complaints(answer: dict[str, Any], *, may_be_read: bool) -> list[str]:
    """What is wrong with how a file was treated."""
    wrong = []
    if answer["outcome"] == "read":
        wrong += [] if may_be_read else ["was read"]
    elif answer["outcome"] != "TraceError":
        wrong.append(f"raised {answer['outcome']}")
    else:
        message = answer["message"]
        if not message.isprintable() or len(message) > 2000:
            wrong.append(f"message is not one short line: {message[:200]!r}")
        if " ".join(Path(answer["path"]).name.split())[:20] not in message:
            wrong.append(f"message does not name the file: {message}")
    if answer["seconds"] > SECONDS:
        wrong.append(f"took {answer['seconds']:.2f} s")
    if answer["bytes"] > BYTES:
        wrong.append(f"took {answer['bytes'] / 1e6:.0f} MB")
    if answer["heavy"]:
        wrong.append(f"imported {answer['heavy']}")
    return [f"{answer['reader']} of {Path(answer['path']).name!r}: {one} ({answer['message'][:200]})" for one in wrong]


def test_every_format_has_a_good_file(asked: Asked) -> None:
    """What is damaged below is good before, so that refusals are of the damage."""
    assert set(asked.samples) == set(formats())
    read = [asked.answers["good", name][0] for name in asked.samples]
    assert [one for one in read if one["outcome"] != "read" or one["heavy"]] == []


@pytest.mark.parametrize("name", [*formats(), *OTHERS, *LOSSES])
def test_hostile_files_are_refused(asked: Asked, name: str) -> None:
    found = asked.answers["hostile", name]
    assert [text for one in found for text in complaints(one, may_be_read=False)] == []
    assert not asked.marker.exists()


@pytest.mark.parametrize("name", LARGE)
def test_documents_near_the_limit_are_refused(asked: Asked, name: str) -> None:
    found = asked.answers["large", name]
    assert [text for one in found for text in complaints(one, may_be_read=False)] == []
    assert all("of JSON, which take up to" not in one["message"] for one in found)


@pytest.mark.parametrize("name", [*formats()])
def test_damaged_files_are_read_or_refused(asked: Asked, name: str) -> None:
    found = asked.answers["damaged", name]
    assert [text for one in found for text in complaints(one, may_be_read=True)] == []
    # Damage that no reader notices would make this test worthless.
    assert sum(one["outcome"] == "TraceError" for one in found) > len(found) / 4


@pytest.mark.parametrize("name", sorted(set(formats()) - {"canonical", "tensorrt-llm"}))
def test_bad_numbers_are_refused(asked: Asked, name: str) -> None:
    found = asked.answers["targeted", name]
    assert [text for one in found for text in complaints(one, may_be_read=False)] == []


@pytest.mark.parametrize("name", [*formats()])
def test_auto_knows_the_good_file_or_says_which_formats_it_may_be(asked: Asked, name: str) -> None:
    (found,) = asked.answers["auto", name]
    if found["outcome"] != "read":
        assert found["outcome"] == "TraceError"
        assert f"{name} (" in found["message"] or f"looks like {name}, but" in found["message"]


def test_the_header_says_the_byte_order(tmp_path: Path) -> None:
    """Arrays of the other byte order are no damage: nothing has to be guessed."""
    turned = {
        name: np.asarray(one).astype(np.asarray(one).dtype.newbyteorder(">")) for name, one in canonical().items()
    }
    (tmp_path / "big.npz").write_bytes(npz(**{**turned, "topk_ids": picks().astype(">u2")}))
    (tmp_path / "little.npz").write_bytes(npz(**canonical()))
    big, little = (RoutingTrace.load(tmp_path / f"{order}.npz") for order in ("big", "little"))
    assert big.content_hash() == little.content_hash()


def test_arrays_of_picks_in_the_other_byte_order(tmp_path: Path) -> None:
    said = ImportOptions(prompt_len=(5,), num_experts=6, model="toy")
    for order in "<>":
        (tmp_path / "ids.npy").write_bytes(npy(picks().astype(f"{order}i4")))
        trace = import_files("vllm", [tmp_path / "ids.npy"], said).result
        assert isinstance(trace, RoutingTrace)
        np.testing.assert_array_equal(trace.topk_ids, picks())


def test_recordings_that_pack_well_are_no_bombs_and_bombs_may_be_stored(tmp_path: Path) -> None:
    """A router that hardly ever leaves its first expert packs a hundred to one."""
    ids = np.zeros((1_200_000, 8, 1), np.int64)
    ids[::50, 0, 0] = np.random.default_rng(1).integers(6, size=len(ids[::50]))

    def arrays(tokens: int) -> dict[str, Any]:
        return canonical(
            topk_ids=ids[:tokens],
            topk_weights=np.ones((tokens, 8, 1), np.float16),
            sequence_offsets=np.array([0, tokens]),
            prompt_len=np.array([10]),
            layer_index=np.arange(8),
        )

    np.savez_compressed(tmp_path / "packed.npz", **arrays(500_000))
    assert RoutingTrace.load(tmp_path / "packed.npz").num_tokens == 500_000
    assert (tmp_path / "packed.npz").stat().st_size * 100 < ids[:500_000].nbytes
    np.savez_compressed(tmp_path / "bomb.npz", **arrays(1_200_000))
    with pytest.raises(TraceError, match=r"would expand to .*; store such arrays uncompressed"):
        RoutingTrace.load(tmp_path / "bomb.npz")
    np.savez(tmp_path / "stored.npz", **arrays(1_200_000))
    assert RoutingTrace.load(tmp_path / "stored.npz").num_tokens == 1_200_000


def test_commands_refuse_hostile_files_before_anything_heavy_is_there(asked: Asked, tmp_path: Path) -> None:
    """Exit code 2 and one line, for a command that imports and for those that take a trace; nothing is written."""
    folder, out = asked.marker.parent / "hostile", tmp_path / "out.npz"
    commands = [
        *(
            ["trace", "import", "auto", str(folder / name), "-o", str(out)]
            for name in ("deep.json", "payload.pt", "bomb.npz")
        ),
        ["trace", "import", "vllm", str(folder / "shape.npy"), "-o", str(out), "--prompt-len", "3"],
        ["trace", "check", str(folder / "bomb.npz"), "--mend", "looping", "-o", str(out)],
        ["trace", "stats", str(folder / "lying-bomb.npz")],
    ]
    code = "import sys; from perfmodel.cli import main; {}; print([m for m in {} if m in sys.modules])"
    calls = "; ".join(f"assert main({one}) == 2" for one in commands)
    done = subprocess.run(
        [sys.executable, "-c", code.format(calls, ("numba", "torch", "scipy", "pandas"))],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "[]\n", done.stderr
    assert len(done.stderr.splitlines()) == len(commands)
    assert not out.exists()
