"""Exchange two folders in one step of the file system, where it has such a step."""

import ctypes
import errno
import os
import sys
from pathlib import Path

AT_FDCWD = -100
RENAME_EXCHANGE = 2  # Linux, <linux/fs.h>
RENAME_SWAP = 2  # macOS, <sys/stdio.h>
UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})


def exchange(first: Path, second: Path) -> bool:
    """Exchange two existing paths of one file system atomically.

    Returns:
        Whether it was done; False, with nothing changed, where the system or file system cannot.

    Raises:
        OSError: the system can, and refused (permission, a path that does not exist).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    a, b = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin":
        result = libc.renamex_np(a, b, ctypes.c_uint(RENAME_SWAP))
    elif hasattr(libc, "renameat2"):
        result = libc.renameat2(AT_FDCWD, a, AT_FDCWD, b, ctypes.c_uint(RENAME_EXCHANGE))
    else:
        return False
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))
