"""The picture of a report for the documentation.

First ``crossgrain search --size tiny --minutes 4``, then ``python -m tests.lab.report.picture out/report.html``. It
needs the browser that `make test-report` installs.
"""

import sys
from pathlib import Path

from PIL import Image

from tests.common.browser import Browser

PICTURE = Path(__file__).parents[3] / "docs" / "images" / "report.png"

if __name__ == "__main__":
    with Browser() as browser:
        browser.look_like(width=1200, height=1042)
        browser.open(sys.argv[1])
        browser.screenshot(PICTURE)
    Image.open(PICTURE).convert("RGB").quantize(256).save(PICTURE, optimize=True)  # a third of the bytes
    print(PICTURE)
