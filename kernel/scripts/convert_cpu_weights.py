"""Converts a checkpoint's experts for the CPU kernel; `--help` says how."""

from __future__ import annotations

import sys

from kt_kernel.convert_command import main

if __name__ == "__main__":
    sys.exit(main())
