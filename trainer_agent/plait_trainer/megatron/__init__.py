"""Converters for models that Megatron-Core trains: its fused, sharded parameters as blocks."""

from plait_trainer.megatron.converter import MegatronConverter, converted
from plait_trainer.megatron.place import ParallelPlace
from plait_trainer.megatron.running import current_place
from plait_trainer.megatron.shape import ModelShape

__all__ = ["MegatronConverter", "ModelShape", "ParallelPlace", "converted", "current_place"]
