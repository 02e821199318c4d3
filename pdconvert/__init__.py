"""pdconvert: compile a causal LM into an ANE prefill package and matching MLX decode weights.

    import pdconvert

    result = pdconvert.build("smollm2-135m")          # compile, verify, report
    pair = pdconvert.load(result.path)                # both halves
    print(pair.generate("The capital of France is", max_tokens=16).text)

Importing pdconvert imports nothing heavy; torch and the others come with the first call that needs them.
"""

from pdconvert.api import build, load, plan
from pdconvert.errors import CheckFailed, InputError, PdconvertError

__version__ = "0.1.0"

__all__ = ["CheckFailed", "InputError", "PdconvertError", "__version__", "build", "load", "plan"]
