"""``python -m crossgrain.te script.py``: run a script that imports Transformer Engine with crossgrain."""
