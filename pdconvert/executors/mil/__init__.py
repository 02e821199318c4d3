"""The MIL executor: runs any saved `.mlpackage` on any machine, in fp32 or in emulated fp16.

It is an eager interpreter over torch CPU tensors that reads the package's protobuf and weight blob
directly. Why not a translation to another graph format:

- weights stay compressed in the memory-mapped blob and are de-quantized op by op, so that a
  one-billion-parameter W8 package runs in little memory;
- states are updated in place, run-time slice bounds and symbolic shapes need no special case;
- a trace of every op (range, overflow, loss against fp32) is one callback;
- oneDNN's product of two fp32 matrices is the fastest one measured on a small CPU
  (`ops/products.py`);
- where nobody looks at single ops, an fp32 run may join some (`fuse.py`).

It is not an ANE. `fp16` rounds what the program types as fp16 at each op's output, overflow
included, and accumulates inside one op in fp32; a device may accumulate in less.
"""

from typing import TYPE_CHECKING, Any

from pdconvert.executors.mil.package import FunctionInfo, Package
from pdconvert.executors.mil.values import ValueInfo

if TYPE_CHECKING:
    from pdconvert.executors.mil.session import MilSession

__all__ = ["FunctionInfo", "MilSession", "Package", "ValueInfo"]


def __getattr__(name: str) -> Any:
    """Import the session, and with it torch, when it is first asked for: `inspect` does without."""
    if name == "MilSession":
        from pdconvert.executors.mil.session import MilSession

        return MilSession
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
