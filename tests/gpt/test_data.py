"""The text is real, split once, and read the same way every time."""

import torch

from crossgrain.gpt.data import even_batch, load_text, random_batch


def test_the_text_is_pythons_documentation():
    text = load_text()
    assert len(text.train) > 300_000 and len(text.validation) > 30_000
    assert b"exception" in bytes(text.train.tolist())


def test_targets_are_the_bytes_that_follow():
    values = torch.arange(200, dtype=torch.uint8)
    for inputs, following in (
        random_batch(values, 4, 16, torch.Generator().manual_seed(0)),
        even_batch(values, 4, 16),
    ):
        assert inputs.shape == following.shape == (4, 16) and inputs.dtype == torch.int64
        assert torch.equal(following, inputs + 1)


def test_batches_follow_from_the_seed():
    values = load_text().train
    one, other = (random_batch(values, 4, 16, torch.Generator().manual_seed(3))[0] for _ in range(2))
    assert torch.equal(one, other)


def test_validation_reaches_from_the_first_byte_to_the_last():
    values = torch.arange(200, dtype=torch.uint8)
    inputs, following = even_batch(values, 3, 16)
    assert inputs[0, 0] == 0 and following[-1, -1] == 199
