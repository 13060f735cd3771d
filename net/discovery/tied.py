"""Starts a program in the place of this one that the kernel ends with its parent (Linux).

    python -IS tied.py PARENT PROGRAM [ARGUMENT …]

For a program that a library starts without letting us prepare the child. Imports next to nothing:
it is run by its path, and costs some 20 ms.
"""

import ctypes
import os
import signal
import sys


def main() -> None:
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)  # the parent went before it could be watched
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
