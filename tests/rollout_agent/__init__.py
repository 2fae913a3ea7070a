"""Tests of the rollout agent, without SGLang."""
