"""The native REST API below `/v1`, for generators and tools in any language."""
