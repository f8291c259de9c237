"""The pictures of the documentation, drawn by ``python -m docs.pictures``."""
