"""Import third parties without what they print.

coremltools logs about ten lines on Linux while it is imported (its Core ML bindings exist on macOS
only, and it has not tested the installed torch). They say nothing about the work at hand, so the import
runs with its logger above ERROR. An ImportError or any other real failure still comes out.
"""

import logging
import warnings
from types import ModuleType


def quiet_coremltools() -> ModuleType:
    """Import coremltools with its import-time log lines silenced.

    Returns:
        The module. Its logger keeps the level ERROR afterwards, so conversions stay quiet too.

    Raises:
        ImportError: coremltools is not installed or is broken.
    """
    logger = logging.getLogger("coremltools")
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import coremltools
    logger.setLevel(logging.ERROR)
    return coremltools
