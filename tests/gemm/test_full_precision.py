"""TF32 is off inside, and afterwards torch's flags are what they were, however they were set and left."""

import subprocess
import sys

import pytest

from crossgrain.gemm import full_precision

# Each way needs a fresh process, because torch's flags cannot be brought back to their initial state: forks of one that
# has imported torch and nothing else.
PROGRAM = """
import importlib.util, os, sys, threading, traceback
import torch

spec = importlib.util.spec_from_file_location("full_precision", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
full_fp32, matmul = module.full_fp32, torch.backends.cuda.matmul


def state():
    try:
        old = torch.get_float32_matmul_precision(), matmul.allow_tf32
    except RuntimeError:
        old = "mixed"
    return matmul.fp32_precision, old


def nested_and_left_by_an_error(before):
    try:
        with full_fp32():
            assert matmul.fp32_precision != "tf32"
            with full_fp32():
                assert matmul.fp32_precision != "tf32"
            assert matmul.fp32_precision != "tf32", "the inner block must not switch it on for the outer one"
            raise KeyError
    except KeyError:
        pass
    assert state() == before, (state(), before)


def in_two_threads(before):
    inside, leave = threading.Event(), threading.Event()

    def other():
        with full_fp32():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with full_fp32():
        pass
    assert matmul.fp32_precision != "tf32", "the other thread is still inside"
    leave.set()
    thread.join()
    assert state() == before, (state(), before)


for setting in sys.argv[2:]:
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            exec(setting)
            before = state()
            nested_and_left_by_an_error(before)
            in_two_threads(before)
            print(f"{setting}|{before[0]}")
        except BaseException:
            print(f"{setting}|{traceback.format_exc()!r}")
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
SETTINGS = {
    "pass": "none",
    "torch.set_float32_matmul_precision('high')": "tf32",
    "torch.set_float32_matmul_precision('medium')": "tf32",
    "matmul.allow_tf32 = True": "tf32",
    "matmul.fp32_precision = 'tf32'": "tf32",
    "torch.backends.fp32_precision = 'tf32'": "tf32",
}


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_flags_are_switched_off_and_restored():
    """In blocks inside of blocks, after errors, and in two threads. The program says what was set before."""
    command = [sys.executable, "-c", PROGRAM, full_precision.__file__, *SETTINGS]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert dict(line.split("|", 1) for line in ended.stdout.splitlines()) == SETTINGS, ended.stderr
