"""Tests of the trainer agent."""
