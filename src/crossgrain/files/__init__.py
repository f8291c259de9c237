"""Save models and training runs to disk and load them again.

- `save_checkpoint` and `load_checkpoint` store a whole training run: model, optimizer, random states, recipe.
- `save_safetensors` and `load_safetensors` store one model in a safetensors file.
- `export_plain` writes a model as ordinary bf16 (or fp32, fp16) tensors for programs that do not know crossgrain.
- `load_state_dict` loads a state dict into a model; if it fails, the model is unchanged.

An interrupted save never leaves a partly written file under its final name.
"""

from ..recipe.portable import recipe_from_text, recipe_to_text
from .loading import load_state_dict
from .manifest import DamagedFileError
from .safetensors_file import ModelFile, export_plain, load_safetensors, read_safetensors, save_safetensors
from .steps import latest_checkpoint
from .training import Checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint

__all__ = [
    "Checkpoint",
    "DamagedFileError",
    "ModelFile",
    "export_plain",
    "latest_checkpoint",
    "load_checkpoint",
    "load_safetensors",
    "load_state_dict",
    "read_safetensors",
    "recipe_from_text",
    "recipe_to_text",
    "save_checkpoint",
    "save_safetensors",
    "verify_checkpoint",
]
