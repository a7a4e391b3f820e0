"""The serving half: vLLM drafts with this package's heads through subclasses of its own proposers (docs/serving.md)."""
