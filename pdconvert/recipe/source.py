"""Where a checkpoint comes from: the `source` of a recipe, and the `--source` string."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from pdconvert.errors import InputError
from pdconvert.process import is_plain_text
from pdconvert.recipe.strict import Strict, fail

SourceKind = Literal["package", "hub", "path", "gguf", "random"]
_KINDS: tuple[SourceKind, ...] = ("package", "hub", "path", "gguf", "random")


class RandomSpec(Strict):
    """Seeded random weights.

    Attributes:
        seed: of all tensors; each is drawn from (seed, its name).
        config: what a `config.json` would hold, `model_type` included.
    """

    seed: int = Field(default=0, ge=0)
    config: dict[str, Any]

    @model_validator(mode="after")
    def _has_model_type(self) -> Self:
        if not isinstance(self.config.get("model_type"), str):
            fail("expected the model's type, such as llama", path=["config", "model_type"])
        return self


class SourceSpec(Strict):
    """Exactly one kind of source.

    Attributes:
        package: an installed Python package that carries a checkpoint.
        file: of a package: a `.gguf` file or checkpoint folder inside it, where it carries several.
        hub: a Hugging Face model id.
        revision: of a hub model: a branch, tag or commit.
        path: a Hugging Face checkpoint folder.
        gguf: a `.gguf` file.
        random: seeded random weights.
    """

    package: str | None = None
    file: str | None = None
    hub: str | None = None
    revision: str | None = None
    path: str | None = None
    gguf: str | None = None
    random: RandomSpec | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            fail(f"expected exactly one of {', '.join(_KINDS)}, found {found}")
        for key, owner in (("file", "package"), ("revision", "hub")):
            if getattr(self, key) is not None and given[0] != owner:
                fail(f"belongs to a {owner!r} source, not to {given[0]!r}", path=[key])
        if getattr(self, given[0]) == "":
            fail("is empty", path=[given[0]])
        for key, value in self:
            if isinstance(value, str) and not is_plain_text(value):
                fail("holds a zero byte, or bytes that are not UTF-8", path=[key], shown=value)
        return self

    @property
    def kind(self) -> SourceKind:
        """Which of the kinds this is."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    def anchored(self, folder: Path) -> SourceSpec:
        """The same source with a relative `path` or `gguf` resolved against a folder."""
        if self.kind not in ("path", "gguf"):
            return self
        given = str(getattr(self, self.kind))
        place = Path.home() / given[2:] if given.startswith("~/") else folder / given
        return self.model_copy(update={self.kind: str(place.absolute())})


def parse_source(text: str, folder: Path) -> SourceSpec:
    """The source that a `--source` string names.

    Args:
        text: a folder, a `.gguf` file, `package:NAME[/FILE]` or a hub id (`org/name[@revision]`).
        folder: what a relative path is relative to.

    Raises:
        InputError: the string names nothing that exists and has not the form of a hub id.
    """
    if not text:
        raise InputError("--source: empty; give a folder, a .gguf file, a hub id, or package:NAME")
    if text.startswith("package:"):
        name, _, file = text.removeprefix("package:").partition("/")
        return SourceSpec(package=name, file=file or None) if name else _no_source(text)
    if text.lower().endswith(".gguf"):
        return SourceSpec(gguf=text).anchored(folder)
    local = SourceSpec(path=text).anchored(folder)
    if Path(str(local.path)).exists():
        return local
    name, _, revision = text.removeprefix("hub:").partition("@")
    if _is_hub_id(name):
        return SourceSpec(hub=name, revision=revision or None)
    return _no_source(text)


def _is_hub_id(name: str) -> bool:
    """Whether a string has the form `org/name` and cannot be meant as a local path."""
    parts = name.split("/")
    allowed = set("-_.")
    return len(parts) == 2 and all(
        part and part[0].isalnum() and all(c.isascii() and (c.isalnum() or c in allowed) for c in part)
        for part in parts
    )


def _no_source(text: str) -> SourceSpec:
    raise InputError(
        f"--source {text}: no such folder or file, and neither a hub id (org/name) nor package:NAME"
    )
