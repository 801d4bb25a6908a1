"""Memory of the host that is freed and taken again at every step.

glibc gives large blocks back to the system as soon as they are freed, and the system clears every page that it hands
out again. A training step frees and takes the same blocks again and again; kept by the process they are still there.
"""

import ctypes
import platform

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def keep_freed_memory(most: int = 2**31 - 1) -> bool:
    """Let the process keep up to ``most`` bytes of freed memory, for good; whether it could be asked to.

    The same as ``MALLOC_TRIM_THRESHOLD_`` and ``MALLOC_MMAP_THRESHOLD_`` in the environment. Nothing is done where
    the C library is not glibc: other allocators keep freed memory anyway.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return all(libc.mallopt(option, most) == 1 for option in (TRIM_THRESHOLD, MMAP_THRESHOLD))
