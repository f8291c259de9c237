"""The whole library on a "cuda" device that the host emulates: where does a training step wait, and is it right?

`device.cpp` is a device for the CPU build of torch. Its memory is the host's, its kernels are those of the CPU, and it
tells whenever a GPU would make the host wait. `report` is the program that runs there, in a process of its own;
`runs` is what it runs. Kernels of crossgrain are the reference, in plain torch.
"""
