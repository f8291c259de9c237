"""Training programs of others: one module for each, which needs that program to be installed.

    crossgrain.integrations.transformers   CrossgrainCallback and InspectorCallback for transformers.Trainer
    crossgrain.integrations.lightning      CrossgrainPrecision and InspectorCallback for Lightning's Trainer
    crossgrain.integrations.accelerate     prepare, in place of Accelerator.prepare
    crossgrain.integrations.torchtitan     CrossgrainConverter for torchtitan's configurations

None is imported here, and nothing else in crossgrain imports them.
"""
