"""``python -m crossgrain.te script.py``: a script that imports Transformer Engine, run by crossgrain."""
