"""The table that ``course map`` prints: written here, read there without torch.

``python -m course_lib.view.course_map.table`` writes it anew; a test compares it with the formulas.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from course_lib.view.course_map.page import ORDER, example
from course_lib.view.course_map.rows import NETWORK, NODE, Row, rows

FILE = Path(__file__).with_name("table.json")


def table() -> dict[str, Any]:
    """Return the rows, the bytes per second of both links, and the text below the rows."""
    return {
        "rows": [_data(row) for row in rows()],
        "bandwidth": {"node": NODE, "network": NETWORK},
        "example": example(),
        "order": ORDER,
    }


def _data(row: Row) -> dict[str, Any]:
    """Return a row with its bytes as whole numbers."""
    data = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return data | {name: round(data[name]) for name in ("state", "activations", "sent")}


if __name__ == "__main__":
    FILE.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")
