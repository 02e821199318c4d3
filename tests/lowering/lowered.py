"""Lower a checkpoint in memory to a package, without the pipeline around it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import head_block, layer_block
from torch import Tensor

from passes import EagerGqaAttention, LinearToConv2d, QuantizeWeights, RopeAsInput, SafeRmsNorm, TruncateLastLayer
from pdconvert.compile import stored_tensors
from pdconvert.emit.coreml import write_package
from pdconvert.executors.mil import MilSession, Package
from pdconvert.lowering.assemble import Lowering
from pdconvert.lowering.contract import FunctionShape
from pdconvert.program import Block, Pass
from pdconvert.quant.store import Stored
from pdconvert.quiet import quiet_coremltools
from pdconvert.reference import Capture, Reference
