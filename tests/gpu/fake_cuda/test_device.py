"""The emulated device is one: it tells what a GPU would wait for, and refuses what a GPU refuses."""

import pytest

pytestmark = pytest.mark.xdist_group("fake_cuda")

READS = {
    "item": "_local_scalar_dense",
    "bool": "_local_scalar_dense",
    "tolist": "copy_",
    "equal": "equal",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "read by a mask": "index",
    "write by a mask": "_index_put_impl_",
    "unique": "_unique2",
    "bincount": "bincount",
    "repeat_interleave": "repeat_interleave",
    "to the host": "copy_",
    "synchronize": "synchronize",
}
UPLOADS = ("from the host", "from the host, non_blocking", "from pinned memory", "tensor")


def test_what_makes_the_host_wait(told):
    found = told["what_waits"]
    expected = {name: ["read", operator] for name, operator in READS.items()}
    expected |= {name: ["upload", "copy_"] for name in UPLOADS}
    expected["read by an index of the host"] = ["mixed", "index"]
    assert {name: waits[-1] for name, waits in found.items() if waits} == expected


@pytest.mark.parametrize("what", ["sum", "product", "choice", "lists"])
def test_devices_do_not_mix(told, what):
    assert "Expected all tensors to be on the same device" in told["mixing_devices"][what]


def test_a_read_in_a_layer_is_told_with_its_place(told):
    assert told["a_read_in_a_layer"]["places"] == [
        f"linear/function.py: {name}" for name in ("_dgrad", "_fprop", "wgrad")
    ]
