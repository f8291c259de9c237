"""Random changes of bytes, of JSON and of text, as damage and as an enemy would make them."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

HUGE = [2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1]
NESTED = "@nested@"  # stands for a value that Python's own json would refuse to write
HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    10**30,
    *HUGE,
    1e308,
    float("nan"),
    "",
    "x" * 300,
    "../../etc/passwd",
    "/",
    "a\0b",
    "\ud800",
    "rowwise",
    "float32",
    "__class__",
    [],
    {},
    [[1]],
    {"": {}},
    [10**9, 10**9],
    NESTED,
]


def mutated_bytes(original: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Change bytes: flip bits, cut, repeat, overwrite, or mix with another file."""
    data = bytearray(original)
    for _ in range(draw.choice([1, 1, 1, 2, 5])):
        start = draw.randrange(len(data) + 1)
        stop = min(len(data), start + draw.choice([1, 1, 4, 8, 64, 1000]))
        how = draw.choice(["flip", "flip", "flip", "cut", "remove", "repeat", "insert", "number", "splice", "swap"])
        if how == "flip" and start < len(data):
            data[start] ^= 1 << draw.randrange(8)
        elif how == "cut":
            del data[start:]
        elif how == "remove":
            del data[start:stop]
        elif how == "repeat":
            data[start:start] = data[start:stop] * draw.choice([1, 2, 50])
        elif how == "insert":
            data[start:start] = draw.choice([b"\0", b"\xff", b"[", b'"', draw.randbytes(8)]) * draw.choice([1, 8, 500])
        elif how == "number":
            width = draw.choice([4, 8])
            data[start : start + width] = (draw.choice(HUGE) % 256**width).to_bytes(width, "little")
        elif how == "splice":
            other = draw.choice(others)
            at = draw.randrange(len(other) + 1)
            data[start:stop] = other[at : at + stop - start]
        elif how == "swap":
            other_start = draw.randrange(len(data) + 1)
            one, two = data[start:stop], data[other_start : other_start + stop - start]
            data[start:stop], data[other_start : other_start + len(two)] = two, one
    return bytes(data)


def mutated_json(original: Any, draw: random.Random) -> str:
    """Change what JSON holds: values, keys, entries that are missing, moved, or there twice."""
    content = copy.deepcopy(original)
    twice = False
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        places = list(_places(content))
        if not places:
            content = draw.choice(HOSTILE)
            continue
        parent, key = draw.choice(places)
        how = draw.choice(["value", "value", "remove", "rename", "move", "wrap", "near", "add", "twice"])
        if how == "value":
            parent[key] = copy.deepcopy(draw.choice(HOSTILE))
        elif how == "remove":
            del parent[key]
        elif how == "rename" and isinstance(parent, dict):
            parent[draw.choice([key.upper(), key + "x", key[:-1], "", "../" + key, "a\0"])] = parent.pop(key)
        elif how == "move":
            other, name = draw.choice(places)
            if name in other if isinstance(other, dict) else name < len(other):
                parent[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(parent[key])
        elif how == "wrap":
            parent[key] = [parent[key]]
        elif how == "near":
            parent[key] = _near(parent[key], draw)
        elif how == "add" and isinstance(parent, dict):
            parent[draw.choice(["extra", key + ".x", "shards", "aliases"])] = copy.deepcopy(parent[key])
        elif how == "twice":
            twice = True
    text = json.dumps(content)
    if twice and text.startswith("{") and len(text) > 2:
        text = text[:-1] + ", " + text[1:]
    depth = draw.choice([100, 5_000, 100_000])
    return text.replace(json.dumps(NESTED), "[" * depth + "]" * depth)


def _places(content: Any) -> Any:
    """Every entry below: its parent and its key."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in entries:
        yield content, key
        yield from _places(value)


def _near(value: Any, draw: random.Random) -> Any:
    """A value of the same type that is almost right."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draw.choice([value + 1, value - 1, value * 2, -value, value * 2**20, float(value)])
    if isinstance(value, str):
        return draw.choice([value + " ", value[1:], value.upper(), value + value, value.replace("e", "é")])
    if isinstance(value, list):
        return draw.choice([value[1:], value + value[:1], value[::-1], value * 3])
    return value


def mutated_text(original: str, draw: random.Random, words: list[str]) -> str:
    """Change a text: characters, words, repetitions, brackets without end."""
    text = original
    for _ in range(draw.choice([1, 1, 2, 3, 6])):
        start = draw.randrange(len(text) + 1)
        stop = min(len(text), start + draw.choice([1, 1, 3, 8, 30]))
        inserted = draw.choice([*words, *words, *WORDS])
        how = draw.choice(["remove", "insert", "replace", "repeat", "cut"])
        if how == "repeat":
            inserted = text[start:stop] * draw.choice([1, 3, 200])
        kept = {"insert": text[start:], "repeat": text[start:], "cut": ""}.get(how, text[stop:])
        text = text[:start] + (inserted if how in ("insert", "replace", "repeat") else "") + kept
    return text


WORDS = [
    *"():;,*|[]{}!&-?<>%@`'\"\\#= \t\n\r\0",
    "(" * 4000,
    "[" * 4000,
    "{a: " * 2000,
    "- " * 3000,
    "٣",
    "é",
    "\ud7ff",
    "\ufeff",
    "\u2028",
    "99999999999999999999",
    "1e999",
    "-1",
    "0x10",
    "!!python/object/apply:os.system [exit]",
    "&a [*a]",
    "<<: *a",
    "null",
    "true",
    "2026-01-01",
    "~",
]
