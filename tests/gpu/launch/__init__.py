"""Triton's own way from a call to a launch, with a driver that runs the compiled kernel in the emulator."""
