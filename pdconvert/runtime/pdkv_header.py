"""The header of a hand-off file: what its K and V are about, and which builds can go on with them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from pdconvert import schema
from pdconvert.errors import InputError
from pdconvert.runtime.handoff import KeyForm
from pdconvert.runtime.layouts import LAYOUTS, Layout, packed_shape
from pdconvert.runtime.manifest import Manifest

MAGIC = b"PDKV\r\n\x1a\n"
"""A file that was sent as text loses its line ends, and is refused for it."""
SCHEMA = (1, 1)
"""Major and minor version; a reader refuses a newer major one."""
BLOCK_TOKENS = 128
ALIGNMENT = 64
PREFIX = struct.Struct("<8sHHI32s")
"""Magic, major, minor, bytes of the header; SHA-256 of these and the header."""
FRAME = struct.Struct("<4sIQQQ32s")
"""Mark, number of the block, first token, tokens, bytes of the arrays; SHA-256 of these and the arrays."""
DIGEST_BYTES = 32
MAX_HEADER_BYTES = 1 << 20
MAX_BLOCK_TOKENS = 1 << 16


@dataclass(frozen=True)
class Header:
    """What a hand-off file is about; its attributes are the header's JSON fields.

    Attributes:
        model_hash: the manifest's `hash.store`: the quantized store that both halves were written from.
        rope_dims: channels that turn.
        rope_inv_freq_sha256: of the inverse frequencies as little-endian float64.
        rope_attention_factor: factor in the graph's cos and sin.
        key_form: "rotated" or "raw" keys.
        layers, kv_heads, head_dim: geometry of K and V.
        dtype: "fp16".
        layout: how a block's arrays lie, see `layouts`.
        block_tokens: tokens of every block but the last.
        tokens: number of tokens whose K and V are in the file.
        token_ids_sha256: of these tokens' ids as little-endian int32.
        last_token_ids: what comes after them in the prompt: decoding begins by feeding these.
        window: tokens that a token sees in layers with a window; None without such layers, as before version 1.1.
    """

    model_hash: str
    rope_dims: int
    rope_inv_freq_sha256: str
    rope_attention_factor: float
    key_form: KeyForm
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    layout: Layout
    block_tokens: int
    tokens: int
    token_ids_sha256: str
    last_token_ids: tuple[int, ...]
    window: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Length of the whole prompt."""
        return self.tokens + len(self.last_token_ids)

    @property
    def blocks(self) -> int:
        """Number of frames."""
        return -(-self.tokens // self.block_tokens)

    def block(self, index: int) -> tuple[int, int]:
        """First token of a block, and how many it has."""
        start = index * self.block_tokens
        return start, min(self.block_tokens, self.tokens - start)

    def array_shape(self, tokens: int) -> tuple[int, int, int, int]:
        """Shape of a block's K, and of its V."""
        return packed_shape(self.layout, self.layers, self.kv_heads, self.head_dim, tokens)

    def array_bytes(self, tokens: int) -> int:
        """Bytes of a block's K, and of its V, filled up to the alignment."""
        return _aligned(2 * self.layers * self.kv_heads * self.head_dim * tokens)

    def frame_bytes(self, tokens: int) -> int:
        """Bytes of a whole frame."""
        return FRAME.size + 2 * self.array_bytes(tokens)

    @property
    def frames_bytes(self) -> int:
        """Bytes of all frames together."""
        whole, rest = divmod(self.tokens, self.block_tokens)
        return whole * self.frame_bytes(self.block_tokens) + (self.frame_bytes(rest) if rest else 0)

    def encode(self) -> bytes:
        """Prefix and header, as they stand at the beginning of the file."""
        text = json.dumps(asdict(self), allow_nan=False).encode()
        text = text.ljust(_aligned(PREFIX.size + len(text)) - PREFIX.size)
        return seal(PREFIX, (MAGIC, *SCHEMA, len(text)), text) + text

    @classmethod
    def of(cls, manifest: Manifest, prompt: Sequence[int], tokens: int, layout: Layout = "native") -> Header:
        """The header for the K and V of the first `tokens` tokens of a prompt, from a build."""
        digest = token_ids_sha256(prompt[:tokens])
        last = tuple(int(item) for item in prompt[tokens:])
        return cls(
            **model_fields(manifest),
            layout=layout,
            block_tokens=BLOCK_TOKENS,
            tokens=tokens,
            token_ids_sha256=digest,
            last_token_ids=last,
        )

    @classmethod
    def from_json(cls, values: Any, name: str, *, newer: bool = False) -> Header:
        """A header from its JSON content.

        Args:
            values: the parsed JSON.
            name: of the file, for messages.
            newer: written by a newer minor version, which may have fields that are not known here.

        Raises:
            InputError: a field is missing, unknown, or has a value that it cannot have.
        """
        if not isinstance(values, dict):
            raise InputError(f"{name}: its header is no JSON object; prefill the prompt again")
        known = [field.name for field in fields(cls)]
        unknown = [] if newer else [key for key in values if key not in known]
        values = {"window": None, **values}
        missing = [key for key in known if key not in values]
        if missing or unknown:
            problem = f"{missing[0]} is missing" if missing else f"{unknown[0]} is not known"
            raise InputError(f"{name}: {problem}; prefill the prompt again")
        given = {key: values[key] for key in known}
        for key, expected in _bad_fields(given):
            raise InputError(
                f"{name}: {key} is {given[key]!r}, expected {expected}; prefill the prompt again"
            )
        return cls(**{**given, "last_token_ids": tuple(given["last_token_ids"])})

    def check(self, manifest: Manifest, name: str, prompt: Sequence[int] | None = None) -> None:
        """Refuse K and V that a build cannot go on with.

        Args:
            manifest: of the build that decodes.
            name: of the file, for messages.
            prompt: the tokens that the file should be about, where they are known.

        Raises:
            InputError: it comes from another model, has another form, or another prompt's tokens.
        """
        for key, want in model_fields(manifest).items():
            if (have := getattr(self, key)) != want:
                raise InputError(
                    f"{name}: {key} is {have!r}, and {manifest.build} has {want!r}; "
                    "prefill the prompt with the build that decodes it"
                )
        outside = next((item for item in self.last_token_ids if item >= manifest.vocab_size), None)
        if outside is not None:
            raise InputError(
                f"{name}: last_token_ids holds {outside}, and the vocabulary ends at {manifest.vocab_size - 1}"
            )
        if prompt is None:
            return
        if list(prompt[self.tokens :]) != list(self.last_token_ids):
            raise InputError(f"{name}: last_token_ids are not the end of this prompt; prefill it again")
        if token_ids_sha256(prompt[: self.tokens]) != self.token_ids_sha256:
            raise InputError(f"{name}: token_ids_sha256 is of another prompt; prefill this one again")


def model_fields(manifest: Manifest) -> dict[str, Any]:
    """The fields of a header that a build decides.

    Raises:
        InputError: the manifest has no `hash.store`.
    """
    ropes = manifest.rope.by_suffix(manifest.layers).values()
    frequencies = np.concatenate([np.asarray(rope.inv_freq, "<f8") for rope in ropes])
    return {
        "model_hash": store_hash(manifest),
        "rope_dims": 2 * len(manifest.rope.inv_freq),
        "rope_inv_freq_sha256": hashlib.sha256(frequencies.tobytes()).hexdigest(),
        "rope_attention_factor": manifest.rope.attention_factor,
        "key_form": manifest.key_form,
        "layers": manifest.layers,
        "kv_heads": manifest.kv_heads,
        "head_dim": manifest.head_dim,
        "dtype": "fp16",
        "window": manifest.window,
    }


def store_hash(manifest: Manifest) -> str:
    """`hash.store` of a build's manifest.

    Raises:
        InputError: the manifest has none.
    """
    content = schema.read_manifest(manifest.build).get("hash")
    value = content.get("store") if isinstance(content, dict) else None
    if not isinstance(value, str) or not value:
        raise InputError(f"{manifest.build / 'manifest.json'}: hash.store is missing; build again")
    return value


def token_ids_sha256(ids: Sequence[int]) -> str:
    """SHA-256 of token ids as little-endian int32."""
    return hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()


def seal(form: struct.Struct, numbers: Sequence[Any], body: bytes) -> bytes:
    """A prefix or a frame: its numbers, and the SHA-256 of these and of the body that follows."""
    begin = form.pack(*numbers, bytes(DIGEST_BYTES))[:-DIGEST_BYTES]
    total = hashlib.sha256(begin)
    total.update(body)
    return begin + total.digest()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _bad_fields(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names of fields whose value is out of range, with what was expected."""
    for key in ("model_hash", "rope_inv_freq_sha256", "token_ids_sha256"):
        if not isinstance(values[key], str) or not values[key]:
            yield key, "a text"
    for key in ("rope_dims", "layers", "kv_heads", "head_dim", "block_tokens", "tokens"):
        least = 0 if key in ("rope_dims", "tokens") else 1
        if not _is_integer(values[key]) or values[key] < least:
            yield key, f"an integer of at least {least}"
    if values["window"] is not None and not (_is_integer(values["window"]) and values["window"] >= 1):
        yield "window", "an integer of at least 1, or null"
    factor = values["rope_attention_factor"]
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        yield "rope_attention_factor", "a number"
    for key, choices in (("key_form", ("rotated", "raw")), ("dtype", ("fp16",)), ("layout", LAYOUTS)):
        if values[key] not in choices:
            yield key, " or ".join(choices)
    if _is_integer(values["block_tokens"]) and values["block_tokens"] > MAX_BLOCK_TOKENS:
        yield "block_tokens", f"at most {MAX_BLOCK_TOKENS}"
    last = values["last_token_ids"]
    if not isinstance(last, list) or not last or not all(_is_integer(item) and item >= 0 for item in last):
        yield "last_token_ids", "a list of token ids, at least one"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
