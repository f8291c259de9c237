"""All places where crossgrain changes torch, or depends on details of torch that are not public.

Importing crossgrain changes nothing in torch. Each module of this package is one patch. It says why it is needed and
with which version of torch it was tested. It is installed by the first use of the feature that needs it. If torch is
not as expected, it raises or warns.

    lists_of_tensors       collectives on lists of tensors recognise quantized tensors; installed by the first of them
    fsdp_gathers           FSDP2 says whether it gathers for forward or backward; installed by `gather_by_pass(model)`
    transformer_fast_path  `nn.TransformerEncoderLayer` always calls its linear layers; installed by `convert(model)`
    checkpoint_frames      reads from the call stack which activation checkpoint is running; changes nothing
    checkpoint_loads       reads from the call stack whether a distributed checkpoint is loaded; changes nothing
    compiler_marks         marks functions for `torch.compile` without importing the compiler; changes nothing

Registering with torch through its public interfaces (custom operators, safe globals of `torch.load`) is not a patch.
"""

SEEN_WITH = "2.13"
"""The version of torch that all patches were last tested with."""
