"""The kinds of files that the library reads: how one is made, changed, read, and what reading it may do.

Each kind is read either as it was, bit for bit, or refused with an error that is documented. Where checksums seal a
file, a mutation either leaves the seal alone, and then no change may go unnoticed, or makes a new one, as an enemy can;
then the contents may be others, but the reader must still check them before it uses them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import crossgrain as cg
from crossgrain import files
from crossgrain.distributed import checkpoint as sharded
from crossgrain.recipe import GemmRecipe, read_extra_state
from crossgrain.tensor.pickling import make_tensor, reduce_tensor

from ..common.saved_models import contents
from .module_formats import RECIPES
from .mutations import HOSTILE, NESTED, mutated_bytes, mutated_json, mutated_text

Result = Any


class Kind:
    """A kind of file.

    Attributes:
        refusals: the errors that its reader documents.
        sealed: a change of any byte must be noticed.
    """

    refusals: tuple[type[Exception], ...] = (ValueError,)
    sealed = True

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.original = self.made()

    def made(self) -> Any:
        """What is mutated."""
        raise NotImplementedError

    def mutation(self, draw: random.Random) -> tuple[str, Callable[[], Result]]:
        """How a mutation reads, and a function that reads the mutated file."""
        raise NotImplementedError

    def whole(self) -> Result:
        """What reading gives if nothing is changed."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Called after a refusal."""

    def check_usable(self, result: Result) -> None:
        """Called with what was read, if it may be something else than the original."""


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with cg.quantized_model_init(recipe="fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4"):
        return nn.Sequential(cg.Linear(32, 32), nn.LayerNorm(4))


class Checkpoint(Kind):
    """Training checkpoints of `crossgrain.files`, with their seals as they were."""

    refusals = (files.DamagedFileError, FileNotFoundError)
    parts = ("model.pt", "optimizer.pt", "extras.pt", "random.pt", "manifest.json", "manifest.sha256")

    def made(self) -> dict[str, bytes]:
        model = small_model()
        optimizer = cg.optim.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter.detach().dequantize() if parameter.dim() == 2 else parameter)
        optimizer.step()
        self.save(model, optimizer)
        self.model, self.optimizer = model, optimizer
        self.before = contents([model, optimizer])
        self.path = self.directory / "step-00000001"
        return {path.name: path.read_bytes() for path in self.path.iterdir()}

    def save(self, model: Any, optimizer: Any) -> None:
        extras = {"losses": [1.0, 2.0], "name": "é"}
        files.save_checkpoint(self.directory, 1, model=model, optimizer=optimizer, extras=extras, recipe="mxfp8")

    def load(self) -> Result:
        done = files.load_checkpoint(self.path, model=self.model, optimizer=self.optimizer)
        return contents([done.extras, done.step, done.recipe_text, self.model, self.optimizer])

    def written(self, changed: dict[str, bytes]) -> Callable[[], Result]:
        def read() -> Result:
            for name, data in {**self.original, **changed}.items():
                (self.path / name).write_bytes(data)
            return self.load()

        return read

    def mutation(self, draw: random.Random) -> tuple[str, Callable[[], Result]]:
        name = draw.choice(sorted(self.original))
        data = mutated_bytes(self.original[name], draw, list(self.original.values()))
        if name == "manifest.sha256" and data[:64] == self.original[name][:64]:
            data = self.original[name]  # only the digest says something
        return f"{name} with other bytes", self.written({name: data})

    def whole(self) -> Result:
        return self.written({})()

    def check_unchanged(self) -> None:
        now = contents([self.model, self.optimizer])
        assert now.keys() == self.before.keys() and all(torch.equal(now[key], self.before[key]) for key in now), (
            "a refused load has changed the model or the optimizer"
        )


class ForgedCheckpoint(Checkpoint):
    """The same, with other contents under seals that fit."""

    refusals = (ValueError, FileNotFoundError, RuntimeError, TypeError)
    sealed = False

    def mutation(self, draw: random.Random) -> tuple[str, Callable[[], Result]]:
        changed: dict[str, bytes] = {}
        manifest = json.loads(self.original["manifest.json"])
        if draw.random() < 0.6:
            text = mutated_json(manifest, draw)
            how = "a forged manifest"
        else:
            name = draw.choice([name for name in sorted(self.original) if not name.startswith("manifest")])
            data = mutated_bytes(self.original[name], draw, list(self.original.values()))
            changed[name] = data
            manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            text, how = json.dumps(manifest), f"a forged {name}"
        data = text.encode(errors="surrogatepass")
        if draw.random() < 0.1:
            data = mutated_bytes(data, draw, list(self.original.values()))
        changed["manifest.json"] = data
        changed["manifest.sha256"] = f"{hashlib.sha256(data).hexdigest()}  manifest.json\n".encode()
        return how, self.written(changed)

    def check_usable(self, result: Result) -> None:
        with torch.no_grad(), cg.autocast(recipe="fprop: mxfp8, dgrad: nvfp4, wgrad: nvfp4"):
            self.model[0](torch.ones(32, 32))
        self.written({})()


class ShardedCheckpoint(Checkpoint):
    """Checkpoints in shards, of one process."""

    refusals = (files.DamagedFileError, FileNotFoundError)

    def save(self, model: Any, optimizer: Any) -> None:
        sharded.save(self.directory, 1, model=model, optimizer=optimizer, recipe="mxfp8")

    def load(self) -> Result:
        done = sharded.load(self.path, model=self.model, optimizer=self.optimizer)
        return contents([done.extras, done.step, done.recipe_text, self.model, self.optimizer])


class ForgedShards(ForgedCheckpoint, ShardedCheckpoint):
    """Forged manifests of checkpoints in shards. Their data is read by torch, which unpickles its own metadata."""

    def mutation(self, draw: random.Random) -> tuple[str, Callable[[], Result]]:
        text = mutated_json(json.loads(self.original["manifest.json"]), draw)
        data = text.encode(errors="surrogatepass")
        seal = f"{hashlib.sha256(data).hexdigest()}  manifest.json\n".encode()
        return "a forged manifest", self.written({"manifest.json": data, "manifest.sha256": seal})


class Safetensors(Kind):
    """safetensors files with their checksum as it was."""

    refusals = (files.DamagedFileError, FileNotFoundError)

    def made(self) -> bytes:
        self.path = self.directory / "model.safetensors"
        model = small_model()
        state = {**model.state_dict(), "0._extra_state": {"version": 1, "scale": torch.ones(3)}, "s": model[0].bias}
        files.save_safetensors(state, self.path, recipe="mxfp8", metadata={"name": "é"})
        return self.path.read_bytes()

    def read(self) -> Result:
        file = files.read_safetensors(self.path)
        return contents([file.state_dict, file.recipe_text, file.metadata])

    def written(self, data: bytes) -> Callable[[], Result]:
        def read() -> Result:
            self.path.write_bytes(data)
            return self.read()

        return read

    def mutation(self, draw: random.Random) -> tuple[str, Callable[[], Result]]:
        if draw.random() < 0.5:
            return "other bytes", self.written(mutated_bytes(self.original, draw, [self.original]))
        size, header, rest = self.parts()
        text = mutated_json(header, draw).encode(errors="surrogatepass")
        size = len(text) if draw.random() < 0.8 else draw.choice([0, size, 2**30, 2**63])
        return "another header", self.written(struct.pack("<Q", size) + text + rest)

    def parts(self) -> tuple[int, dict[str, Any], bytes]:
        (size,) = struct.unpack("<Q", self.original[:8])
        return size, json.loads(self.original[8 : 8 + size]), self.original[8 + size :]

    def whole(self) -> Result:
        return self.written(self.original)()


class ForgedSafetensors(Safetensors):
    """The same, with another description under a checksum that fits."""

    refusals = (ValueError, FileNotFoundError)
    sealed = False

    def mutation(self, draw: random.Random) -> tuple[str, Callable[[], Result]]:
        from crossgrain.files import safetensors_file as module

        self.path.write_bytes(self.original)
        buffers, metadata = module._read(self.path)
        state = mutated_json(json.loads(metadata["crossgrain.state"]), draw)
        about = {**metadata, "crossgrain.state": state}
        if draw.random() < 0.2:
            key = draw.choice(sorted(buffers))
            buffers[key] = draw.choice([buffers[key][:1], buffers[key].float(), torch.zeros(0), buffers[key].t()])
            buffers[key] = buffers[key].contiguous()
        about.pop("crossgrain.sha256")
        about["crossgrain.sha256"] = module._digest(buffers, about)
        module._write(buffers, self.path, about)
        return "a forged description", self.written(self.path.read_bytes())

    def read(self) -> Result:
        return files.read_safetensors(self.path).state_dict

    def check_usable(self, result: Result) -> None:
        for value in result.values():
            if isinstance(value, cg.QuantizedTensor) and any(value.get_usages().values()):
                value.dequantize()


class Recipe(Kind):
    """Recipes in one line of text. Any change may be a recipe too, which then reads as it is written."""

    refusals = (ValueError,)
    sealed = False
    words = ("mxfp8", "nvfp4(", "rht", "sr", "hp", "fp8(delayed(history=", "first 2 blocks", "fprop: ", "2d", "all: ")

    def made(self) -> list[str]:
        return [str(GemmRecipe.load(name)) for name in RECIPES if not name.endswith("()")]

    def mutation(self, draw: random.Random) -> tuple[str, Callable[[], Result]]:
        text = mutated_text(draw.choice(self.original), draw, list(self.words))
        return repr(text)[:300], lambda: GemmRecipe.load(text)

    def whole(self) -> Result:
        return GemmRecipe.load(self.original[0])

    def check_usable(self, result: Result) -> None:
        assert GemmRecipe.load(str(result)) == result, f"does not read as it is written: {result}"
        assert GemmRecipe.load(result.to_dict()) == result, f"does not read as its dict: {result}"


class RecipeYaml(Recipe):
    """Recipes in YAML files."""

    suffix = ".yaml"

    def made(self) -> list[str]:
        texts = []
        for name in RECIPES:
            if not name.endswith("()"):
                path = self.directory / f"recipe{self.suffix}"
                GemmRecipe.load(name).save(path)
                texts.append(path.read_text())
        return texts

    def mutation(self, draw: random.Random) -> tuple[str, Callable[[], Result]]:
        text = draw.choice(self.original)
        if draw.random() < 0.05:
            names = "abcdefghijklmnop"
            rows = [f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in pairwise(names)]
            text = "\n".join(["a: &a [x]", *rows[: draw.randrange(1, len(rows))], "allow_mixed: *b", text])
        data = mutated_text(text, draw, list(self.words)).encode(errors="surrogatepass")
        return repr(data)[:300], self.written(mutated_bytes(data, draw, [data]) if draw.random() < 0.2 else data)

    def written(self, data: bytes) -> Callable[[], Result]:
        def read() -> Result:
            path = self.directory / f"recipe{self.suffix}"
            path.write_bytes(data)
            return GemmRecipe.load(path)

        return read

    def whole(self) -> Result:
        return self.written(self.original[0].encode())()


class RecipeJson(RecipeYaml):
    """Recipes in JSON files."""

    suffix = ".json"

    def mutation(self, draw: random.Random) -> tuple[str, Callable[[], Result]]:
        text = mutated_json(json.loads(draw.choice(self.original)), draw)
        if draw.random() < 0.3:
            text = mutated_text(text, draw, list(self.words))
        data = text.encode(errors="surrogatepass")
        return repr(data)[:300], self.written(data)


class RecipeText(Kind):
    """The texts of recipes in checkpoints: classes and their options as JSON."""

    sealed = False

    def made(self) -> list[str]:
        from crossgrain import recipe as r
        from crossgrain.recipe.zoo import mxfp8_fwd_nvfp4_bwd_factory

        made = [r.DelayedScaling(), r.Float8CurrentScaling(), r.NVFP4BlockScaling(), r.Float8BlockScaling()]
        return [files.recipe_to_text(one) for one in [*made, r.CustomRecipe(qfactory=mxfp8_fwd_nvfp4_bwd_factory)]]

    def mutation(self, draw: random.Random) -> tuple[str, Callable[[], Result]]:
        text = mutated_json(json.loads(draw.choice(self.original)), draw)
        if draw.random() < 0.3:
            text = mutated_text(text, draw, ["recipe", "MXFP8BlockScaling", "function", "os:system", "Format"])
        return repr(text)[:300], lambda: files.recipe_from_text(text)

    def whole(self) -> Result:
        return files.recipe_from_text(self.original[0])

    def check_usable(self, result: Result) -> None:
        files.recipe_to_text(result)


class Pickle(Kind):
    """Quantized tensors that torch.load reads with weights_only=True, with other states."""

    refusals = (ValueError, TypeError)
    sealed = False
    formats = ("mxfp8", "nvfp4", "fp8", "fp8_block_2d", "nvfp4_row_scaled")

    def made(self) -> list[Any]:
        x = torch.linspace(-3, 3, 32 * 64).view(32, 64)
        return [reduce_tensor(cg.quantize(x, name))[1] for name in self.formats]

    def mutation(self, draw: random.Random) -> tuple[str, Callable[[], Result]]:
        cls, state, requires_grad, is_param = draw.choice(self.original)
        state, done = dict(state), []
        for _ in range(draw.choice([1, 1, 2, 3])):
            name = draw.choice(sorted(state))
            value = state.pop(name)
            how = draw.choice(["other", "other", "hostile", "remove", "near", "near", "near"])
            done.append(f"{name}: {how}")
            if how == "other":
                state[name] = draw.choice(self.original)[1].get(name)
            elif how == "hostile":
                state[name] = draw.choice([each for each in HOSTILE if each != NESTED])
            elif how == "near":
                state[name] = self.near(value, draw)
        return f"{cls.__name__} with {done}", lambda: make_tensor(cls, state, requires_grad, is_param)

    def near(self, value: Any, draw: random.Random) -> Any:
        if isinstance(value, torch.Tensor):
            empty, long = value.new_zeros(0), value.repeat(*[2] * max(1, value.dim()))
            first, turned = (value[:1] if value.dim() else empty), (value.t() if value.dim() < 3 else empty)
            return draw.choice([first, turned, value.float(), empty, long, value[None]])
        if isinstance(value, torch.dtype):
            return draw.choice([torch.bfloat16, torch.int32, torch.complex64, torch.bool])
        if isinstance(value, tuple | torch.Size):
            return draw.choice([value[::-1], value[:1], (), (2**40, 2**40), (-1, 3), (*value, 1), [32, 64], (32, "x")])
        if isinstance(value, dict):
            changed = dict(value)
            changed.pop(next(iter(changed), None), None)
            return draw.choice([{}, changed, {1: 2}])
        return draw.choice([not value, None, 1, "x"])

    def whole(self) -> Result:
        return make_tensor(*copy.deepcopy(self.original[0]))

    def check_usable(self, result: Result) -> None:
        if not any(result.get_usages().values()):
            return
        assert result.dequantize().shape == result.shape
        with tempfile.TemporaryFile() as file:
            torch.save(result, file)
            file.seek(0)
            torch.load(file, weights_only=True)


class ExtraState(Kind):
    """Extra states of modules with delayed scaling."""

    refusals = (ValueError, TypeError, RuntimeError)
    sealed = False

    def made(self) -> dict[str, Any]:
        self.layer = cg.Linear(32, 32)
        with cg.autocast(recipe="fp8-delayed"):
            self.layer(torch.ones(32, 32)).sum().backward()
        self.encoded = self.layer.get_extra_state()
        state = read_extra_state(self.encoded)
        self.before = contents(state)
        return state

    def mutation(self, draw: random.Random) -> tuple[str, Callable[[], Result]]:
        state: Any = dict(self.original)
        for _ in range(draw.choice([1, 1, 2])):
            name = draw.choice(sorted(state))
            value = state.pop(name)
            how = draw.choice(["hostile", "remove", "rename", "near", "near"])
            if how == "hostile":
                state[name] = draw.choice(HOSTILE)
            elif how == "rename":
                state[draw.choice([name + "x", "forward", "backward.scale", 3, None])] = value
            elif how == "near" and isinstance(value, torch.Tensor):
                near = [value[:1], value * float("nan"), -value, value * float("inf"), value.half(), value[None]]
                turned = value.t() if value.dim() < 3 else value
                state[name] = draw.choice([*near, value.new_zeros(0), turned, value.repeat(*[2] * value.dim())])
            elif how == "near":
                state[name] = draw.choice([2, 1.0, str(value), 5])
            if not all(isinstance(key, str) for key in state):
                break
        if draw.random() < 0.1:
            state = draw.choice([[], 3, "x", b"x", torch.ones(3), torch.ones(3, dtype=torch.uint8), {"version": 1}])
        elif draw.random() < 0.5:
            state = self.encoded.clone()
            for _ in range(draw.choice([0, 1, 1, 4])):
                state[draw.choice([draw.randrange(len(state)), draw.randrange(64)])] = draw.randrange(256)
            state = state[: draw.choice([len(state), len(state), draw.randrange(len(state))])]

        def load() -> Result:
            self.layer.set_extra_state(state)
            return read_extra_state(self.layer.get_extra_state())

        return repr(state)[:200], load

    def whole(self) -> Result:
        return self.original

    def check_unchanged(self) -> None:
        now = contents(read_extra_state(self.layer.get_extra_state()))
        assert now.keys() == self.before.keys() and all(torch.equal(now[key], self.before[key]) for key in now), (
            "a refused extra state has changed the histories"
        )

    def check_usable(self, result: Result) -> None:
        for key in ("forward.scale", "backward.scale"):
            assert bool((result[key].isfinite() & (result[key] > 0)).all()), f"{key} is {result[key]}"
        with cg.autocast(recipe="fp8-delayed"):
            self.layer(torch.ones(32, 32)).sum().backward()
        self.layer.set_extra_state(self.original)


KINDS = (
    Checkpoint,
    ForgedCheckpoint,
    ShardedCheckpoint,
    ForgedShards,
    Safetensors,
    ForgedSafetensors,
    Recipe,
    RecipeYaml,
    RecipeJson,
    RecipeText,
    Pickle,
    ExtraState,
)
