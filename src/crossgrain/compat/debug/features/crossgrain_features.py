"""Run by ``nvdlfw_inspect.api.initialize``: registers the features, and starts to look into layers."""

from crossgrain.compat.debug.registration import register

register()
