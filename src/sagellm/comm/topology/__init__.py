"""What the machine looks like: devices, links between them, and how fast each is."""
