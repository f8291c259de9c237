"""Transformer Engine's names, served by crossgrain: this module gives way to another when it is imported."""

from crossgrain.compat import install

install()
