"""NVML, in a process of its own: the child that loads NVIDIA's library, and the replay that can stand in for it.

`child` is the program; `protocol` is what goes over its pipe; `description` and `machines` are the replay's
side in the sidecar. Everything else runs in the child only, imports as little as it can and knows nothing of
the sidecar.
"""
