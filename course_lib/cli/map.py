"""map: the whole course on one sheet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import course_lib
from course_lib.cli.app import AsJson, app
from course_lib.cli.show import console, print_json
from course_lib.cli.status import Status

# Its folder is not imported here: that would import matplotlib and torch.
TABLE = Path(course_lib.__file__).with_name("view") / "course_map" / "table.json"
File = Annotated[Path | None, typer.Option(help="Also draw the page into this file.")]


@app.command(name="map")
def course_map(pdf: File = None, png: File = None, as_json: AsJson = False) -> int:
    """Each technique on one page: when to use it, and what it costs."""
    files = {name: path for name, path in (("pdf", pdf), ("png", png)) if path is not None}
    if files:
        with Status("drawing the page"):
            _draw(files)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if as_json:
        print_json(table["rows"])
        return 0
    node, network = table["bandwidth"]["node"], table["bandwidth"]["network"]
    out = console()
    out.print(f"{'':14}{'GB stored per rank':>20}{'sends':>8}{'seconds at':>20}{'bubble':>9}")
    out.print(f"{'':14}{'state':>8}{'activations':>12}{'GB':>8}{'NVLink':>10}{'400 Gb/s':>10}")
    for row in table["rows"]:
        idle = f"{row['idle']:9.0%}" if row["idle"] else ""
        kept = f"{row['state'] / 1e9:8.1f}{row['activations'] / 1e9:12.1f}"
        times = f"{row['sent'] / node:10.2f}{row['sent'] / network:10.2f}"
        out.print(f"{row['name']:14}{kept}{row['sent'] / 1e9:8.1f}{times}{idle}")
    out.print(f"{table['example']}\n\n{table['order']}")
    return 0


def _draw(files: dict[str, Path]) -> None:
    """Write the page into each file, by format. Raises ValueError that names the option."""
    from course_lib.view import course_map as sheet

    page = sheet.course_map()
    for name, path in files.items():
        about = {"Subject" if name == "pdf" else "Description": page.caption}
        try:
            page.savefig(path, format=name, dpi=120, metadata=about)
        except OSError as error:
            raise ValueError(f"--{name} {path}: cannot be written ({error.strerror})") from None
