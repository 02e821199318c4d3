"""Versions of the files that a build folder holds, and reading its manifest."""

import json
from pathlib import Path
from typing import Any

from pdconvert.errors import InputError

SCHEMA = "1.1"
"""What manifest.json, report.json and test_vectors/index.json carry; a reader refuses a newer major number."""


def check_schema(content: Any, path: Path) -> None:
    """Refuse content that this version cannot read.

    Raises:
        InputError: `schema` is missing, malformed, or of a newer major version.
    """
    version = content.get("schema") if isinstance(content, dict) else None
    major = version.partition(".")[0] if isinstance(version, str) else ""
    if not major.isdecimal():
        raise InputError(f"{path}: no schema version; it was not written by pdconvert")
    if int(major) > int(SCHEMA.partition(".")[0]):
        raise InputError(f"{path}: schema {version} is newer than {SCHEMA}; use a newer pdconvert")


def read_manifest(build: Path) -> dict[str, Any]:
    """Read and check the manifest of a build folder.

    Raises:
        InputError: there is none, or it is damaged, or of a newer schema.
    """
    path = build / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{build} is not a build: it has no manifest.json") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); build it again with --force") from error
    check_schema(manifest, path)
    if not isinstance(manifest.get("prefill"), dict):
        raise InputError(f"{path}: no `prefill` section; it was not written by pdconvert")
    return manifest
