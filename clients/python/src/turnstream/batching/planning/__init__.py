"""Ready groups become the plan of a batch, without reading a token."""
