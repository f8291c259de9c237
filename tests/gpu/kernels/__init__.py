"""The Triton backend against the reference, without a GPU: interpreted, compiled and emulated, and its host code.

`cases` says what is written and read; `agreement` does it twice and compares every byte.
"""
