"""Write a small checkpoint of Hugging Face's form, with seeded random weights and a tokenizer of bytes.

python scripts/tiny_checkpoint.py FOLDER
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from pdconvert.recipe import load_recipe
from pdconvert.sources.random import RandomSource


def write_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write the checkpoint of a config into a new folder, and return it."""
    source = RandomSource(config, 0)
    folder.mkdir()
    source.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(source.config, indent=2) + "\n", encoding="utf-8")
    save_file({name: source.read(name) for name in source.tensors()}, folder / "model.safetensors")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    random = load_recipe("tiny").source.random
    assert random is not None, "the tiny recipe has random weights"
    write_checkpoint(parser.parse_args().folder, random.config)
