"""What is in a page, without a browser."""

import json
from html.parser import HTMLParser


class Page(HTMLParser):
    """What is in a page: elements with their attributes, the data, and texts of table cells."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.scripts, self.cells = [], [], []
        self._inside = None
        self.source = path.read_text()
        self.feed(self.source)
        self.data = json.loads(self.scripts[1])

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._inside = tag
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, text):
        if self._inside == "script":
            self.scripts[-1] += text
        elif self._inside in ("td", "th"):
            self.cells[-1] += text
