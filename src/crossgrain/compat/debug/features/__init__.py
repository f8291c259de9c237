"""The directory that ``nvdlfw_inspect`` is given. It runs all files in it, without importing them."""
