"""Checks for a machine with a GPU: ``make test-gpu`` runs them and writes a report to send back.

Each check is a function that takes a device and returns a `Finding`. Tests call them with the GPU, and are skipped
where there is none; ``without_gpu`` calls them with the CPU and with an emulated device, to know that they work.
"""
