"""Interconnects of chips other than NVIDIA's, one file each, behind the same contract."""
