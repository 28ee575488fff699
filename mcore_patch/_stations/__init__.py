"""The four stations a checkpoint's tensor passes on its way into a master.

``load`` (at disk precision) -> ``remember`` (what the checkpoint says of a parameter) ->
``masters`` (write them, ``optimizers`` knows where they are) -> ``report`` (say where each came from).

``parameters`` is what the stations know of a single parameter, ``matching`` finds a parameter's tensor in a state
dict by name. Everything here may import torch; nothing here imports megatron at module level.
"""
