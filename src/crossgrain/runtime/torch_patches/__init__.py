"""Every place where crossgrain changes torch, or depends on what torch does not promise.

Importing crossgrain changes nothing in torch. Each file below is one patch. It says why it is needed and with which
versions of torch it was seen to work; it is installed by the first use of the feature that needs it; and where torch
is not as expected it says so instead of guessing.

    lists_of_tensors       collectives over lists of tensors notice quantized ones; by the first quantized tensor
    fsdp_gathers           FSDP2 says whether it gathers for forward or backward; by `gather_by_pass(model)`
    transformer_fast_path  closes a shortcut of `nn.TransformerEncoderLayer` past its layers; by `convert(model)`
    checkpoint_frames      reads from the call stack which activation checkpoint is running; changes nothing
    compiler_marks         marks functions for `torch.compile` without importing the compiler; changes nothing

Registering with torch through its public interfaces (custom operators, safe globals of `torch.load`) is no patch.
"""

SEEN_WITH = "2.13"
"""The version of torch that all patches were last tested with."""
