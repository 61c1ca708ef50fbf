"""`python -m tools.families > docs/models.md`"""

from __future__ import annotations

import logging
import sys
import warnings

from tools.families.table import render

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
sys.stdout.write(render())
