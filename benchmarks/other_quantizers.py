"""Other tools' quantizers and finished builds on one text: KL divergence, agreement, perplexity, bits.

    python benchmarks/other_quantizers.py FOLDER --results FILE [--only NAME ...] [--build DIR ...]
        [--calibration FILE] [--sequences 64] [--length 512] [--device cuda]

FOLDER is a Hugging Face folder, such as `benchmarks/dithered.py` writes. Each quantizer works on the matrices of its
decoder layers; embedding and head stay as they are. Its de-quantized weights go into Hugging Face's own model in fp32,
which is scored on the text and windows of `pdconvert eval` against the unquantized folder: no executor of pdconvert is
in the way. A build's `decode` folder is scored likewise, with all that it holds: a second way of measuring what
`pdconvert eval` measures through the shipped files.

With --results every finished row is kept, and not made again; a row that failed is tried again. The table has all rows
of the file. Bits per weight: codes, scales, biases and tables of the decoder's matrices; of a build, as its manifest
counts them. Seconds: to quantize, not to score. --only without a name runs no other tool. Memory: the fp32 logits of
all scored positions are held, 1.2 GB for SmolLM2, and three times the model.

GPTQ, AWQ and DWQ look at text: --calibration, a text or JSONL file. They take long on a CPU, see docs/measurements.md.
coremltools' k-means needs scikit-learn, which pdconvert does not install.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from coremltools_weights import Compress, compressed, linear, palettize
from mlx_lm_weights import awq, dwq, gptq, quantized, rounded
from torch import Tensor

from pdconvert import text
from pdconvert.calibrate import read_sequences
from pdconvert.errors import InputError
from pdconvert.evaluate import Row, Score, score, windows_of
from pdconvert.runtime.tokenizer import Tokenizer
from pdconvert.runtime.weights import DecodeWeights
from pdconvert.schema import read_manifest
from pdconvert.sources.hf_dir import HfDirSource

TOOL_ERRORS = (ImportError, InputError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a tool that does not run here fails with; the table lists it with its reason."""


@dataclass(frozen=True)
class Given:
    """What the quantizers get.

    Attributes:
        folder: a Hugging Face folder.
        sequences: token ids to calibrate on.
    """

    folder: Path
    sequences: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Quantized:
    """Tensors by their names in the checkpoint that take the place of its own, and what its matrices take."""

    tensors: dict[str, Tensor]
    bits_per_weight: float


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        name: on the command line.
        title: in the table.
        make: makes the weights.
        reads: whether it looks at text; the table then says at how much.
    """

    name: str
    title: str
    make: Callable[[Given], Quantized]
    reads: bool = False


def matrices(source: HfDirSource) -> dict[str, list[str]]:
    """Names of the matrices of each decoder layer, by the layer's prefix."""
    layers = defaultdict(list)
    for name, info in source.tensors().items():
        head, marker, rest = name.partition(".layers.")
        if marker and len(info.shape) == 2:
            layers[f"{head}{marker}{rest.split('.')[0]}"].append(name)
    return layers


def by_coremltools(compress: Compress, given: Given) -> Quantized:
    """Compress layer by layer."""
    source = HfDirSource(given.folder)
    tensors, bits = {}, 0
    for names in matrices(source).values():
        found, stored = compressed({name: source.read(name) for name in names}, compress)
        tensors |= found
        bits += stored
    return Quantized(tensors, bits / sum(tensor.numel() for tensor in tensors.values()))


def by_mlx_lm(make: Callable[..., Any], given: Given) -> Quantized:
    """Quantize with a function of `mlx_lm_weights`."""
    tensors, bits = quantized(make, given.folder, given.sequences)
    return Quantized(tensors, bits / sum(tensor.numel() for tensor in tensors.values() if tensor.ndim == 2))


def of_build(build: Path, given: Given) -> Quantized:
    """The decode weights of a build, embedding and head as they are in it."""
    weights = DecodeWeights(build / "decode")
    tensors = {}
    for name in weights.sizes():
        module, _, part = name.rpartition(".")
        if module not in weights.grids:
            tensors[name] = torch.from_numpy(weights.array(name).astype("float32"))
        elif part == "weight":
            rows = range(weights.array(name).shape[0])
            tensors[name] = torch.from_numpy(weights.rows(module, rows))
    return Quantized(tensors, read_manifest(build)["quantization"]["decode_bits_per_weight"])


COREML_TOOLS = (
    ("lut4-tensor", "`palettize_weights`, a table per matrix", palettize(0)),
    ("lut4-rows8", "`palettize_weights`, a table per 8 rows", palettize(8)),
    ("lut4-rows4", "`palettize_weights`, a table per 4 rows", palettize(4)),
    ("int4-channel", "`linear_quantize_weights`, 4 bits, per channel", linear(4)),
    ("int4-block64", "`linear_quantize_weights`, 4 bits, blocks of 64", linear(4, 64)),
    ("int8-channel", "`linear_quantize_weights`, 8 bits, per channel", linear(8)),
)
MLX_LM = (
    ("rtn4", "rounding, 4 bits, groups of 64", rounded),
    ("rtn8", "rounding, 8 bits, groups of 64", partial(rounded, bits=8)),
    ("gptq4", "GPTQ, 4 bits, groups of 64", gptq),
    ("awq4", "AWQ, 4 bits, groups of 64", awq),
    ("dwq4", "DWQ, 4 bits, groups of 64, rate 1e-6", dwq),
    ("dwq4-fast", "DWQ, 4 bits, groups of 64, rate 1e-5", partial(dwq, rate=1e-5)),
)
METHODS = (
    *(
        Method(f"coremltools-{name}", f"coremltools {title}", partial(by_coremltools, compress))
        for name, title, compress in COREML_TOOLS
    ),
    *(
        Method(f"mlx_lm-{name}", f"mlx_lm {title}", partial(by_mlx_lm, make), not name.startswith("rtn"))
        for name, title, make in MLX_LM
    ),
)


class Scorer:
    """Hugging Face's model of a folder, in fp32, and what it says about the second half of each window.

    Attributes:
        expected: (W / 2, V) logits of each window with the folder's own weights.
    """

    def __init__(self, folder: Path, windows: Sequence[Sequence[int]], device: str = "cpu"):
        """Load the folder and run the windows, token ids of equal length, on `device`."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._model = model.to(device).eval().requires_grad_(False)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        self._tied = head.weight is embedding.weight
        if self._tied:  # a build may bring a head of its own
            head.weight = torch.nn.Parameter(embedding.weight.clone(), requires_grad=False)
        self._own = {name: value.clone() for name, value in model.state_dict().items()}
        self._windows = torch.tensor(windows, device=device)
        self.expected = [logits.cpu() for logits in self.logits()]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take other weights in the place of the folder's.

        Args:
            tensors: by name; where they hold an embedding and no head, and the folder has one matrix for both, the
                head is that embedding.

        Raises:
            InputError: a name or shape that the model does not have.
        """
        for name, value in tensors.items():
            if name not in self._own or value.shape != self._own[name].shape:
                raise InputError(f"Hugging Face's model has no {name} of shape {tuple(value.shape)}")
        state = self._own | dict(tensors)
        if self._tied and "lm_head.weight" not in tensors:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        self._model.load_state_dict(state, strict=True)

    @torch.no_grad()
    def logits(self) -> Iterator[Tensor]:
        """(W / 2, V) of each window: what follows the tokens before each of its second half."""
        half = self._windows.shape[1] // 2
        for window in self._windows:
            yield self._model(window[None, :-1], logits_to_keep=half, use_cache=False).logits[0]

    def score(self, tensors: Mapping[str, Tensor]) -> Score:
        """The model with other weights, see `load`, against its own."""
        self.load(tensors)
        half = self._windows.shape[1] // 2
        rows = [
            Row.of(expected.to(found.device), found, window[half:])
            for window, expected, found in zip(self._windows, self.expected, self.logits(), strict=True)
        ]
        return score(rows)


@dataclass
class Results:
    """Rows by name, kept in a file if there is one.

    Attributes:
        about: what the rows have in common; a file of something else is refused.
        rows: `{"title", "seconds", "bits_per_weight", "score"}`, or `{"title", "error"}`.
    """

    path: Path | None
    about: dict[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            content = json.loads(self.path.read_text())
            if content["about"] != self.about:
                raise InputError(f"{self.path} holds rows of another checkpoint, text, windows or version")
            self.rows = content["rows"]

    def put(self, name: str, row: dict[str, Any]) -> None:
        """Add a row and write the file."""
        self.rows[name] = row
        if self.path is not None:
            self.path.write_text(json.dumps({"about": self.about, "rows": self.rows}, indent=1))


def run(methods: Iterable[Method], given: Given, scorer: Callable[[], Scorer], results: Results) -> None:
    """Make and score every row that is not there.

    Args:
        scorer: makes the scorer when the first row needs it.
    """
    judge = None
    for method in methods:
        if "score" in results.rows.get(method.name, {}):
            continue
        tokens = sum(map(len, given.sequences))
        row: dict[str, Any] = {
            "title": f"{method.title}, {tokens:,} tokens" if method.reads else method.title
        }
        started = time.perf_counter()
        try:
            with redirect_stdout(sys.stderr):  # the table alone goes to stdout
                made = method.make(given)
        except TOOL_ERRORS as error:
            results.put(method.name, row | {"error": f"{type(error).__name__}: {error}"})
            continue
        seconds = time.perf_counter() - started
        judge = judge or scorer()
        row |= {"seconds": seconds, "bits_per_weight": made.bits_per_weight}
        results.put(method.name, row | {"score": asdict(judge.score(made.tensors))})
        print(f"{method.name}: done in {time.perf_counter() - started:.0f} s", file=sys.stderr)


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """All rows in Markdown."""
    lines = [
        "| weights | bits per weight | KLD | p99 | top-1 | top-5 | perplexity | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = {method.name: place for place, method in enumerate(METHODS)}
    for name in sorted(rows, key=lambda name: order.get(name, len(order))):
        row = rows[name]
        if "error" in row:
            lines.append(
                f"| {row['title']} | did not run: {' '.join(row['error'].split())[:200]} | | | | | | |"
            )
            continue
        value = Score(**row["score"])
        lines.append(
            f"| {row['title']} | {row['bits_per_weight']:.2f} | {value.kld_mean:.4f} ± {value.kld_error:.4f} "
            f"| {value.kld_p99:.2f} | {100 * value.top1:.1f} % | {100 * value.top5:.1f} % "
            f"| × {value.perplexity_ratio:.3f} ± {value.perplexity_ratio_error:.3f} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Make what is missing, print the table."""
    parser = argparse.ArgumentParser(description="Other tools' quantizers and builds on one text.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=[method.name for method in METHODS])
    parser.add_argument(
        "--build", nargs="+", type=Path, default=[], help="finished builds of the same folder"
    )
    parser.add_argument("--results", type=Path, help="JSON file that keeps the rows")
    parser.add_argument("--calibration", type=Path, help="text or JSONL for GPTQ, AWQ and DWQ")
    parser.add_argument("--sequences", type=int, default=64, help="how many are taken from it")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--text", type=Path, help="held-out text; the help topics of this Python by default")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument(
        "--width", type=int, default=512, help="tokens of a window; its second half is scored"
    )
    parser.add_argument("--device", default="cpu", help="where it is scored")
    args = parser.parse_args()

    tokenizer = Tokenizer(args.folder)
    scored, digest = text.to_score(args.text)
    windows = windows_of(tokenizer.encode(scored), args.windows, args.width)
    lengths = [args.length] * args.sequences
    sequences = read_sequences(args.calibration, tokenizer, lengths) if args.calibration else []
    about = {
        "source": HfDirSource(args.folder).hashes(),
        "text": digest,
        "windows": [args.windows, args.width],
        "figures": [part.name for part in fields(Score)],
    }
    methods = [method for method in METHODS if args.only is None or method.name in args.only]
    methods += [
        Method(f"build {path.name}", f"pdconvert, `{path.name}`", partial(of_build, path))
        for path in args.build
    ]
    results = Results(args.results, about)
    scorer = partial(Scorer, args.folder, windows, args.device)
    run(methods, Given(args.folder, sequences), scorer, results)
    print(table(results.rows))


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"other_quantizers: {error}")
