"""Importing crossgrain changes nothing in torch, and does not bring its compiler or FSDP2 along."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import json, sys, torch, torch.distributed, torch.nn.parallel, torch.utils.checkpoint, torch.autograd.graph

def attributes():
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
    return {(name, key): value for name, module in modules.items() for key, value in list(vars(module).items())}

before = attributes()
import crossgrain
after = attributes()
changed = [f"{module}.{key}" for (module, key), value in before.items() if after.get((module, key)) is not value]
heavy = [name for name in ("torch._dynamo", "torch.distributed.fsdp", "numba", "matplotlib") if name in sys.modules]
crossgrain.quantize(torch.randn(32, 32), "mxfp8")
patched = torch.distributed._broadcast_coalesced is not before["torch.distributed", "_broadcast_coalesced"]
print(json.dumps({"changed": changed, "heavy": heavy, "patched": patched}))
"""


def test_import_changes_nothing_and_the_first_quantized_tensor_patches():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    # What `torch.serialization.add_safe_globals` adds to, which is torch's own interface for it.
    assert found.pop("changed") == ["torch._weights_only_unpickler._marked_safe_globals_set"]
    assert found == {"heavy": [], "patched": True}
