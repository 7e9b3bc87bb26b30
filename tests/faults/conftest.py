"""The fault layer lies where the processes of a run find it, and the tests too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "inject"))
