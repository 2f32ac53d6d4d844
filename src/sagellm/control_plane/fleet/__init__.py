"""A fleet: several engine instances behind one `EngineCore`."""
