"""The protobuf classes of Core ML models, without importing all of coremltools.

`import coremltools` takes seconds and pulls torch; the message classes alone take 35 ms. They are
plain generated modules that only import each other, so they load under a package of our own whose
path is coremltools' `proto` folder. Generated classes come from protobuf's global pool, so these are
the same classes that coremltools uses, whichever is imported first.
"""

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

_ALIAS = "pdconvert_coreml_proto"


def _load(name: str) -> ModuleType:
    if _ALIAS not in sys.modules:
        found = importlib.util.find_spec("coremltools")
        if found is None or not found.submodule_search_locations:
            raise ImportError(
                "coremltools is not installed; pdconvert reads packages with its protobuf classes"
            )
        alias = ModuleType(_ALIAS)
        alias.__path__ = [str(Path(found.submodule_search_locations[0]) / "proto")]
        sys.modules[_ALIAS] = alias
    return importlib.import_module(f"{_ALIAS}.{name}")


@cache
def model_pb2() -> ModuleType:
    """Return the module of `Model`, the root message of a `.mlmodel` file."""
    return _load("Model_pb2")


@cache
def mil_pb2() -> ModuleType:
    """Return the module of `Program`, `Function`, `Operation` and the MIL value types."""
    return _load("MIL_pb2")
