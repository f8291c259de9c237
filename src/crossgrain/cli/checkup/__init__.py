"""What this machine can do, and whether crossgrain gives the right bytes on it. ``crossgrain doctor`` prints it.

Each module looks at one thing and returns plain data. Nothing here raises because something is missing or broken: that
is what it finds.
"""

from .findings import Checkup
from .whole import check_up

__all__ = ["Checkup", "check_up"]
