"""Megatron-Core's layouts against the checkpoint's."""
