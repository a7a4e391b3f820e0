"""Fused tensor operations of the drafter and its heads; they know tensors, not models."""
