"""Publishing by several processes together."""
