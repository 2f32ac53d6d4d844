"""KV below the device: host memory, a disk, a shared store."""
