"""Models and training runs on the disk: checkpoints that are whole or not there, and safetensors."""

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
