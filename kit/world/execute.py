"""Running one request on a rank: code, an expression or a function; its value or its failure becomes the answer."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:

    pass

SHOWN = {__file__, str(Path(__file__).with_name("rankside.py")), importlib.__file__, ast.__file__}
