"""The formats of ``export``, by name."""

from specdec.export.formats import Format, SglangFormat, SpeculatorsFormat
from specdec.export.gguf import GgufFormat

FORMATS: dict[str, Format] = {
    layout.name: layout for layout in (Format(), SpeculatorsFormat(), SglangFormat(), GgufFormat())
}
