"""The registry: what versions exist, where their bytes lie, and which one a channel names."""
