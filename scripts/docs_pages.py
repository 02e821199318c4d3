"""A hook of mkdocs: optional pages are listed where they exist, and an outdated reference stops the build."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

OPTIONAL = {"report.md": ("Use", "Read the report")}
"""Pages by file: their section, and their title. They are listed where they exist."""


def on_config(config: Any) -> Any:
    """Add the optional pages that exist, and compare the generated pages with the code."""
    folder = Path(config["docs_dir"])
    for name, (section, title) in OPTIONAL.items():
        pages = next(item[section] for item in config["nav"] if section in item)
        if (folder / name).is_file() and {title: name} not in pages:
            pages.insert(0, {title: name})
    sys.path[:0] = [str(folder.parent), str(Path(__file__).parent)]
    import reference

    for target, render in (
        (reference.RECIPES, reference.recipes_page),
        (reference.PASSES_PAGE, reference.passes_page),
    ):
        if target.read_text(encoding="utf-8") != render():
            raise SystemExit(f"{target} is out of date; run python scripts/reference.py")
    return config
