"""The NVML child: the only process that loads NVIDIA's library; everything in this folder runs there."""
