"""Hardware specs: devices and links in TOML files, validated, with the source of every number.

Spec files use the units in the names of their keys; the objects here also offer SI properties, and everything
that computes uses only those.
"""

from perfmodel.hardware.base import SOURCE_KINDS, Choice, Constant, Limits, Source, SourceKind, Spec
from perfmodel.hardware.devices import DramSpec, GpuSpec, LinkSpec, NdpSpec
from perfmodel.hardware.engine import EngineSpec
from perfmodel.hardware.files import KINDS, SpecEntry, list_specs
from perfmodel.hardware.host import CpuSpec, HostSpec
from perfmodel.hardware.system import (
    StatedPeak,
    System,
    json_schema,
    load_spec,
    load_system,
    write_overlay,
)

__all__ = [
    "KINDS",
    "SOURCE_KINDS",
    "Choice",
    "Constant",
    "CpuSpec",
    "DramSpec",
    "EngineSpec",
    "GpuSpec",
    "HostSpec",
    "Limits",
    "LinkSpec",
    "NdpSpec",
    "Source",
    "SourceKind",
    "Spec",
    "SpecEntry",
    "StatedPeak",
    "System",
    "json_schema",
    "list_specs",
    "load_spec",
    "load_system",
    "write_overlay",
]
