"""Communication: topology, collectives, KV transfer, overlap, interconnects; none knows another."""
