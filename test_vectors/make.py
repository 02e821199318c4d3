"""Make the committed test vectors again: the build of the `tiny` recipe, whole.

    python test_vectors/make.py

Run it after a change of the build folder's format. tests/test_committed_vectors.py replays what is committed.
"""

import shutil
from pathlib import Path

from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe

HERE = Path(__file__).parent
WANTED = ("rotated", "raw")


def main() -> None:
    """Build `tiny` in both forms of the keys, into rotated/ and raw/."""
    for form in WANTED:
        folder = HERE / form
        shutil.rmtree(folder, ignore_errors=True)
        recipe = load_recipe("tiny", overrides=[f"prefill.kv.rope={form}", "prefill.outputs=logits"])
        result = build(recipe, folder, use_cache=False)
        if result.verdict != "pass":
            raise SystemExit(result.summary)


if __name__ == "__main__":
    main()
