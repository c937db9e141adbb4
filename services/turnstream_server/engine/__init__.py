"""Workers that run the operations of hosted models: the operations of the Tinker API."""
