"""map: the whole course on one sheet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from course_lib.cli.app import AsJson, app
from course_lib.cli.show import console, print_json

if TYPE_CHECKING:
    from course_lib.view.course_map import Row

File = Annotated[Path | None, typer.Option(help="Also draw the page into this file.")]


@app.command(name="map")
def course_map(pdf: File = None, png: File = None, as_json: AsJson = False) -> int:
    """Which technique, when, and at what cost: one example, by formula, on one page."""
    from course_lib.view import course_map as sheet

    found = sheet.rows()
    for name, path in (("pdf", pdf), ("png", png)):
        if path is not None:
            try:
                page = sheet.course_map()
                about = {"Subject" if name == "pdf" else "Description": page.caption}
                page.savefig(path, format=name, dpi=120, metadata=about)
            except OSError as error:
                reason = error.strerror
                raise ValueError(f"--{name} {path}: cannot be written ({reason})") from None
    if as_json:
        print_json([_data(row) for row in found])
        return 0
    out = console()
    out.print(f"{'':14}{'GB a rank keeps':>20}{'sends':>8}{'seconds at':>16}")
    out.print(f"{'':14}{'state':>8}{'activations':>12}{'GB':>8}{'NVLink':>9}{'400 Gb':>7}  idle")
    for row in found:
        idle = f"{row.idle:6.0%}" if row.idle else ""
        kept = f"{float(row.state) / 1e9:8.1f}{float(row.activations) / 1e9:12.1f}"
        times = f"{row.seconds(sheet.NODE):9.2f}{row.seconds(sheet.NETWORK):7.2f}"
        out.print(f"{row.name:14}{kept}{float(row.sent) / 1e9:8.1f}{times}{idle}")
    out.print(f"{sheet.example()}\n\n{sheet.ORDER}")
    return 0


def _data(row: Row) -> dict[str, Any]:
    """A row as JSON: bytes as whole numbers."""
    data = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return data | {name: round(data[name]) for name in ("state", "activations", "sent")}
