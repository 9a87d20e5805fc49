"""A system: the GPU, the link, the near-data device or CPU behind it, and what the host costs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SkipValidation, field_validator

from perfmodel.errors import SpecError
from perfmodel.hardware.base import (
    SOURCE_KINDS,
    Choice,
    Constant,
    Frozen,
    Limits,
    Name,
    Source,
    SourceKind,
    Sources,
    Spec,
    Strict,
    clean_value,
    flatten,
    shown,
    suggestion,
)
from perfmodel.hardware.devices import DramSpec, GpuSpec, LinkSpec, NdpSpec
from perfmodel.hardware.engine import REPLACED, EngineSpec, idle
from perfmodel.hardware.files import (
    DEVICES,
    KINDS,
    build,
    check_kind,
    find,
    is_path,
    load_device,
    path_text,
    read_toml,
    resolve,
)
from perfmodel.hardware.host import CpuSpec, HostSpec
from perfmodel.paths import replace_when_done

#: Text that stands for no engine.
NO_ENGINE = "none"

PARTS: dict[str, type[Spec]] = {
    "gpu": GpuSpec,
    "link": LinkSpec,
    "ndp": NdpSpec,
    "cpu": CpuSpec,
    "host": HostSpec,
    "engine": EngineSpec,
}

_NO_COST = (
    "latency_us",
    "n_half_kb",
    "memory_n_half_kb",
    "launch_overhead_us",
    "layer_overhead_us",
    "expert_overhead_us",
    "round_trip_us",
    "copy_overhead_us",
)
_NO_LOSS = ("efficiency", "replicated_scaling", "interleaved_scaling")
_FITTED: tuple[SourceKind, ...] = ("calibrated", "measured")


def _is_peak(key: str) -> bool:
    leaf = key.partition(".")[2]
    # What one thread reads is measured, whatever the memory could do.
    rate = leaf.endswith("bandwidth_gb_per_s") and leaf != "thread_bandwidth_gb_per_s"
    return rate or leaf == "vector_tflop_per_s" or leaf.startswith("peak_tflop_per_s.")


class StatedPeak(Strict):
    """A peak as the part's own file states it, kept when an override replaces it."""

    value: float
    source: Source


class System(Strict):
    """GPU, link, and what holds the experts: a near-data device, a CPU, or (with neither) host memory alone.

    Without ``host`` its round trips and copies cost nothing, and all of its memory may be pinned. An ``engine`` says
    what software reaches of the devices, in place of what they state themselves.
    Values are addressed by dotted keys in the units of the spec files, such as ``"gpu.memory_efficiency"``.
    """

    kind: ClassVar[Literal["system"]] = "system"

    name: Name
    description: str
    gpu: GpuSpec
    link: LinkSpec
    ndp: NdpSpec | None = None
    cpu: CpuSpec | None = None
    host: HostSpec | None = None
    engine: EngineSpec | None = None
    stated_peaks: Annotated[dict[str, StatedPeak], Frozen] = Field(default_factory=dict)

    def _parts(self) -> Iterator[tuple[str, Spec]]:
        for part in PARTS:
            spec = getattr(self, part)
            if spec is not None:
                yield part, spec

    def _locate(self, key: object) -> tuple[str, Spec, str]:
        """Part, its spec, and the key inside it; `SpecError` when the system has no such part or key."""
        part, _, inner = key.partition(".") if isinstance(key, str) else ("", "", "")
        spec = getattr(self, part, None) if part in PARTS else None
        if isinstance(spec, Spec) and inner:
            return part, spec, inner
        if part in PARTS and spec is None:
            raise SpecError(f"system {self.name!r} has no {part}, so key {shown(key)} does not exist")
        keys = [f"{part}.{inner}" for part, spec in self._parts() for inner in spec.settable_keys()]
        close = suggestion(key, keys) if isinstance(key, str) else ""
        allowed = ", ".join(f"{part}.*" for part, _ in self._parts())
        raise SpecError(f"system {self.name!r} has no key {shown(key)}{close}; allowed: {allowed}")

    def numeric_keys(self) -> tuple[str, ...]:
        """Dotted keys of all numbers that count: all but those that the engine replaces."""
        every = (f"{part}.{key}" for part, spec in self._parts() for key in spec.numeric_keys())
        return tuple(key for key in every if self.replaced_by(key) is None)

    def get(self, key: str) -> float:
        """Number at a dotted key, in the unit of the spec file; `SpecError` for any other key."""
        _, spec, inner = self._locate(key)
        found = dict(spec.items()).get(inner)
        if isinstance(found, (int, float)):
            return float(found)
        if isinstance(spec, NdpSpec) and inner == "dram_efficiency":
            raise SpecError(f"system {self.name!r}: {key} is not given; it follows from ndp.dram and ndp.mapping")
        if inner in spec.settable_keys():
            state = "is not given" if found is None else f"is the word {found!r}, not a number"
            raise SpecError(f"system {self.name!r}: {key} {state}")
        raise SpecError(f"system {self.name!r}: {spec.no_such_key(inner)}")

    def limits_of(self, key: str) -> Limits:
        """Allowed range of the number at a dotted key; `SpecError` for a key that holds no number."""
        _, spec, inner = self._locate(key)
        try:
            return spec.limits_of(inner)
        except SpecError as error:
            raise SpecError(f"system {self.name!r}: {error}") from None

    def source_of(self, key: str) -> Source:
        """Source of the number at a dotted key; `SpecError` when there is no such number."""
        self.get(key)
        _, spec, inner = self._locate(key)
        return spec.source_of(inner)

    def constants(self) -> tuple[Constant, ...]:
        """Every number that counts, with unit, source and citation: all but those that the engine replaces."""
        return tuple(
            constant._replace(key=f"{part}.{constant.key}")
            for part, spec in self._parts()
            for constant in spec.constants()
            if self.replaced_by(f"{part}.{constant.key}") is None
        )

    def choices(self) -> tuple[Choice, ...]:
        """The names of the parts, and every word in them (such as ``ndp.dataflow``), with sources where given."""
        names = [Choice(part, spec.name, "", "") for part, spec in self._parts()]
        inner = [
            choice._replace(key=f"{part}.{choice.key}") for part, spec in self._parts() for choice in spec.choices()
        ]
        return (*names, *inner)

    def weakest_source(self, keys: Iterable[str] | None = None) -> SourceKind:
        """Weakest kind of source (see `SOURCE_KINDS`) among ``keys``, by default among all numbers."""
        if keys is None:
            found = [constant.source for constant in self.constants()]
        else:
            found = [self.source_of(key).source for key in keys]
        return max(found, key=SOURCE_KINDS.index, default=SOURCE_KINDS[0])

    @property
    def flags(self) -> tuple[str, ...]:
        """Sentences about values above what the part's own file states as its peak, and about harmful settings."""
        above = (
            f"{key} {self.get(key):g} is above the stated peak {peak.value:g} of "
            f"{self._locate(key)[1].name} ({self.source_of(key).source})"
            for key, peak in self.stated_peaks.items()
            if self.get(key) > peak.value
        )
        return (*above, *(() if self.cpu is None else self.cpu.warnings))

    def content_hash(self) -> str:
        """SHA-256 over all numbers and choices: equal hashes mean equal predictions.

        Names, descriptions and sources do not count.
        """
        content = {part: dict(spec.items()) for part, spec in self._parts()}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def with_values(
        self,
        values: Mapping[str, float | str],
        *,
        source: SourceKind = "assumed",
        citation: str = "set by the caller",
    ) -> System:
        """Validated copy with other values at dotted keys, all from one source.

        A peak may be set above what its spec states, within the plausible range; `flags` then says so.
        Setting ``ndp.dram_efficiency`` on a device with a derived bandwidth switches to the given efficiency.
        Raises `SpecError` for an unknown key (with close matches), a value that is not allowed, or an unknown
        ``source``.
        """
        if not isinstance(values, Mapping):
            raise SpecError(f"values to set are {shown(values)}; allowed: a table of dotted keys")
        origin = Source(source=source, citation=citation)
        return self._with(values, dict.fromkeys(values, origin))

    def _with(self, values: Mapping[str, Any], sources: Mapping[str, Source], folder: Path | None = None) -> System:
        by_part: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            part, _, inner = self._locate(key)
            self._refuse_replaced(key)
            whole_dram = (part, inner) == ("ndp", "dram")
            new = load_device(value, DramSpec, folder) if whole_dram else clean_value(key, value)
            by_part.setdefault(part, {})[inner] = new
        stated = dict(self.stated_peaks)
        now = {key: number for key, number in self._numbers() if _is_peak(key)}
        for key in values:
            if key in now and key not in stated:
                stated[key] = StatedPeak(value=now[key], source=self.source_of(key))
        changed = {
            part: getattr(self, part).with_values(new, {key: sources[f"{part}.{key}"] for key in new})
            for part, new in by_part.items()
        }
        return self._copy(**changed, stated_peaks=stated)

    def replaced_by(self, key: str) -> str | None:
        """The key of the engine that counts instead of ``key``, or ``None`` where ``key`` itself counts."""
        other = REPLACED.get(key)
        if self.engine is None or other is None:
            return None
        if key.startswith("cpu.") and self.cpu is not None and self.cpu.rates == "reached":
            return None
        # Without a value of its own the engine leaves it to the system.
        return None if getattr(self.engine, other.partition(".")[2]) is None else other

    def idle(self, key: str, varied: Container[str] | None = ()) -> str | None:
        """Why another value at ``key`` can change nothing here, or ``None``; see `perfmodel.hardware.engine.idle`."""
        return idle(self, key, varied)

    def check_set(self, keys: Iterable[str]) -> None:
        """Refuse keys that were set and that can change nothing here: `SpecError` with the reason."""
        for key in keys:
            reason = self.idle(key)
            if reason is not None:
                raise SpecError(f"system {self.name!r}: {key} {reason}")

    def _refuse_replaced(self, key: str) -> None:
        other = self.replaced_by(key)
        if other is not None and self.engine is not None:
            raise SpecError(f"system {self.name!r}: engine {self.engine.name} replaces {key}; set {other} instead")

    def with_engine(self, engine: str | os.PathLike[str] | EngineSpec | None) -> System:
        """The system under an inference engine: a bundled name, a file, or the spec itself.

        ``"none"``, as everywhere where an engine is chosen, and ``None`` take its own away.
        """
        if engine is None or (isinstance(engine, str) and engine == NO_ENGINE):
            return self._copy(engine=None)
        return self._copy(engine=engine if isinstance(engine, EngineSpec) else load_device(engine, EngineSpec))

    def _numbers(self) -> Iterator[tuple[str, float]]:
        for part, spec in self._parts():
            for key, value in spec.items():
                if not isinstance(value, str):
                    yield f"{part}.{key}", float(value)

    def _copy(self, **changed: Any) -> System:
        return System(**{**{key: getattr(self, key) for key in System.model_fields}, **changed})

    def at_peak(self) -> System:
        """The datasheet column: every efficiency 1, no latency, no fixed cost, no small-transfer penalty.

        Calibrated or measured peaks go back to what the parts' own files state; what-if peaks stay.
        """
        restored = {key: peak for key, peak in self.stated_peaks.items() if self.source_of(key).source in _FITTED}
        bare = self if self.engine is None else self._copy(engine=None)
        back = bare._with(
            {key: peak.value for key, peak in restored.items()},
            {key: peak.source for key, peak in restored.items()},
        )
        if back.cpu is not None:
            back = back._copy(cpu=back.cpu.without_packing())
        ideal = {key: 1.0 for key in back.numeric_keys() if key.endswith(_NO_LOSS)}
        ideal |= {key: 0.0 for key in back.numeric_keys() if key.partition(".")[2] in _NO_COST}
        if back.ndp is not None:
            ideal["ndp.dram_efficiency"] = 1.0
        return back.with_values(ideal, source="derived", citation="datasheet column: no derate and no fixed cost")


class _SystemFile(Strict):
    """A system file: parts by name, path or inline table, or a base system; and overrides with sources.

    Parts beside a base replace those of the base, or add to them; overrides come last.
    """

    kind: Literal["system"] = "system"
    name: Name
    description: str = Field(max_length=2000, description="what this is, in a sentence")
    base: str | None = Field(None, description="system to start from; parts beside it replace its own")
    # Parts may be names, paths or tables; the loader builds them and reports their errors itself.
    gpu: SkipValidation[str | GpuSpec | None] = Field(None, description="GPU: name, .toml file or table")
    link: SkipValidation[str | LinkSpec | None] = Field(None, description="link: name, .toml file or table")
    ndp: SkipValidation[str | NdpSpec | None] = Field(None, description="near-data device, same forms")
    cpu: SkipValidation[str | CpuSpec | None] = Field(None, description="CPU, same forms")
    host: SkipValidation[str | HostSpec | None] = Field(None, description="costs of the host, same forms")
    engine: SkipValidation[str | EngineSpec | None] = Field(None, description="inference engine, same forms")
    overrides: dict[str, SkipValidation[float | str]] = Field(
        default_factory=dict, description='other values at dotted keys such as "gpu.memory_efficiency"'
    )
    override_sources: Sources = Field(default_factory=dict, description="source of every override")

    @field_validator("overrides", mode="before")
    @classmethod
    def _flat_overrides(cls, value: Any) -> Any:
        return flatten(value, lambda _: False)

    @field_validator("override_sources", mode="before")
    @classmethod
    def _flat_sources(cls, value: Any) -> Any:
        return flatten(value, lambda entry: "source" in entry or "citation" in entry)


def load_system(reference: str | os.PathLike[str]) -> System:
    """System by bundled name or ``.toml`` path; `SpecError` for anything that is not a valid system."""
    return _load_system(reference, None, ())


def _load_system(reference: Any, folder: Path | None, chain: tuple[Path, ...]) -> System:
    path = find(reference, ("system",), folder)
    where = path_text(path)
    data = read_toml(path)
    check_kind(data, ("system",), where)
    try:
        file = _SystemFile(**data)
        if path.resolve() in chain:
            names = " -> ".join(path_text(one) for one in (*chain, path.resolve()))
            raise SpecError(f"key 'base' leads back to the same file: {names}")
        unsourced = [key for key in file.overrides if key not in file.override_sources]
        idle = [key for key in file.override_sources if key not in file.overrides]
        if unsourced or idle:
            what = "no entry for" if unsourced else "an entry without an override for"
            raise SpecError(f"[override_sources] has {what} {', '.join(map(shown, (unsourced or idle)[:4]))}")
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    given = [part for part in PARTS if getattr(file, part) is not None]
    base = None
    if file.base is not None:
        try:
            base = _load_system(file.base, path.parent, (*chain, path.resolve()))
        except SpecError as error:
            raise SpecError(f"{where}: base: {error}") from None
    for part in ("gpu", "link"):
        if base is None and part not in given:
            raise SpecError(f"{where}: key '{part}' is missing; a system needs gpu and link, or a base")
    specs: dict[str, Any] = {part: resolve(getattr(file, part), PARTS[part], path, f": {part}") for part in given}
    if base is None:
        system = System(name=file.name, description=file.description, **specs)
    else:
        # What the base says of the peaks of a part goes with the part.
        peaks = {key: peak for key, peak in base.stated_peaks.items() if key.partition(".")[0] not in specs}
        system = base._copy(name=file.name, description=file.description, stated_peaks=peaks, **specs)
    try:
        return system._with(file.overrides, file.override_sources, path.parent)
    except SpecError as error:
        raise SpecError(f"{where}: [overrides] {error}") from None


def load_spec(reference: str | os.PathLike[str]) -> Spec | System:
    """Any spec by bundled name or ``.toml`` path: a `Spec` child by its ``kind``, or a `System`."""
    path = find(reference, KINDS)
    data = read_toml(path)
    kind = check_kind(data, KINDS, path_text(path))
    return load_system(path) if kind == "system" else build(DEVICES[kind], data, path)


def json_schema(kind: str) -> dict[str, Any]:
    """JSON Schema of the files of one kind, for editors; `SpecError` for an unknown kind."""
    if kind not in KINDS:
        raise SpecError(f"kind is {shown(kind)}; allowed: {', '.join(KINDS)}")
    schema = (_SystemFile if kind == "system" else DEVICES[kind]).model_json_schema()
    ndp = schema if kind == "ndp" else schema.get("$defs", {}).get("NdpSpec")
    if ndp is not None:
        # In a file this is usually the name of a DRAM spec; only the loaded object always holds a spec.
        ndp["properties"]["dram"]["anyOf"].insert(0, {"type": "string"})
    schema["required"] = ["kind", *schema.get("required", ())]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": f"perfmodel {kind} spec",
    }


def write_overlay(
    path: str | os.PathLike[str],
    base_name: str | os.PathLike[str],
    overrides: Mapping[str, float | str],
    sources: Mapping[str, Source | Mapping[str, str]],
    *,
    parts: Sequence[Spec] = (),
    name: str | None = None,
    description: str | None = None,
) -> Path:
    """Write a system file that changes some values of ``base_name``; return its path.

    ``sources`` has one entry per override: a `Source`, or a table with ``source`` and ``citation``. ``parts`` take
    the place of those of their kind in the base; they hold no other specs. ``name`` defaults to the file's stem. The
    file appears only after it was read back successfully; otherwise `SpecError` is raised and an older file at ``path``
    stays as it was.
    """
    given: tuple[object, ...] = (path, base_name)
    if not all(isinstance(one, (str, os.PathLike)) for one in given):
        raise SpecError(f"overlay {shown(path)} of {shown(base_name)}; allowed: a path, and a name or path")
    target = Path(path)
    if target.suffix != ".toml":
        raise SpecError(f"{path_text(target)}: a spec file must end in .toml")
    try:
        with replace_when_done(target) as temporary:
            text = _overlay_text(target, base_name, overrides, sources, parts, name, description)
            temporary.write_bytes(text.encode("utf-8"))
            load_system(temporary)
    except SpecError as error:
        reason = str(error).replace(f"{path_text(temporary)}: ", "")
        raise SpecError(f"{path_text(target)} was not written: {reason}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(f"{path_text(target)} was not written: {reason}") from None
    return target


def _overlay_text(
    target: Path,
    base_name: str | os.PathLike[str],
    overrides: Mapping[str, float | str],
    sources: Mapping[str, Source | Mapping[str, str]],
    parts: Sequence[Spec],
    name: str | None,
    description: str | None,
) -> str:
    given: tuple[object, ...] = (overrides, sources)
    if not all(isinstance(table, Mapping) for table in given):
        raise SpecError("overrides and sources must be tables of dotted keys")
    base = os.fspath(base_name)
    if is_path(base_name):
        # Relative to the new file, so that both can move together.
        base = Path(os.path.relpath(base, target.parent)).as_posix()
        base = base if "/" in base or base.endswith(".toml") else f"./{base}"
    what = "1 other value" if len(overrides) == 1 else f"{len(overrides)} other values"
    lines = [
        'kind = "system"',
        f"name = {_toml_text(name or target.stem)}",
        f"description = {_toml_text(description or f'{base} with {what}')}",
        f"base = {_toml_text(base)}",
        "",
        "[overrides]",
    ]
    for key, raw in overrides.items():
        value = clean_value(key, raw)
        lines.append(f"{_toml_text(key)} = {_toml_text(value) if isinstance(value, str) else repr(value)}")
    lines += ["", "[override_sources]"]
    for key, entry in sources.items():
        table = {"source": entry.source, "citation": entry.citation} if isinstance(entry, Source) else entry
        if not isinstance(table, Mapping):
            raise SpecError(f"source of {shown(key)} is {shown(entry)}; allowed: source and citation")
        fields: dict[str, Any] = {str(field): text for field, text in table.items()}
        origin = Source(**fields)
        words = f"source = {_toml_text(origin.source)}, citation = {_toml_text(origin.citation)}"
        lines.append(f"{_toml_text(key)} = {{ {words} }}")
    for part in parts:
        lines += ["", *_part_lines(part)]
    return "\n".join(lines) + "\n"


def _part_lines(part: Spec) -> list[str]:
    """A part as a table of its system."""
    lines = [f"[{part.kind}]", f"name = {_toml_text(part.name)}", f"description = {_toml_text(part.description)}"]
    for key, value in part.items():  # the name of an entry of a table is a key of its own
        lines.append(f"{key} = {_toml_text(value) if isinstance(value, str) else repr(value)}")
    lines += ["", f"[{part.kind}.sources]"]
    for key in part.numeric_keys():
        origin = part.source_of(key)
        words = f"source = {_toml_text(origin.source)}, citation = {_toml_text(origin.citation)}"
        lines.append(f"{_toml_text(key)} = {{ {words} }}")
    return lines


def _toml_text(text: object) -> str:
    # A JSON string is a TOML string, except that TOML also wants the delete character escaped.
    return json.dumps(str(text), ensure_ascii=False).replace("\x7f", "\\u007f")
