"""Run the benchmarks and print tables; on request, write one JSON file and one chart."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import (
    chart,
    first_use,
    gpt,
    groups,
    inference,
    inspect,
    kernels,
    linear,
    models,
    others,
    products,
    sensitivity,
    small,
    threads,
)
from .timing import environment, one_thread

PARTS = (
    "kernels",
    "small",
    "groups",
    "products",
    "inference",
    "linear",
    "threads",
    "gpt",
    "models",
    "inspect",
    "sensitivity",
    "first-use",
    "others",
)
QUICK_SIZE, QUICK_SHAPES = 256, ((128, 256, 256), (64, 128, 128))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.quick:
        options.size, options.repeats = min(options.size, QUICK_SIZE), min(options.repeats, 2)
    with one_thread():
        report = run(options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2, default=asdict) + "\n")
    if options.chart:
        chart.draw(report.get("linear", ()), report["kernels"].timings if "kernels" in report else (), options.chart)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"what to run: {', '.join(PARTS)} (all)")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the matrix, a multiple of 128")
    parser.add_argument("--repeats", type=int, default=7, help="small calls and small layers are repeated more often")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repeats: does it run?")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases whose name contains this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw layers and compiled kernels")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.parts = options.parts or PARTS
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Tables are printed as they become ready; all that is in them is returned by part."""
    about = environment()
    report: dict[str, Any] = {"environment": about}
    for key, value in about.items():
        print(f"{key:<8} {value}")

    if "kernels" in options.parts:
        measured = report["kernels"] = kernels.run(options.size, options.only, options.repeats)
        size = f"[{options.size}, {options.size}]"
        title = f"Kernels, multiples of a copy of fp32 {size} ({measured.copy_seconds * 1e3:.2f} ms)"
        print_table(title, ("format", "direction", "amax", "encode", "decode"), kernels.rows(measured.timings))

    if "small" in options.parts:
        calls = report["small"] = small.run(options.only, 20 * options.repeats)
        title = f"Small calls, microseconds by the wall clock, [{small.SIZE}, {small.SIZE}]"
        print_table(title, ("format", "quantize both", "decode one"), small.rows(calls))

    if "groups" in options.parts:
        count = min(options.size, groups.ROWS)
        report["groups"] = groups.run(count, options.only, 3 * options.repeats)
        title = f"Groups of uneven sizes of bf16 [{count}, {groups.WIDTH}], both directions, milliseconds"
        columns = ("format", "groups", "one by one", "together", "times faster")
        print_table(title, columns, groups.rows(report["groups"]))

    if "products" in options.parts:
        shapes = QUICK_SHAPES if options.quick else products.SHAPES
        report["products"] = products.run(shapes, options.only, 7 * options.repeats)
        head = ("format", *("x".join(map(str, shape)) for shape in shapes))
        title = "GEMM of two operands, multiples of fp32 torch.mm, rows x columns x summed"
        print_table(title, head, products.rows(report["products"]))

    if "inference" in options.parts:
        shapes = QUICK_SHAPES if options.quick else inference.SHAPES
        report["inference"] = inference.run(shapes, options.only, 7 * options.repeats)
        head = ("recipe", "rows x in x out", "quantized in every call", "quantized once")
        print_table("Linear without gradients, multiples of fp32", head, inference.rows(report["inference"]))

    libraries = {"crossgrain": _only(linear.layers(), options.only)}
    compare = "others" in options.parts
    if compare and others.installed():
        torchao = others.torchao()
        libraries["torchao"] = _only(torchao.layers, options.only)
        report["others"] = others.run(options.size, torchao.conversions, options.only, options.repeats)
        report["notes"] = torchao.notes
        title = f"Quantizing fp32 [{options.size}, {options.size}] rowwise into a new tensor, multiples of a copy"
        print_table(title, ("format", "library", "quantize", "decode"), others.rows(report["others"]))

    if "linear" in options.parts:
        shapes = QUICK_SHAPES if options.quick else linear.SHAPES
        plain, report["linear"] = linear.run(shapes, libraries, 7 * options.repeats)
        head = ("library", "layer", *("x".join(map(str, shape)) for shape in shapes))
        title = "Linear forward + backward, multiples of fp32 nn.Linear (target), tokens x in x out"
        print_table(title, head, linear.rows(plain, report["linear"]))
    if "threads" in options.parts:
        shape = (QUICK_SHAPES if options.quick else linear.SHAPES)[0]
        report["threads"] = threads.run(shape, options.only, 3 * options.repeats)
        title = (
            f"Linear forward + backward, {'x'.join(map(str, shape))}, wall time on 1 and on {threads.THREADS} threads"
        )
        print_table(title, ("layer", "one", "several", "times faster"), threads.rows(report["threads"]))
    if "gpt" in options.parts:
        config = gpt.QUICK_CONFIG if options.quick else gpt.CONFIG
        seconds, report["gpt"] = gpt.run(config, options.repeats)
        tokens = f"{gpt.BATCH * config.context} tokens, width {config.width}, {config.layers} layers"
        title = f"GPT forward + backward, {tokens}, multiples of fp32 (target)"
        print_table(title, ("recipe", "time", "saved by linear layers"), gpt.rows(seconds, report["gpt"]))
    if "models" in options.parts:
        report["models"] = models.run(options.quick, options.only, options.repeats)
        title = "Steps of whole models, multiples of fp32 (target)"
        print_table(title, ("model", "library", "recipe", "time"), models.rows(report["models"]))
        if not any(timing.model == "Llama" for timing in report["models"]):
            print(f"\n{models.NO_TRANSFORMERS}")
    if "inspect" in options.parts:
        report["inspect"] = inspect.run(options.quick, options.only, options.repeats)
        title = "lab.Inspector on a GPT, CPU time: a look in steps, and its share at every=100; a step between looks"
        head = ("size", "recipe", "what ifs", "step", "look, steps", "share", "step between")
        print_table(title, head, inspect.rows(report["inspect"]))
    if "sensitivity" in options.parts:
        config = sensitivity.QUICK_CONFIG if options.quick else sensitivity.CONFIG
        report["sensitivity"] = sensitivity.run(config, options.only, options.repeats)
        title = f"Sensitivity of a GPT of {config.layers} layers of {config.width}, multiples of forward + backward"
        head = ("candidate", "fprop and wgrad, all sites", "dgrad, one group", "peak memory, training = 1")
        print_table(title, head, sensitivity.rows(report["sensitivity"]))
    if "first-use" in options.parts:
        recipes = first_use.QUICK_RECIPES if options.quick else first_use.RECIPES
        report["first_use"] = first_use.run(recipes, options.only, everything=not options.quick)
        title = "Compiling kernels at the first step of a layer, and all of them in advance: CPU seconds (target)"
        print_table(title, ("recipe", "seconds"), first_use.rows(report["first_use"]))
    if compare:
        print("\n" + "\n".join(report.get("notes", [others.HOW_TO_INSTALL])))
    return report


def _only(layers: dict[str, linear.MakeLayer], text: str) -> dict[str, linear.MakeLayer]:
    return {name: make for name, make in layers.items() if text.lower() in name.lower()}


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    numeric = [all(not cell or cell[0].isdigit() for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numeric or [False] * len(head), strict=True)
        ).rstrip()
        for row in (head, *rows)
    ]
    print(f"\n{title}\n\n{lines[0]}\n{'-' * max(map(len, lines))}")
    print("\n".join(lines[1:]))


if __name__ == "__main__":
    main()
