"""Runs a program that ends with its parent: `python leashed.py PARENT-PID PROGRAM ARGUMENTS…`.

The kernel sends SIGKILL when the parent's thread that started this process is gone (PR_SET_PDEATHSIG), also when the
parent was killed with -9. The setting survives exec. It is made here and not between fork and exec of the parent, which
has threads. Standard library only: this runs before the program it becomes.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit("the parent has ended meanwhile")
    os.execv(command[0], command)  # noqa: S606 - no shell is meant
