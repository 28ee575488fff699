"""``python -m mcore_patch``: the same as the command ``mcore-patch``."""

from __future__ import annotations

import sys

from mcore_patch._cli import main

if __name__ == "__main__":
    sys.exit(main())
